"""`mla-diag explain`: rank what the steps in some traces spend their time on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.explain import Progress as Report
from mla_diag.diagnose.explain import explain, find_traces
from mla_diag.diagnose.rules import KINDS
from mla_diag.diagnose.server_info import read_server_info
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.verdict import FailOn, parse_fail_on
from mla_diag.errors import FindingError, UnreadableInputError, UsageError
from mla_diag.report.json import render_json
from mla_diag.report.terminal import print_report

Choice = TypeVar("Choice", bound=Enum)

# Below this a trace is explained before a bar could be read.
_BAR_FROM_BYTES = 2 * 1024 * 1024


class Format(str, Enum):
    """The outputs that a report comes in."""

    TERMINAL = "terminal"
    JSON = "json"


def parse_format(text: str) -> Format:
    """The output of that name."""
    return _member(Format, text, "--format")


def parse_stage(text: str | None) -> Stage | None:
    """The stage of that name, or None for all."""
    return None if text is None else _member(Stage, text, "--stage")


def _member(kind: type[Choice], text: str, option: str) -> Choice:
    try:
        return kind(text.lower())
    except ValueError:
        choices = ", ".join(member.value for member in kind)
        raise UsageError(f"{option} {text}: not one of {choices}") from None


def run(
    paths: list[Path],
    *,
    output_format: Format = Format.TERMINAL,
    output: Path | None = None,
    top: int = 10,
    stage: Stage | None = None,
    rank: int | None = None,
    warmup: int = 0,
    sources: bool = True,
    server_info: Path | None = None,
    mapping: Path | None = None,
    fail_on: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> None:
    """Explain the traces and print or write the report.

    Raises:
        FindingError: A finding that `fail_on` names is there; the report has been given by then.
        UnreadableInputError: Some path could not be explained; the report of the others has been given by then.
        UsageError: The options match nothing in the traces, or the output cannot be written.
    """
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"{output}: there is no directory {output.parent}; make it, or write elsewhere with -o")
    failures = [parse_fail_on(text, KINDS) for text in fail_on]
    server = None if server_info is None else read_server_info(server_info)
    files = find_traces(paths)
    with _progress(files) as progress:
        diagnosis = explain(
            files,
            stage=stage,
            rank=rank,
            warmup=warmup,
            sources=sources,
            server=server,
            mapping=mapping,
            ignore=ignore,
            progress=progress,
        )
    try:
        with _destination(output) as console:
            if output_format is Format.JSON:
                console.file.write(render_json(diagnosis))
            else:
                print_report(diagnosis, console, top)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    if diagnosis.unreadable:
        raise UnreadableInputError("\n".join(diagnosis.unreadable))
    fail_on_findings(diagnosis, failures)


def fail_on_findings(diagnosis: Diagnosis, failures: Sequence[FailOn]) -> None:
    """End the command if a finding is there that it was told to fail on.

    Raises:
        FindingError: One is.
    """
    failed = [finding for finding in diagnosis.findings if any(failure.holds(finding) for failure in failures)]
    if failed:
        raise FindingError(
            "\n".join(
                f"--fail-on {entry.kind}: {diagnosis.traces[entry.trace].path}: {entry.title}" for entry in failed
            )
        )


@contextmanager
def _destination(output: Path | None) -> Iterator[Console]:
    if output is None:
        yield Console(highlight=False)
        sys.stdout.flush()
        return
    with output.open("w", encoding="utf-8") as file:
        yield Console(file=file, highlight=False)


@contextmanager
def _progress(files: list[Path]) -> Iterator[Report | None]:
    """A bar on the terminal's error stream while large traces are read, and gone before the report."""
    console = Console(stderr=True)
    size = sum(file.stat().st_size for file in files if file.is_file())
    if not console.is_terminal or size < _BAR_FROM_BYTES:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {file: bar.add_task(file.name[-40:], start=False, visible=False, total=None) for file in files}

        def report(file: Path, done: int, total: int) -> None:
            task = tasks[file]
            if done < total:
                bar.start_task(task)
            bar.update(task, completed=done, total=total, visible=done < total)

        yield report
