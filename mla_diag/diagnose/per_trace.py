"""One rank's trace to its figures and findings: linked, cut into steps, ranked, and looked at by every rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from mla_diag.diagnose.attention import copies_before_attention
from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Finding, Op, StageReport, TraceReport
from mla_diag.diagnose.gpu import gpu_of
from mla_diag.diagnose.mapping import Mapping, Reference, map_kernels
from mla_diag.diagnose.notes import notes
from mla_diag.diagnose.pool import Pool, find_pools, pool_from_geometry
from mla_diag.diagnose.ranking import RankedOp, rank_ops
from mla_diag.diagnose.rules import RULES
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage, describe_batch
from mla_diag.diagnose.steps import Steps, busy, find_steps
from mla_diag.diagnose.words import count
from mla_diag.errors import UnreadableInputError
from mla_diag.trace.columns import MISSING, NANOS_PER_MS, Ints
from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import Links, link
from mla_diag.trace.model import Trace
from mla_diag.trace.rank import Coordinates
from mla_diag.trace.remote import TraceFile


class Known(NamedTuple):
    """What is known beside a trace.

    Attributes:
        warmup: Steps to leave out at the head of each stage.
        server: What the server says of itself.
        reference: What the same server launches where ops are recorded.
    """

    warmup: int = 0
    server: ServerInfo | None = None
    reference: Reference | None = None


class TraceDiagnosis(NamedTuple):
    """What is said of one rank's trace, as if it were the only one."""

    summary: TraceReport
    stages: list[StageReport]
    findings: list[Finding]

    def at(self, index: int) -> TraceDiagnosis:
        """The same, of the trace at that place among several."""
        stages = [msgspec.structs.replace(stage, trace=index) for stage in self.stages]
        return TraceDiagnosis(
            self.summary, stages, [msgspec.structs.replace(finding, trace=index) for finding in self.findings]
        )


class FileDiagnosis(NamedTuple):
    """What is said of a file: of each rank in it, and why of the others nothing can be."""

    traces: list[TraceDiagnosis]
    unreadable: list[str]


def explain_file(
    file: TraceFile,
    known: Known,
    *,
    sources: bool = True,
    rank: int | Coordinates | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FileDiagnosis:
    """Read a file and explain the traces in it; what cannot be read is no error here, as there may be other files.

    Args:
        file: Where it is.
        known: What is known beside it.
        sources: Whether to name the function that launched each op, which takes reading the Python frames.
        rank: Explain this rank only.
        progress: Told how many bytes of how many have been read.
    """
    try:
        ranks = read_trace(file, frames=sources, progress=progress).by_rank()
    except UnreadableInputError as error:
        return FileDiagnosis([], [str(error)])
    said = FileDiagnosis([], [])
    for trace in ranks:
        if rank is None or _is_of(trace, rank):
            try:
                said.traces.append(explain_trace(trace, known))
            except UnreadableInputError as error:
                said.unreadable.append(str(error))
    return said


def explain_trace(trace: Trace, known: Known | None = None) -> TraceDiagnosis:
    """Explain one rank's trace.

    Args:
        trace: The trace.
        known: What is known beside it.

    Raises:
        UnreadableInputError: It holds no device work, and not because it was cut off.
    """
    known = known or Known()
    events = trace.device_events
    if not len(events) and not trace.damage.truncated:
        if untimed := trace.damage.untimed_device_events:
            raise UnreadableInputError(
                f"{trace.path}: none of the times of its {count(untimed, 'device event')} can be read: they are "
                "missing, no numbers or out of range; profile again"
            )
        part = "" if trace.label is None else f" that is of {trace.label}"
        raise UnreadableInputError(
            f"{trace.path}: no device work among its {trace.event_count:,} events{part}, only the host's; "
            "profile with GPU activities, and with no other profiler attached to the GPU"
        )
    links = link(trace)
    steps = find_steps(trace, links, known.warmup)
    placed = np.where(steps.inside != MISSING, steps.inside, steps.after)
    left_out = (placed != MISSING) & ~steps.counted[placed] if len(steps.counted) else np.zeros(len(events), bool)
    launched = links.launch != MISSING

    def milliseconds(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        return float(events.duration[mask].sum()) / NANOS_PER_MS

    mapping = None
    if known.reference is not None:
        mapping = map_kernels(trace, links, steps.inside, steps.spans.stages, known.reference)
    gpu = gpu_of(trace)
    summary = TraceReport(
        path=str(trace.path),
        rank=trace.rank,
        label=trace.label,
        device=trace.device,
        peak_bytes_per_second=gpu.bandwidth,
        peak_source=gpu.bandwidth_source,
        events=trace.event_count,
        device_ms=float(events.duration.sum()) / NANOS_PER_MS,
        before_first_step_ms=milliseconds((placed == MISSING) & launched),
        left_out_ms=milliseconds(left_out),
        unattributed_ms=milliseconds((placed == MISSING) & ~launched),
        notes=notes(trace, links, steps, mapping),
        coordinates=trace.coordinates,
    )
    ranked = {stage: _ranked(trace, links, steps, stage, mapping) for stage in Stage if len(steps.of(stage))}
    pools = _pools(trace, steps, ranked, known.server)
    reports, findings = [], []
    for stage, rows in ranked.items():
        report = _stage_report(trace, steps, stage, [row.op for row in rows])
        case = StageCase(trace, links, steps, report, rows, gpu, pools, known.server)
        findings += [finding for rule in RULES.values() for finding in rule(case)]
        reports.append(report)
    return TraceDiagnosis(summary, reports, findings)


def _ranked(trace: Trace, links: Links, steps: Steps, stage: Stage, mapping: Mapping | None) -> list[RankedOp]:
    chosen = steps.of(stage)
    return rank_ops(trace, links, np.flatnonzero(np.isin(steps.inside, chosen)), len(chosen), mapping)


def _pools(trace: Trace, steps: Steps, ranked: dict[Stage, list[RankedOp]], server: ServerInfo | None) -> list[Pool]:
    """The pools, by the server or by shapes, else by what is copied before attention."""
    names = [name for number, name in enumerate(steps.spans.names) if steps.counted[number]]
    pools = find_pools((row for rows in ranked.values() for row in rows), names, server)
    if pools and pools[0].confidence == "high":
        return pools
    events = np.flatnonzero((steps.inside != MISSING) & steps.counted[steps.inside])
    copied = pool_from_geometry([copy.elements for copy in copies_before_attention(trace, events)], names, server)
    if copied is None:
        return pools
    # Two accounts of the pool: where they agree it is sure, else what the trace shows goes before what a server says.
    if pools and copied.rows == pools[0].rows:
        return [replace(pools[0], width=copied.width, confidence="high")]
    return [copied]


def _stage_report(trace: Trace, steps: Steps, stage: Stage, ops: list[Op]) -> StageReport:
    events, chosen = trace.device_events, steps.of(stage)
    count = len(chosen)
    inside = [steps.events.get(step, np.empty(0, np.int64)) for step in chosen.tolist()]
    device = [float(events.duration[rows].sum()) / NANOS_PER_MS for rows in inside]
    union = sum(busy(events.start[rows], events.end[rows]) for rows in inside)
    return StageReport(
        stage=stage,
        trace=0,
        rank=trace.rank,
        steps=count,
        steps_left_out=len(steps.all_of(stage)) - count,
        step_source=steps.spans.source,
        step_names=dict(describe_batch([steps.spans.names[step] for step in chosen])),
        device_ms_per_step=sum(device) / count,
        device_ms_min=min(device),
        device_ms_max=max(device),
        busy_ms_per_step=union / count / NANOS_PER_MS,
        wall_ms_per_step=_wall(trace, steps, chosen) / NANOS_PER_MS,
        between_steps_ms_per_step=float(events.duration[np.isin(steps.after, chosen)].sum()) / count / NANOS_PER_MS,
        ops=ops,
    )


def _wall(trace: Trace, steps: Steps, chosen: Ints) -> float:
    """The median time from a step's first device event to the next step's first, whatever stage that is of.

    The median, because a server that waits for a request between two steps spends no step's time. The last step of a
    trace has no next; if there is none but it, its time runs to its last device event.
    """
    events = trace.device_events
    end = events.end
    first, last = {}, {}
    for step, rows in steps.events.items():
        first[step], last[step] = int(events.start[rows].min()), int(end[rows].max())
    spans = [first[step + 1] - first[step] for step in chosen.tolist() if step in first and step + 1 in first]
    spans = spans or [last[step] - first[step] for step in chosen.tolist() if step in first]
    return float(np.median(spans)) if spans else 0.0


def _is_of(trace: Trace, rank: int | Coordinates) -> bool:
    if isinstance(rank, int):
        return trace.rank == rank
    return trace.coordinates is not None and trace.coordinates.within(rank)
