"""From paths to a diagnosis: find the traces, read, link and rank each, say what could not be read."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mla_diag.diagnose.attention import copies_before_attention
from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Diagnosis, Finding, Op, StageReport, TraceReport
from mla_diag.diagnose.gpu import gpu_of
from mla_diag.diagnose.notes import notes
from mla_diag.diagnose.pool import Pool, find_pool, pool_from_geometry
from mla_diag.diagnose.ranking import RankedOp, rank_ops
from mla_diag.diagnose.rules import RULES
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage, describe_batch
from mla_diag.diagnose.steps import Steps, busy, find_steps
from mla_diag.errors import UnreadableInputError, UsageError
from mla_diag.trace.columns import MISSING, Ints
from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import Links, link
from mla_diag.trace.model import Trace

Progress = Callable[[Path, int, int], None]
"""Called with a file, the bytes of it read so far, and its size."""

_NANOS_PER_MS = 1e6
_TRACE_SUFFIXES = (".json", ".json.gz")


def explain(
    paths: str | Path | Iterable[str | Path],
    *,
    stage: Stage | str | None = None,
    rank: int | None = None,
    warmup: int = 0,
    sources: bool = True,
    server: ServerInfo | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Say where the steps in some traces spend their time.

    Args:
        paths: Trace files, directories of them, or glob patterns.
        stage: Report this stage only.
        rank: Report this rank only.
        warmup: Steps to leave out at the head of each stage.
        sources: Whether to name the function that launched each op, which takes reading the Python frames.
        server: What the server that was traced says of itself (see `mla_diag.diagnose.server_info`).
        progress: Told how far reading is.

    Raises:
        UnreadableInputError: Nothing could be explained. If only some paths could not, the diagnosis lists them.
        UsageError: A path pattern matches nothing, or the traces hold no such stage or rank.
    """
    wanted = None if stage is None else Stage(stage)
    traces: list[TraceReport] = []
    stages: list[StageReport] = []
    findings: list[Finding] = []
    unreadable: list[str] = []
    for path in find_traces([paths] if isinstance(paths, (str, Path)) else paths):
        try:
            report = None if progress is None else _for_file(progress, path)
            for trace in read_trace(path, frames=sources, progress=report).by_rank():
                if rank is None or trace.rank == rank:
                    found = explain_trace(trace, len(traces), warmup, server)
                    traces.append(found.summary)
                    stages += [entry for entry in found.stages if wanted in (None, entry.stage)]
                    findings += [entry for entry in found.findings if wanted in (None, entry.stage)]
        except UnreadableInputError as error:
            unreadable.append(str(error))
    if not traces:
        if unreadable:
            raise UnreadableInputError("\n".join(unreadable))
        raise UsageError(f"no trace of rank {rank} among those given; leave --rank out to see which there are")
    if wanted is not None and not stages:
        raise UsageError(f"no {wanted.value} steps in these traces; leave --stage out to see which there are")
    findings.sort(key=lambda finding: -(finding.cost_ms_per_step or 0.0))
    return Diagnosis(traces=traces, stages=stages, findings=findings, unreadable=unreadable)


def find_traces(paths: Iterable[str | Path]) -> list[Path]:
    """The trace files that some files, directories and glob patterns stand for, each once, in order.

    Raises:
        UsageError: A pattern or a directory holds none.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(_TRACE_SUFFIXES))
            inside = [file for file in inside if not file.name.endswith("server_info.json")]
        elif not path.exists() and glob.has_magic(str(given)):
            inside = sorted(map(Path, glob.glob(str(given), recursive=True)))  # noqa: PTH207 - any pattern, not of one root
        else:
            inside = [path]
        if not inside:
            raise UsageError(f"{given}: no trace (.json or .json.gz) there; name a trace or the directory it is in")
        found.update(dict.fromkeys(inside))
    return list(found)


class TraceDiagnosis(NamedTuple):
    """What is said of one rank's trace."""

    summary: TraceReport
    stages: list[StageReport]
    findings: list[Finding]


def explain_trace(trace: Trace, index: int = 0, warmup: int = 0, server: ServerInfo | None = None) -> TraceDiagnosis:
    """Explain one rank's trace.

    Args:
        trace: The trace.
        index: Its place among the traces of a diagnosis.
        warmup: Steps to leave out at the head of each stage.
        server: What the server says of itself.

    Raises:
        UnreadableInputError: It holds no device work, and not because it was cut off.
    """
    events = trace.device_events
    if not len(events) and not trace.damage.truncated:
        raise UnreadableInputError(
            f"{trace.path}: no device work among its {trace.event_count:,} events, only the host's; "
            "profile with GPU activities, and with no other profiler attached to the GPU"
        )
    links = link(trace)
    steps = find_steps(trace, links, warmup)
    placed = np.where(steps.inside != MISSING, steps.inside, steps.after)
    left_out = (placed != MISSING) & ~steps.counted[placed] if len(steps.counted) else np.zeros(len(events), bool)
    launched = links.launch != MISSING

    def milliseconds(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        return float(events.duration[mask].sum()) / _NANOS_PER_MS

    summary = TraceReport(
        path=str(trace.path),
        rank=trace.rank,
        label=trace.label,
        device=trace.device,
        events=trace.event_count,
        device_ms=float(events.duration.sum()) / _NANOS_PER_MS,
        before_first_step_ms=milliseconds((placed == MISSING) & launched),
        left_out_ms=milliseconds(left_out),
        unattributed_ms=milliseconds((placed == MISSING) & ~launched),
        notes=notes(trace, links, steps),
    )
    ranked = {stage: _ranked(trace, links, steps, stage) for stage in Stage if len(steps.of(stage))}
    gpu, pool = gpu_of(trace), _pool(trace, steps, ranked, server)
    reports, findings = [], []
    for stage, rows in ranked.items():
        report = _stage_report(trace, steps, stage, index, [row.op for row in rows])
        case = StageCase(trace, links, steps, report, rows, gpu, pool, server)
        findings += [finding for rule in RULES.values() for finding in rule(case)]
        reports.append(report)
    return TraceDiagnosis(summary, reports, findings)


def _ranked(trace: Trace, links: Links, steps: Steps, stage: Stage) -> list[RankedOp]:
    chosen = steps.of(stage)
    return rank_ops(trace, links, np.flatnonzero(np.isin(steps.inside, chosen)), len(chosen))


def _pool(trace: Trace, steps: Steps, ranked: dict[Stage, list[RankedOp]], server: ServerInfo | None) -> Pool | None:
    """The pool, by the server or by shapes, else by what is copied before attention."""
    names = [name for number, name in enumerate(steps.spans.names) if steps.counted[number]]
    pool = find_pool((row.op for rows in ranked.values() for row in rows), names, server)
    if pool is None:
        events = np.flatnonzero((steps.inside != MISSING) & steps.counted[steps.inside])
        pool = pool_from_geometry([copy.elements.most for copy in copies_before_attention(trace, events)], names)
    return pool


def _stage_report(trace: Trace, steps: Steps, stage: Stage, index: int, ops: list[Op]) -> StageReport:
    events, chosen = trace.device_events, steps.of(stage)
    count = len(chosen)
    inside = [np.flatnonzero(steps.inside == step) for step in chosen]
    device = [float(events.duration[rows].sum()) / _NANOS_PER_MS for rows in inside]
    union = sum(busy(events.start[rows], events.end[rows]) for rows in inside)
    of_stage = [number for number, other in enumerate(steps.spans.stages) if other is stage]
    return StageReport(
        stage=stage,
        trace=index,
        rank=trace.rank,
        steps=count,
        steps_left_out=len(of_stage) - count,
        step_source=steps.spans.source,
        step_names=dict(describe_batch([steps.spans.names[step] for step in chosen])),
        device_ms_per_step=sum(device) / count,
        device_ms_min=min(device),
        device_ms_max=max(device),
        busy_ms_per_step=union / count / _NANOS_PER_MS,
        wall_ms_per_step=_wall(trace, steps, chosen) / _NANOS_PER_MS,
        between_steps_ms_per_step=float(events.duration[np.isin(steps.after, chosen)].sum()) / count / _NANOS_PER_MS,
        ops=ops,
    )


def _wall(trace: Trace, steps: Steps, chosen: Ints) -> float:
    """The median time from a step's first device event to the next step's first, whatever stage that is of.

    The median, because a server that waits for a request between two steps spends no step's time. The last step of a
    trace has no next; if there is none but it, its time runs to its last device event.
    """
    events = trace.device_events
    first, last = {}, {}
    for step in np.unique(steps.inside[steps.inside != MISSING]).tolist():
        rows = steps.inside == step
        first[step], last[step] = int(events.start[rows].min()), int(events.end[rows].max())
    spans = [first[step + 1] - first[step] for step in chosen.tolist() if step in first and step + 1 in first]
    spans = spans or [last[step] - first[step] for step in chosen.tolist() if step in first]
    return float(np.median(spans)) if spans else 0.0


def _for_file(progress: Progress, path: Path) -> Callable[[int, int], None]:
    return lambda done, size: progress(path, done, size)
