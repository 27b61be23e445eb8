"""exposed-communication: collectives that no other kernel of the device runs beside.

Their time is the network's and that of waiting for the slowest rank; straggler-rank tells the two apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.communication import is_communication
from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.steps import busy
from mla_diag.diagnose.thresholds import EXPOSED_SHARE
from mla_diag.trace.columns import NANOS_PER_MS

KIND = "exposed-communication"


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for the stage, if what is exposed of its collectives is worth hiding."""
    events, steps = case.trace.device_events, len(case.chosen)
    collective = np.array([is_communication(name) for name in case.trace.names] or [False])[events.name]
    rows = case.events[collective[case.events]]
    # Anything that runs beside a collective hides it, also what another step launched.
    others = np.flatnonzero(~collective)
    either = np.concatenate([rows, others])
    covered = busy(events.start[others], events.end[others])
    exposed = (busy(events.start[either], events.end[either]) - covered) / steps / NANOS_PER_MS
    share = exposed / case.report.device_ms_per_step if case.report.device_ms_per_step else 0.0
    if share < EXPOSED_SHARE:
        return
    total = busy(events.start[rows], events.end[rows]) / steps / NANOS_PER_MS
    spent: Counter[str] = Counter()
    for name, duration in zip(events.name[rows].tolist(), events.duration[rows].tolist(), strict=True):
        spent[case.trace.names[name]] += duration
    largest, nanoseconds = spent.most_common(1)[0]
    row = next(row for row in case.ranked if any(use.kernel == largest for use in row.op.kernels))
    yield case.finding(
        KIND,
        f"collectives take {exposed:.2f} of {case.report.device_ms_per_step:.1f} ms a step with nothing beside them, "
        f"most of it {short_kernel_name(largest)}",
        detail=f"{len(rows) / steps:,.6g} collectives a step, {total - exposed:.2f} ms of them beside other kernels",
        cost_ms=exposed,
        share=share,
        evidence={
            "exposed_ms_per_step": exposed,
            "communication_ms_per_step": total,
            "hidden_ms_per_step": total - exposed,
            "launches_per_step": len(rows) / steps,
            "kernel": largest,
            "kernel_ms_per_step": nanoseconds / steps / NANOS_PER_MS,
            "distinct_kernels": len(spent),
        },
        cause=cause_of(row.op),
        remedy=_remedy(case.report.stage),
        confidence="medium",
    )


def _remedy(stage: Stage) -> str:
    first = "explain all ranks together: if one works longer, the others wait for it in here. If none does, "
    if stage is Stage.OTHER:
        return first + "start collectives as soon as their input is there, beside work that does not need the result"
    return first + (
        "fuse all-reduce with the norm after it (`--enable-flashinfer-allreduce-fusion`), "
        "or overlap two batches (`--enable-two-batch-overlap`)"
    )
