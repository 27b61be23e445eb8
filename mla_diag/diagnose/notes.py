"""What a trace cannot tell, in sentences: each says what is missing, how much, and how to have it next time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mla_diag.diagnose.gpu import gpu_of
from mla_diag.diagnose.idle import records_stacks
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.mapping import Mapping
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.diagnose.steps import Steps
from mla_diag.diagnose.words import count
from mla_diag.trace.columns import MISSING, NANOS_PER_MS, rows_by
from mla_diag.trace.link import Links, kernel_launches
from mla_diag.trace.model import Damage, Trace

# Below this share of the device time what kernels wait for each other on the device makes no row misleading.
_EARLY = 0.03
# Steps that run beside each other last longer than from one's begin to the next one's, but not so many times as long.
_IMPOSSIBLE = 10
_SOME = 0.01  # below this share of a trace's device events a gap changes no figure that is printed


def notes(trace: Trace, links: Links, steps: Steps, mapping: Mapping | None = None) -> list[str]:
    """Everything to know before trusting the figures of one rank's trace, the worst first."""
    return [
        *_damage(trace.damage),
        *_impossible_durations(trace, steps),
        *_missing_device(trace, links),
        *_steps(steps),
        *_missing_detail(trace, links, mapping),
        *_early_launches(trace),
    ]


def _damage(damage: Damage) -> Iterator[str]:
    if damage.gzip:
        yield f"{damage.gzip}; everything up to there is explained"
    if damage.cut_at is not None:
        yield (
            f"the file is cut off: its JSON stops at byte {damage.cut_at:,} before the end of the events; "
            "what was recorded after that is missing"
        )
    if damage.lost_events:
        where = "" if damage.first_lost_at is None else f" (the first at byte {damage.first_lost_at:,} of the JSON)"
        yield f"{count(damage.lost_events, 'event')} could not be read and are left out{where}"
    if damage.repaired_events:
        yield f"{count(damage.repaired_events, 'malformed event')} could be repaired and are counted"
    if damage.clamped_durations:
        clamped = count(damage.clamped_durations, "event")
        yield f"{clamped} had a duration below zero, out of range or no number; it counts as 0"


def _impossible_durations(trace: Trace, steps: Steps) -> Iterator[str]:
    """Events that last many times their step, while what comes after them on their stream has come and gone."""
    table = trace.device_events
    groups = rows_by(np.where(steps.inside != MISSING, steps.inside, steps.after))
    groups.pop(MISSING, None)
    # From a step's first event to the next step's; the last step has no next, and the last begin in it stands for that.
    begins = [int(table.start[rows].min()) for rows in groups.values()]
    ends = [*begins[1:], *(int(table.start[rows].max()) for rows in list(groups.values())[-1:])]
    found = []
    for rows, begin, end in zip(groups.values(), begins, ends, strict=True):
        longest = rows[table.duration[rows].argmax()]
        lasts, room = int(table.duration[longest]), end - begin
        if lasts > _IMPOSSIBLE * room > 0 and (passed := _passed(trace, longest)):
            found.append((lasts, room, passed, short_kernel_name(trace.names[table.name[longest]])))
    if found:
        lasts, room, passed, name = max(found)
        others = "" if len(found) == 1 else f" (and in {count(len(found) - 1, 'other step')} another)"
        yield (
            f"{name} is recorded to last {lasts / NANOS_PER_MS:,.3f} ms in a step of {room / NANOS_PER_MS:,.3f} ms, "
            f"and {count(passed, 'later event')} of its stream ended before it: its duration cannot be right{others}, "
            "nor any figure that holds it"
        )


def _passed(trace: Trace, event: int) -> int:
    """How many events of its stream began after an event and ended before it, which a stream does not allow."""
    table = trace.device_events
    same = (table.stream == table.stream[event]) & (table.device == table.device[event])
    return int((same & (table.start > table.start[event]) & (table.end < table.end[event])).sum())


def _missing_device(trace: Trace, links: Links) -> Iterator[str]:
    events = len(trace.device_events)
    calls = int(kernel_launches(trace).sum())
    if trace.damage.truncated and not events:
        yield "no device event comes before the cut, so nothing can be said of device time"
    elif calls > 10 * events:
        yield (
            f"{calls:,} kernel launches but only {count(events, 'device event')}: while a CUDA graph is captured, "
            "launches are recorded and nothing runs; explain a trace of its replay"
        )
    orphans = int((links.launch == MISSING).sum())
    if orphans:
        yield (
            f"{orphans:,} of {events:,} device events have no launch in the trace: they count in a step only where a "
            "device span covers them, else as unattributed"
        )


def _steps(steps: Steps) -> Iterator[str]:
    if steps.spans.source is not StepSource.STEP_SPAN:
        yield f"steps are told apart by {steps.spans.source.words}"
    if steps.counted.any() and not steps.whole.any():
        yield "no step is complete in this trace: the figures are of parts of steps, and lower than those of whole ones"
    elif incomplete := int((~steps.complete).sum()):
        verb = "is" if incomplete == 1 else "are"
        lost = [
            f"; no {stage.value} step is left"
            for stage in Stage
            if not (steps.complete[steps.all_of(stage)].all() or steps.whole[steps.all_of(stage)].any())
        ]
        yield f"{count(incomplete, 'step')} {verb} incomplete in this trace and left out of every figure{''.join(lost)}"
    if empty := int((steps.empty & steps.complete).sum()):
        has, verb = ("has", "is") if empty == 1 else ("have", "are")
        yield f"{count(empty, 'step')} {has} no device work in this trace and {verb} left out of every figure"
    for stage in Stage:
        of_stage = steps.all_of(stage)
        whole = int(steps.whole[of_stage].sum())
        if whole and not steps.counted[of_stage].any():
            yield f"--warmup leaves no {stage.value} step: the trace has {whole} of them, all left out"


def _missing_detail(trace: Trace, links: Links, mapping: Mapping | None) -> Iterator[str]:
    events = len(trace.device_events)
    replayed = int(links.graph.sum())
    if trace.device is not None and gpu_of(trace).bandwidth is None:
        yield f"the memory bandwidth of {trace.device} is not known here: rates are given, and not judged"
    if replayed and mapping is not None:
        named = int((mapping.op != MISSING).sum())
        yield f"--mapping names {named:,} of the {replayed:,} device events that were replayed from CUDA graphs"
        return
    if replayed > _SOME * events:
        yield (
            f"{replayed:,} of {events:,} device events were replayed from CUDA graphs, which record no op, "
            "shapes or stack: kernels are told apart by name and launch geometry"
        )
    if replayed < events and len(trace.ops) and not any(trace.values[n] for n in np.unique(trace.ops.dims).tolist()):
        yield "no input shapes were recorded: profile with record_shapes=true to see them"
    if records_stacks(trace):
        yield "Python stacks were recorded, which slows the host: wall time is longer than without them"
    elif replayed < events:
        yield "no Python stacks were recorded: profile with with_stack=true to see which line launches what"


def _early_launches(trace: Trace) -> Iterator[str]:
    """Kernels that were started while the one ahead of them on their stream ran, which they then waited for."""
    table = trace.device_events
    total = int((table.end - table.start).sum())
    waits = np.zeros(len(table), dtype=np.int64)
    order = np.lexsort((table.start, table.stream, table.device))
    next_stream = (np.diff(table.stream[order]) != 0) | (np.diff(table.device[order]) != 0)
    for rows in np.split(order, np.flatnonzero(next_stream) + 1):
        ahead = np.maximum.accumulate(table.end[rows])[:-1]
        waits[rows[1:]] = np.clip(np.minimum(ahead, table.end[rows[1:]]) - table.start[rows[1:]], 0, None)
    if waits.sum() <= _EARLY * total:
        return
    by_name = np.bincount(table.name, weights=waits)
    most = short_kernel_name(trace.names[int(by_name.argmax())])
    yield (
        f"{waits.sum() / total:.0%} of the device time is kernels that began before the one ahead of them on their "
        f"stream had ended (programmatic dependent launch), mostly {most}: their rows hold that wait, the busy "
        "time does not"
    )
