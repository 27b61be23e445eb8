"""`mla-diag explain`: rank what the steps in some traces spend their time on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mla_diag.commands.common import Format, check_output, destination, reading_progress
from mla_diag.commands.signals import ended_by_signals
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.explain import explain, find_traces
from mla_diag.diagnose.rules import KINDS
from mla_diag.diagnose.server_info import read_server_info
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.verdict import FailOn, parse_fail_on
from mla_diag.errors import FindingError, UnreadableInputError
from mla_diag.report.json import render_json
from mla_diag.report.terminal import print_report
from mla_diag.report.visible import visible


@ended_by_signals()
def run(
    paths: Sequence[str | Path],
    *,
    output_format: Format = Format.TERMINAL,
    output: Path | None = None,
    top: int = 10,
    stage: Stage | None = None,
    rank: str | None = None,
    warmup: int = 0,
    sources: bool = True,
    server_info: Path | None = None,
    mapping: str | None = None,
    fail_on: Sequence[str] = (),
    ignore: Sequence[str] = (),
    scheduler: str | None = None,
) -> None:
    """Explain the traces and print or write the report.

    Raises:
        FindingError: A finding that `fail_on` names is there; the report has been given by then.
        UnreadableInputError: Some path could not be explained; the report of the others has been given by then.
        UsageError: The options match nothing in the traces, or the output cannot be written.
    """
    check_output(output)
    failures = [parse_fail_on(text, KINDS) for text in fail_on]
    server = None if server_info is None else read_server_info(server_info)
    files = find_traces(paths)
    with reading_progress(files) as progress:
        diagnosis = explain(
            files,
            stage=stage,
            rank=rank,
            warmup=warmup,
            sources=sources,
            server=server,
            mapping=mapping,
            ignore=ignore,
            scheduler=scheduler,
            progress=progress,
        )
    with destination(output) as console:
        if output_format is Format.JSON:
            console.file.write(render_json(diagnosis))
        else:
            print_report(diagnosis, console, top)
    if diagnosis.unreadable:
        raise UnreadableInputError("\n".join(diagnosis.unreadable))
    fail_on_findings(diagnosis, failures)


def fail_on_findings(diagnosis: Diagnosis, failures: Sequence[FailOn]) -> None:
    """End the command if a finding is there that it was told to fail on.

    Raises:
        FindingError: One is.
        UnreadableInputError: It was told so, and there is no step that could have one.
    """
    if failures and not diagnosis.stages:
        paths = ", ".join(dict.fromkeys(trace.path for trace in diagnosis.traces))
        raise UnreadableInputError(f"{paths}: no step could be measured, so --fail-on cannot be judged; see the notes")
    failed = [finding for finding in diagnosis.findings if any(failure.holds(finding) for failure in failures)]
    if failed:
        raise FindingError(
            "\n".join(
                visible(f"--fail-on {entry.kind}: {diagnosis.traces[entry.trace].path}: {entry.title}")
                for entry in failed
            )
        )
