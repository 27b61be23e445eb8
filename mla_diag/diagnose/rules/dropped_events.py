"""dropped-events: what the profiler or the file lost, so that figures or findings cannot be trusted.

It is about the trace, not the server, and says so once for each trace: with the first stage that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mla_diag.diagnose.case import StageCase, severity
from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.lost_launches import LostLaunches, find_lost_launches
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.steps import busy, same_launches, step_at
from mla_diag.diagnose.thresholds import COMPLETE_SHARE, DROPPED_SHARE, REPLAY_GAP_MICROSECONDS, REPLAY_IDLE
from mla_diag.trace.columns import MISSING, NANOS_PER_MS, Ints, rows_by
from mla_diag.trace.link import graph_launches
from mla_diag.trace.model import DeviceEvents

KIND = "dropped-events"


class _Loss(NamedTuple):
    """One thing that is missing.

    Attributes:
        share: The part of its like that is missing, 0 to 1.
        sentence: The same in words, for the title.
        remedy: How to have it next time.
    """

    share: float
    sentence: str
    remedy: str


class _Replays(NamedTuple):
    """Graph launches of a trace.

    Attributes:
        total: All of them.
        empty: Those without any device event.
        short: Those with fewer than the same launch of another step of the same name.
        idle: Those that are idle for most of their time.
        idle_most: The largest part of a replay that is idle.
    """

    total: int
    empty: int
    short: int
    idle: int
    idle_most: float


def find(case: StageCase) -> Iterator[Finding]:
    """At most one finding for the trace."""
    first = next(stage for stage in Stage if len(case.steps.of(stage)))
    if case.report.stage is not first:
        return
    losses, evidence = _look(case)
    if not losses:
        return
    worst = max(losses, key=lambda loss: loss.share)
    finding = case.finding(
        KIND,
        worst.sentence,
        detail="; ".join(loss.sentence for loss in losses if loss is not worst),
        cost_ms=None,
        share=None,
        evidence=evidence,
        remedy=worst.remedy,
        confidence="high",
    )
    yield msgspec.structs.replace(finding, stage=None, severity=severity(worst.share))


def _look(case: StageCase) -> tuple[list[_Loss], dict[str, Any]]:
    trace, links, steps = case.trace, case.links, case.steps
    damage, events = trace.damage, trace.device_events
    launches = find_lost_launches(trace, links, steps.spans)
    recorded = int(events.duration.sum())
    orphaned = links.launch == MISSING
    orphans = int(orphaned.sum())
    incomplete = int((~steps.complete).sum())
    replays = _replays(case, launches.launch)
    evidence = {
        "events": trace.event_count,
        "unreadable_events": damage.lost_events,
        "first_unreadable_at_byte": damage.first_lost_at,
        "cut_at_byte": damage.cut_at,
        "gzip_error": damage.gzip,
        "steps": len(steps.spans),
        "incomplete_steps": incomplete,
        "launches": len(launches),
        "launches_without_device_event": launches.count,
        "launches_timed_by_other_steps": int((launches.timed & launches.by_step).sum()),
        "launches_timed_by_same_op": int((launches.timed & ~launches.by_step).sum()),
        "launches_of_unknown_time": launches.unknown,
        "lost_ms": float(np.nansum(launches.nanoseconds)) / NANOS_PER_MS,
        "lost_share_of_time": launches.time_share(recorded),
        "device_events": len(events),
        "device_events_without_duration": damage.clamped_device_durations,
        "device_events_without_launch": orphans,
        "ms_without_launch": float(events.duration[orphaned].sum()) / NANOS_PER_MS,
        "graph_replays": replays.total,
        "empty_graph_replays": replays.empty,
        "short_graph_replays": replays.short,
        "idle_graph_replays": replays.idle,
        "idle_share_of_worst_replay": replays.idle_most,
        "too_low": _too_low(case, launches),
    }
    return list(_losses(case, evidence, launches.share(recorded), replays)), evidence


def _too_low(case: StageCase, launches: LostLaunches) -> bool:
    """Whether the steps that count hold less than ran in them; what is missing elsewhere makes no figure wrong."""
    trace, steps = case.trace, case.steps
    if not steps.whole.any():
        return True
    launches = launches.take(_in_counted(case, launches.launch))
    inside = (steps.inside != MISSING) & steps.counted[steps.inside]
    replays = _replays(case, launches.launch)
    return bool(
        launches.share(int(trace.device_events.duration[inside].sum())) >= DROPPED_SHARE
        or trace.damage.clamped_device_durations >= DROPPED_SHARE * len(trace.device_events) > 0
        or max(replays.empty, replays.short, replays.idle) > 0
    )


def _in_counted(case: StageCase, rows: Ints) -> NDArray[np.bool_]:
    """Whether each of some launches was made in a step that counts."""
    launches = case.trace.launches.take(rows)
    step = step_at(case.steps.spans, launches.thread, launches.start)
    return np.asarray((step != MISSING) & case.steps.counted[step])


def _losses(case: StageCase, seen: dict[str, Any], lost_share: float, replays: _Replays) -> Iterator[_Loss]:
    damage, steps = case.trace.damage, seen["steps"]
    again = "profile again for fewer steps, with no other profiler (Nsight, DCGM) attached to the GPU"
    if damage.truncated:
        whole = steps - seen["incomplete_steps"]
        yield _Loss(
            seen["incomplete_steps"] / max(steps, 1),
            f"the file is cut off before its end: {whole} of its {steps} steps are whole",
            "wait until the profiler has written the file, then copy it again; its figures are of the whole steps only",
        )
    elif seen["incomplete_steps"]:
        yield _Loss(
            seen["incomplete_steps"] / steps,
            f"{seen['incomplete_steps']} of {steps} steps lack device events that they launched, and are left out",
            again,
        )
    bad = seen["unreadable_events"] / max(seen["events"], 1)
    if bad >= DROPPED_SHARE:
        yield _Loss(bad, f"{seen['unreadable_events']:,} of {seen['events']:,} events cannot be read", again)
    silent = seen["launches_without_device_event"] / max(seen["launches"], 1)
    if max(silent, lost_share) >= DROPPED_SHARE and not damage.truncated:
        yield _Loss(lost_share, _lost_launches(seen), again)
    timeless = min(seen["device_events_without_duration"] / max(seen["device_events"], 1), 1.0)
    if timeless >= DROPPED_SHARE:
        yield _Loss(
            timeless,
            f"{seen['device_events_without_duration']:,} of {seen['device_events']:,} device events have a duration "
            "below zero, out of range or no number, and count as 0: device times are too low, and rates too high",
            again,
        )
    orphans = seen["device_events_without_launch"] / max(seen["device_events"], 1)
    if orphans >= DROPPED_SHARE:
        yield _Loss(
            orphans,
            f"{seen['device_events_without_launch']:,} of {seen['device_events']:,} device events, "
            f"{seen['ms_without_launch']:.1f} ms, have no launch: what launched them, and in which step, is not known",
            "start the profiler before the work to be recorded, with a PyTorch that records launches by the driver",
        )
    poor = max(replays.empty, replays.short, replays.idle)
    if poor:
        yield _Loss(
            poor / replays.total,
            f"{poor} of {replays.total} graph replays hold fewer kernels than ran: "
            "device time is too low, and the idle time in them is not real",
            f"{again}, or without CUDA graphs",
        )


def _lost_launches(seen: dict[str, Any]) -> str:
    """How many launches lack device events, what those would have taken, and what is judged by which of the two."""
    lost, unknown = seen["launches_without_device_event"], seen["launches_of_unknown_time"]
    sentence = f"{lost:,} of {seen['launches']:,} launches have no device event: device times are too low"
    if unknown < lost:
        like = f"{lost - unknown:,} of them" if unknown else "they"
        sentence += (
            f" by about {seen['lost_ms']:.2f} ms, {seen['lost_share_of_time']:.1%} of what ran, "
            f"if {like} took what their like did"
        )
    if unknown:
        them = f"the other {unknown:,}" if unknown < lost else "they"
        sentence += f"; what {them} took is not known, and judged by their number"
    return sentence


def _replays(case: StageCase, launches: Ints) -> _Replays:
    """What is missing from the graph launches among some launches."""
    trace, links, spans = case.trace, case.links, case.steps.spans
    rows = launches[graph_launches(trace)[launches]]
    order = np.argsort(links.launch, kind="stable")
    first, past = (np.searchsorted(links.launch[order], rows, side) for side in ("left", "right"))
    replays = [order[begin:end] for begin, end in zip(first.tolist(), past.tolist(), strict=True)]
    blank = [_blank(trace.device_events.take(replay)) for replay in replays]
    sizes = past - first
    of_like = rows_by(same_launches(trace, spans, rows))
    of_like.pop(MISSING, None)
    like = [sizes[places] for places in of_like.values()]
    return _Replays(
        total=len(rows),
        empty=0 if case.trace.damage.truncated else int((sizes == 0).sum()),
        short=sum(int(((group > 0) & (group < COMPLETE_SHARE * group.max())).sum()) for group in like),
        idle=sum(share >= REPLAY_IDLE for share in blank),
        idle_most=max(blank, default=0.0),
    )


def _blank(replay: DeviceEvents) -> float:
    """The part of a replay in which nothing ran, from its first event to its last; 0 if its gaps are a graph's own."""
    if len(replay) < 2:
        return 0.0
    span = int(replay.end.max() - replay.start.min())
    nothing = span - busy(replay.start, replay.end)
    return nothing / span if nothing > REPLAY_GAP_MICROSECONDS * 1000 * (len(replay) - 1) else 0.0
