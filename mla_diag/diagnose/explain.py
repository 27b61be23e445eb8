"""From paths to a diagnosis: find the traces, read and explain each, say what could not be read."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from mla_diag.diagnose.diagnosis import Diagnosis, Finding, StageReport, TraceReport
from mla_diag.diagnose.mapping import read_reference
from mla_diag.diagnose.per_trace import FileDiagnosis, Known, explain_file
from mla_diag.diagnose.rules import CROSS_RULES, KINDS
from mla_diag.diagnose.saved_report import report_version
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.verdict import check_ignored
from mla_diag.diagnose.workers import on_workers
from mla_diag.errors import UnreadableInputError, UsageError
from mla_diag.trace.decode import read_trace
from mla_diag.trace.rank import parse_rank
from mla_diag.trace.remote import RemoteFile, TraceFile, trace_file, traces_at

Progress = Callable[[TraceFile, int, int], None]
"""Called with a file, the bytes of it read so far, and its size."""

_TRACE_SUFFIXES = (".json", ".json.gz")


def explain(
    paths: str | Path | Iterable[str | TraceFile],
    *,
    stage: Stage | str | None = None,
    rank: int | str | None = None,
    warmup: int = 0,
    sources: bool = True,
    server: ServerInfo | None = None,
    mapping: str | Path | None = None,
    ignore: Iterable[str] = (),
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Say where the steps in some traces spend their time.

    Args:
        paths: Trace files, directories of them, or glob patterns; local, or URLs that fsspec knows.
        stage: Report this stage only.
        rank: Report this rank only: its number, or coordinates such as `TP1-DP0` or `DP1`.
        warmup: Steps to leave out at the head of each stage.
        sources: Whether to name the function that launched each op, which takes reading the Python frames.
        server: What the server that was traced says of itself (see `mla_diag.diagnose.server_info`).
        mapping: A trace of the same server that has ops, to name those of graph replays (see
            `mla_diag.diagnose.mapping`).
        ignore: Kinds of finding to leave out, or one.
        scheduler: Explain several files at a time: `processes` of this machine, or a Dask scheduler's address.
        progress: Told how far reading is, where they are explained one after the other.

    Raises:
        UnreadableInputError: Nothing could be explained. If only some paths could not, the diagnosis lists them.
        UsageError: No path is given, a pattern matches nothing, an argument is none of its kind, or the traces hold no
            such stage or rank.
        WorkersError: What `scheduler` names cannot be reached or does not do it.
    """
    wanted = None if stage is None else _stage(stage)
    if warmup < 0:
        raise UsageError(f"--warmup {warmup}: a number of steps is not below 0")
    of_rank = None if rank is None else parse_rank(str(rank))
    if rank is not None and of_rank is None:
        raise UsageError(f"--rank {rank}: no rank; write a number, or TP1-DP0, or DP1")
    ignored = check_ignored([ignore] if isinstance(ignore, str) else ignore, KINDS)
    reference = None if mapping is None else read_reference(read_trace(trace_file(mapping)).by_rank()[0])
    known = Known(warmup, server, reference)
    traces: list[TraceReport] = []
    stages: list[StageReport] = []
    findings: list[Finding] = []
    unreadable: list[str] = []
    files = find_traces([paths] if isinstance(paths, (str, Path)) else paths)
    explain_one = partial(explain_file, known=known, sources=sources, rank=of_rank)
    if scheduler is not None:
        said: Iterable[FileDiagnosis] = on_workers(explain_one, files, scheduler)
    elif progress is not None:
        said = (explain_one(file, progress=_for_file(progress, file)) for file in files)
    else:
        said = map(explain_one, files)
    for of_file in said:
        unreadable += of_file.unreadable
        for of_trace in of_file.traces:
            found = of_trace.at(len(traces))
            traces.append(found.summary)
            stages += [entry for entry in found.stages if wanted in (None, entry.stage)]
            findings += found.findings
    if not traces:
        if unreadable:
            raise UnreadableInputError("\n".join(unreadable))
        if rank is None:
            raise UsageError("no trace is given; name traces or the directory they are in")
        raise UsageError(f"no trace of rank {rank} among those given; leave --rank out to see which there are")
    if wanted is not None and not stages:
        left = f" that --warmup {warmup} leaves" if warmup else " that can be counted"
        raise UsageError(f"no {wanted.value} steps in these traces{left}; leave --stage out to see which there are")
    findings += [finding for rule in CROSS_RULES.values() for finding in rule(stages, traces)]
    findings = [
        finding
        for finding in findings
        # A finding of the whole trace is of each of its stages.
        if finding.kind not in ignored and (wanted is None or finding.stage in (None, wanted))
    ]
    findings.sort(key=lambda finding: -(finding.cost_ms_per_step or 0.0))
    return Diagnosis(traces=traces, stages=stages, findings=findings, unreadable=unreadable)


def _stage(name: Stage | str) -> Stage:
    try:
        return Stage(name)
    except ValueError:
        raise UsageError(f"stage {name}: not one of {', '.join(stage.value for stage in Stage)}") from None


def find_traces(paths: Iterable[str | TraceFile]) -> list[TraceFile]:
    """The trace files that some files, directories, glob patterns and URLs of such stand for, each once, in order.

    Raises:
        UnreadableInputError: A URL of a directory or pattern cannot be reached, or a local one may not be looked into.
        UsageError: A pattern or a directory holds none.
    """
    found: dict[TraceFile, None] = {}
    for given in paths:
        path = trace_file(given)
        inside: Sequence[TraceFile]
        try:
            inside = traces_at(path.url, _is_trace) if isinstance(path, RemoteFile) else _local_traces(path)
        except OSError as error:
            raise UnreadableInputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
        if not inside:
            raise UsageError(f"{path}: no trace (.json or .json.gz) there; name a trace or the directory it is in")
        found.update(dict.fromkeys(inside))
    return list(found)


def _local_traces(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if _is_trace(file.name) and report_version(file) is None)
    if not path.exists() and glob.has_magic(str(path)):
        return sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - any pattern, not of one root
    return [path]


def _is_trace(name: str) -> bool:
    return name.endswith(_TRACE_SUFFIXES) and not name.endswith("server_info.json")


def _for_file(progress: Progress, path: TraceFile) -> Callable[[int, int], None]:
    return lambda done, size: progress(path, done, size)
