"""`mla-diag compare`: two recordings or reports of the same work, before and after a change."""

from __future__ import annotations

import re
from pathlib import Path

from mla_diag.commands.common import Format, check_output, destination, reading_progress
from mla_diag.commands.signals import ended_by_signals
from mla_diag.diagnose.compare import Comparison, compare
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.explain import explain, find_traces
from mla_diag.diagnose.saved_report import read_report
from mla_diag.diagnose.step_spans import Stage
from mla_diag.errors import SlowerError, UnreadableInputError, UsageError
from mla_diag.report.comparison import print_comparison
from mla_diag.report.json import render_json
from mla_diag.trace.remote import TraceFile, trace_file


@ended_by_signals()
def run(
    before: str | Path,
    after: str | Path,
    *,
    output_format: Format = Format.TERMINAL,
    output: Path | None = None,
    top: int = 10,
    fail_on_slower: str | None = None,
    scheduler: str | None = None,
) -> None:
    """Compare and print or write what changed.

    Raises:
        SlowerError: A stage takes longer than `fail_on_slower` allows; the comparison has been given by then.
        UnreadableInputError: One of the two cannot be read, or what a stage takes cannot be told from them, so that
            `fail_on_slower` cannot be judged; then the comparison has been given too.
        UsageError: They have no stage in common, or an option makes no sense.
    """
    limit = None if fail_on_slower is None else _parse_limit(fail_on_slower)
    check_output(output)
    comparison = compare(_diagnosis(before, scheduler), _diagnosis(after, scheduler))
    if not comparison.stages:
        raise UsageError(
            f"{trace_file(before)} and {trace_file(after)} have no stage in common: "
            f"{_stages(comparison.only_before)} against {_stages(comparison.only_after)}"
        )
    with destination(output) as console:
        if output_format is Format.JSON:
            console.file.write(render_json(comparison))
        else:
            print_comparison(comparison, console, top)
    if limit is not None:
        _judge(comparison, limit, f"--fail-on-slower {fail_on_slower}")


def _judge(comparison: Comparison, limit: float, option: str) -> None:
    if comparison.slowdown > limit * (1 + 1e-9):  # 5% of 100 ms are not 5 ms to the last bit
        raise SlowerError(f"{option}: a step takes {comparison.slowdown:.1%} longer than before")
    if comparison.only_before:
        raise UnreadableInputError(f"{option} cannot be judged: {_stages(comparison.only_before)} is only before")
    untold = [change.stage for change in comparison.stages if not change.speedup]
    if untold:
        why = "; ".join(comparison.doubts) or "a side has no device time"
        raise UnreadableInputError(f"{option} cannot be judged for {_stages(untold)}: {why}")


def _diagnosis(given: str | Path, scheduler: str | None) -> Diagnosis:
    """A report that `explain --format json` wrote, or what it would say of traces."""
    path = trace_file(given)
    report = read_report(path) if isinstance(path, Path) and path.is_file() else None
    diagnosis = report or _explained(path, scheduler)
    if diagnosis.unreadable:
        raise UnreadableInputError("\n".join(diagnosis.unreadable))
    if not diagnosis.stages:
        notes = "; ".join(note for trace in diagnosis.traces for note in trace.notes)
        raise UnreadableInputError(f"{path}: no step of it can be compared: {notes or 'it holds none'}")
    return diagnosis


def _explained(path: TraceFile, scheduler: str | None) -> Diagnosis:
    files = find_traces([path])
    with reading_progress(files) as progress:
        return explain(files, scheduler=scheduler, progress=progress)


def _parse_limit(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text.strip())
    if match is None:
        raise UsageError(f"--fail-on-slower {text}: no percentage; write --fail-on-slower 5%")
    return float(match[1]) / 100


def _stages(stages: list[Stage]) -> str:
    return ", ".join(stage.value for stage in stages) or "none"
