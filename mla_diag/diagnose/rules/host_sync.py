"""host-sync: the host waits for the device in the middle of a step, so that it cannot launch ahead.

`.item()`, `.cpu()`, `nonzero` and boolean masks do it. After the last launch of a step, or between steps, waiting is
how a result is fetched, and is not reported; nor are allocations, which wait for the driver.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Cause, Finding
from mla_diag.diagnose.idle import gaps, records_stacks
from mla_diag.diagnose.steps import step_at
from mla_diag.diagnose.thresholds import SYNC_IDLE_SHARE, SYNC_MICROSECONDS
from mla_diag.trace.columns import MISSING, NANOS_PER_MS, Ids, Ints
from mla_diag.trace.link import Source, enclosing
from mla_diag.trace.model import DeviceKind

KIND = "host-sync"

_WAITS = re.compile(
    r"^(?:cuda|hip)(?:Stream|Device|Event)Synchronize|^cu(?:Stream|Ctx|Event)Synchronize"
    r"|^(?:cuda|hip|cu)Memcpy(?!\w*(?:Async|Batch))"
)
# Asynchronous only by name: pageable memory is staged, and the call returns when that is done.
_ASYNC_COPY = re.compile(r"^(?:cuda|hip)MemcpyAsync|^cuMemcpy\w*Async")


class _Calls(NamedTuple):
    """Blocking calls inside steps.

    Attributes:
        rows: Of the trace's launches.
        idle: Nanoseconds that the device then had nothing to do.
        op: The op around each, a row of the trace's, or -1.
        source: The function around each, a number in `sources`, or -1.
        sources: Those functions.
    """

    rows: Ints
    idle: Ints
    op: Ints
    source: Ids
    sources: list[Source]


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for each call, op and function that makes the device wait."""
    calls = _blocking_calls(case)
    if not len(calls.rows) or not case.report.wall_ms_per_step:
        return
    launches, ops = case.trace.launches, case.trace.ops
    op_name = np.full(len(calls.rows), MISSING, np.int64)
    op_name[calls.op != MISSING] = ops.name[calls.op[calls.op != MISSING]]
    keys = np.stack([launches.name[calls.rows].astype(np.int64), op_name, calls.source.astype(np.int64)])
    distinct, group = np.unique(keys, axis=1, return_inverse=True)
    for number, (call, op, source) in enumerate(distinct.T.tolist()):
        members = group == number
        idle = float(calls.idle[members].sum()) / len(case.chosen) / NANOS_PER_MS
        if idle < SYNC_IDLE_SHARE * case.report.wall_ms_per_step:
            continue
        yield _finding(
            case,
            case.trace.names[call],
            None if op == MISSING else case.trace.names[op],
            None if source == MISSING else calls.sources[source],
            launches.duration[calls.rows[members]],
            idle,
        )


def _blocking_calls(case: StageCase) -> _Calls:
    trace, links, steps = case.trace, case.links, case.steps
    launches, events = trace.launches, trace.device_events
    kernels = case.events[(events.kind[case.events] == DeviceKind.KERNEL) & (links.launch[case.events] != MISSING)]
    launched = links.launch[kernels]
    # Another thread may fetch the last step's results meanwhile: that holds nobody up.
    own = launches.thread == (np.bincount(launches.thread[launched]).argmax() if len(launched) else MISSING)
    rows = np.flatnonzero(own & _may_block(case) & (launches.duration >= SYNC_MICROSECONDS * 1000))
    step = step_at(steps.spans, launches.thread[rows], launches.start[rows])
    # What a step waits for after its last kernel is its result.
    last_launch = np.full(len(steps.spans) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last_launch, steps.inside[kernels], launches.start[launched])
    rows = rows[np.isin(step, case.chosen) & (launches.end[rows] <= last_launch[step])]

    op = enclosing(trace.ops, launches.thread[rows], launches.start[rows])
    calls = dataclasses.replace(links, launch=rows, op=op, graph=np.zeros(len(rows), bool))
    return _Calls(rows, _idle_after(case, rows), op, calls.source, calls.sources)


def _may_block(case: StageCase) -> NDArray[np.bool_]:
    """For each call whether it waits for the device."""
    trace = case.trace
    waits, copies = (
        np.array([bool(pattern.search(name)) for name in trace.names] or [False])[trace.launches.name]
        for pattern in (_WAITS, _ASYNC_COPY)
    )
    pageable = np.array(["Pageable" in name for name in trace.names] or [False])[trace.device_events.name]
    launches = case.links.launch[pageable & (case.links.launch != MISSING)]
    return waits | (copies & np.isin(np.arange(len(trace.launches)), launches))


def _idle_after(case: StageCase, rows: Ints) -> Ints:
    """How long the device has nothing to do from the end of what each call waited for: the gap in which it returns."""
    found, launches = gaps(case.trace.device_events), case.trace.launches
    if not len(found.start):
        return np.zeros(len(rows), np.int64)
    start, end = launches.start[rows], launches.end[rows]
    place = np.maximum(np.searchsorted(found.start, end, "right") - 1, 0)
    within = (found.start[place] <= end) & (end <= found.end[place])
    return np.where(within, found.end[place] - np.maximum(found.start[place], start), 0)


def _finding(
    case: StageCase, call: str, op: str | None, source: Source | None, durations: Ints, idle: float
) -> Finding:
    steps = len(case.chosen)
    times = len(durations) / steps
    blocked = float(durations.sum()) / steps / NANOS_PER_MS
    what = call if op is None else f"{op} ({call})"
    place = "" if source is None else f" in {source.function}"
    return case.finding(
        KIND,
        f"{what}{place} makes the host wait for the device {_times(times)}, "
        f"and the device then has nothing to do for {idle:.2f} of {case.report.wall_ms_per_step:.1f} ms",
        detail=f"the host is blocked for {blocked:.2f} ms a step, waiting also for what was launched before the step",
        cost_ms=idle,
        share=min(1.0, idle / case.report.wall_ms_per_step),
        evidence={
            "call": call,
            "op": op,
            "calls_per_step": times,
            "blocked_ms_per_step": blocked,
            "blocked_ms_longest": float(durations.max()) / NANOS_PER_MS,
            "device_idle_ms_per_step": idle,
            "wall_ms_per_step": case.report.wall_ms_per_step,
        },
        cause=None if source is None else Cause(*source, inferred=False),
        remedy=(
            "keep the value on the device, or fetch it into pinned memory with `non_blocking=True` and read it in the "
            "next step" + ("" if source is not None else "; profile with Python stacks to see which line waits")
        ),
        confidence="medium" if records_stacks(case.trace) else "high",
    )


def _times(number: float) -> str:
    return "once a step" if number == 1 else f"{number:,.6g} times a step"
