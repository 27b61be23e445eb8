"""What commands share: choices among options, where output goes, a bar while traces are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mla_diag.diagnose.explain import Progress as Report
from mla_diag.diagnose.step_spans import Stage
from mla_diag.errors import UsageError
from mla_diag.report.visible import visible
from mla_diag.trace.remote import TraceFile

Choice = TypeVar("Choice", bound=Enum)

# Below this a trace is explained before a bar could be read.
_BAR_FROM_BYTES = 2 * 1024 * 1024


class Format(str, Enum):
    """The outputs that a report comes in."""

    TERMINAL = "terminal"
    JSON = "json"


def parse_format(text: str) -> Format:
    """The output of that name."""
    return parse_choice(Format, text, "--format")


def parse_stage(text: str | None) -> Stage | None:
    """The stage of that name, or None for all."""
    return None if text is None else parse_choice(Stage, text, "--stage")


def parse_shape(text: str) -> tuple[int, int]:
    """Requests and tokens of each out of `16x8192`.

    Raises:
        UsageError: It is no such thing.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"--shape {text}: not BATCHxCONTEXT, such as 16x8192")
    return int(match[1]), int(match[2])


def parse_choice(kind: type[Choice], text: str, option: str) -> Choice:
    """The member of that value, whatever its case.

    Raises:
        UsageError: There is none; the message names the option.
    """
    try:
        return kind(text.lower())
    except ValueError:
        choices = ", ".join(member.value for member in kind)
        raise UsageError(f"{option} {text}: not one of {choices}") from None


def check_output(output: Path | None) -> None:
    """Say that an output cannot be written before anything long is begun.

    Raises:
        UsageError: Its directory does not exist, it is one itself, or it may not be written.
    """
    if output is None:
        return
    try:
        there, is_directory = output.exists(), output.is_dir()
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}; write elsewhere") from error
    if not output.parent.is_dir():
        raise UsageError(f"{output}: there is no directory {output.parent}; make it, or write elsewhere")
    if is_directory:
        raise UsageError(f"{output}: is a directory; name a file in it")
    if not os.access(output if there else output.parent, os.W_OK):
        raise UsageError(f"{output}: may not be written; write elsewhere")


def plain_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that prints text as it is: paths and names may hold what rich takes for markup or an emoji."""
    return Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)


@contextmanager
def destination(output: Path | None) -> Iterator[Console]:
    """Where a report goes: standard output, or a file.

    Raises:
        UsageError: It cannot be written.
    """
    if output is None:
        yield plain_console()
        return
    try:
        with output.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield plain_console(file)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error


@contextmanager
def reading_progress(files: Sequence[TraceFile]) -> Iterator[Report | None]:
    """A bar on the terminal's error stream while large traces are read, and gone before the report."""
    console = plain_console(stderr=True)
    # What is on another host is fetched first, and its size is not known before.
    local = [file for file in files if isinstance(file, Path)]
    size = sum(file.stat().st_size for file in local if file.is_file())
    if not console.is_terminal or size < _BAR_FROM_BYTES:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {file: bar.add_task(visible(file.name)[-40:], start=False, visible=False, total=None) for file in local}

        def report(file: TraceFile, done: int, total: int) -> None:
            if not isinstance(file, Path):
                return
            task = tasks[file]
            if done < total:
                bar.start_task(task)
            bar.update(task, completed=done, total=total, visible=done < total)

        yield report
