"""`mla-diag compare`: two recordings or reports of the same work, before and after a change."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from mla_diag.commands.common import Format, check_output, destination, reading_progress
from mla_diag.diagnose.compare import compare
from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Diagnosis
from mla_diag.diagnose.explain import explain, find_traces
from mla_diag.diagnose.step_spans import Stage
from mla_diag.errors import SlowerError, UnreadableInputError, UsageError
from mla_diag.report.comparison import print_comparison
from mla_diag.report.json import render_json
from mla_diag.trace.remote import trace_file

# Where a report begins; a trace has schemaVersion instead.
_REPORT = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*(\d+)')


def run(
    before: str | Path,
    after: str | Path,
    *,
    output_format: Format = Format.TERMINAL,
    output: Path | None = None,
    top: int = 10,
    fail_on_slower: str | None = None,
) -> None:
    """Compare and print or write what changed.

    Raises:
        SlowerError: A stage takes longer than `fail_on_slower` allows; the comparison has been given by then.
        UnreadableInputError: One of the two cannot be read.
        UsageError: They have no stage in common, or an option makes no sense.
    """
    limit = None if fail_on_slower is None else _parse_limit(fail_on_slower)
    check_output(output)
    comparison = compare(_diagnosis(before), _diagnosis(after))
    if not comparison.stages:
        raise UsageError(
            f"{before} and {after} have no stage in common: {_stages(comparison.only_before)} against "
            f"{_stages(comparison.only_after)}"
        )
    with destination(output) as console:
        if output_format is Format.JSON:
            console.file.write(render_json(comparison))
        else:
            print_comparison(comparison, console, top)
    if limit is not None and comparison.slowdown > limit:
        raise SlowerError(
            f"--fail-on-slower {fail_on_slower}: a step takes {comparison.slowdown:.1%} longer than before"
        )


def _diagnosis(given: str | Path) -> Diagnosis:
    """A report that `explain --format json` wrote, or what it would say of traces."""
    path = trace_file(given)
    version = _version(path) if isinstance(path, Path) and path.is_file() else None
    if isinstance(path, Path) and version is not None:
        return _read_report(path, version)
    files = find_traces([path])
    with reading_progress(files) as progress:
        diagnosis = explain(files, progress=progress)
    if diagnosis.unreadable:
        raise UnreadableInputError("\n".join(diagnosis.unreadable))
    return diagnosis


def _version(path: Path) -> int | None:
    """The schema version of a report; None for another file, also for one that cannot be read: its reader says why."""
    try:
        with path.open("rb") as file:
            head = _REPORT.match(file.read(256))
    except OSError:
        return None
    return None if head is None else int(head[1])


def _read_report(path: Path, version: int) -> Diagnosis:
    if version != SCHEMA_VERSION:
        raise UnreadableInputError(
            f"{path}: a report of schema version {version}, and this mla-diag reads {SCHEMA_VERSION}; "
            "give the traces, or explain them again"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Diagnosis)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableInputError(f"{path}: not a report of mla-diag's ({error}); explain the traces again") from error


def _parse_limit(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None:
        raise UsageError(f"--fail-on-slower {text}: no percentage; write --fail-on-slower 5%")
    return float(match[1]) / 100


def _stages(stages: list[Stage]) -> str:
    return ", ".join(stage.value for stage in stages) or "none"
