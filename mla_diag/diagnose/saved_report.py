"""A report that `explain --format json` wrote, read back."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

import msgspec

from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Diagnosis
from mla_diag.errors import UnreadableInputError

_BOM = b"\xef\xbb\xbf"
# Where a report begins; a trace has schemaVersion instead.
_HEAD = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*(\d+)')


def report_version(path: Path) -> int | None:
    """The schema version of a report; None for another file, also for one that cannot be read: its reader says why."""
    try:
        head = _HEAD.match(_text(path, 256))
    except (OSError, EOFError, zlib.error):
        return None
    return None if head is None else int(head[1])


def read_report(path: Path) -> Diagnosis | None:
    """Read a report; None for a file that is none.

    Raises:
        UnreadableInputError: It is of another schema version, or not what `explain` writes.
    """
    version = report_version(path)
    if version is None:
        return None
    if version != SCHEMA_VERSION:
        raise UnreadableInputError(
            f"{path}: a report of schema version {version}, and this mla-diag reads {SCHEMA_VERSION}; "
            "give the traces, or explain them again"
        )
    try:
        diagnosis = msgspec.json.decode(_text(path), type=Diagnosis)
        _check(diagnosis)
    except (OSError, EOFError, zlib.error, ValueError) as error:  # msgspec's errors are ValueErrors
        raise UnreadableInputError(f"{path}: not a report of mla-diag's ({error}); explain the traces again") from error
    return diagnosis


def _text(path: Path, size: int = -1) -> bytes:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as file:
        return file.read(size).removeprefix(_BOM)


def _check(diagnosis: Diagnosis) -> None:
    """See that what the types allow can be worked with.

    Raises:
        ValueError: An op has no kernels or no launches, a stage or finding is of no trace, or something is below zero.
    """
    for finding in diagnosis.findings:
        if not 0 <= finding.trace < len(diagnosis.traces):
            raise ValueError(f"{finding.kind} is of trace {finding.trace}, and there are {len(diagnosis.traces)}")
    for stage in diagnosis.stages:
        if not 0 <= stage.trace < len(diagnosis.traces):
            raise ValueError(f"{stage.stage.value} is of trace {stage.trace}, and there are {len(diagnosis.traces)}")
        if min(stage.steps, stage.device_ms_per_step, stage.busy_ms_per_step) < 0:
            raise ValueError(f"{stage.stage.value} has steps or times below zero")
        for op in stage.ops:
            if not op.kernels or op.launches_per_step <= 0:
                raise ValueError(f"{stage.stage.value} has an op without kernels or launches, {op.kernel}")
