"""Which step each device event belongs to, and how long a step takes.

An event belongs to the step whose host span holds its *launch*: SGLang's overlap scheduler launches step N+1 while the
device still runs step N, so the clock would blame the wrong step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mla_diag.diagnose.step_spans import Stage, StepSpans, find_step_spans
from mla_diag.diagnose.thresholds import COMPLETE_SHARE
from mla_diag.trace.columns import MISSING, Ids, Interner, Ints, rows_by
from mla_diag.trace.link import Links, enclosing, running_launches, work_launches
from mla_diag.trace.model import Table, Trace


@dataclass(frozen=True)
class Steps:
    """The steps of one rank's trace and the step of each of its device events.

    Attributes:
        spans: Where the steps are.
        inside: For each device event the step that launched it, or -1.
        after: For each device event launched between two steps the one before, or -1: sampling, result copies.
        counted: For each step whether the figures rest on it: it is complete, not empty, and no warm-up. Where no step
            is complete, those that have any device event count.
        complete: For each step whether the trace holds all that it launched.
        empty: For each step whether it has no device event, lost or never launched.
    """

    spans: StepSpans
    inside: Ints
    after: Ints
    counted: NDArray[np.bool_]
    complete: NDArray[np.bool_]
    empty: NDArray[np.bool_]

    @property
    def whole(self) -> NDArray[np.bool_]:
        """For each step whether it launched device work and the trace holds all of it."""
        return self.complete & ~self.empty

    @cached_property
    def events(self) -> dict[int, Ints]:
        """For each step that launched any, the device events that are inside it."""
        of_step = rows_by(self.inside)
        of_step.pop(MISSING, None)
        return of_step

    def all_of(self, stage: Stage) -> Ints:
        """The steps of a stage, counted or not."""
        return np.array([number for number, other in enumerate(self.spans.stages) if other is stage], np.int64)

    def of(self, stage: Stage) -> Ints:
        """The counted steps of a stage."""
        steps = self.all_of(stage)
        return steps[self.counted[steps]]


def find_steps(trace: Trace, links: Links, warmup: int = 0) -> Steps:
    """Place every device event.

    Args:
        trace: One rank's trace.
        links: Its links.
        warmup: Steps to leave out at the head of each stage, whose first is often a ramp-up (sglang#38067).
    """
    spans = find_step_spans(trace, links)
    events, launches = trace.device_events, trace.launches
    inside, after = np.full(len(events), MISSING, np.int64), np.full(len(events), MISSING, np.int64)

    launched = np.flatnonzero(links.launch != MISSING)
    rows = links.launch[launched]
    inside[launched] = step_at(spans, launches.thread[rows], launches.start[rows])
    outside = launched[inside[launched] == MISSING]
    before = np.searchsorted(spans.start, launches.start[links.launch[outside]], "right") - 1
    after[outside] = before  # -1 is launched before the first step

    orphans = np.flatnonzero(links.launch == MISSING)
    span = enclosing(spans.device_spans, events.thread[orphans], events.start[orphans])
    inside[orphans[span != MISSING]] = spans.device_step[span[span != MISSING]]

    complete = _complete(trace, links, spans, inside)
    # A step of nothing is no step to average over: an idle rank's, or one whose work the profiler lost.
    empty = ~np.isin(np.arange(len(spans)), inside)
    whole = complete & ~empty
    usable = whole if whole.any() else ~empty
    return Steps(spans, inside, after, _without_warmup(spans, usable, warmup), complete, empty)


def step_at(spans: StepSpans, threads: Ids, times: Ints) -> Ints:
    """The step whose span on the same thread holds each instant, else on any: a forward may have its own thread."""
    table = Table(np.zeros(len(spans), np.int32), spans.thread, spans.start, np.maximum(spans.end - spans.start - 1, 0))
    step = enclosing(table, threads, times)
    left = np.flatnonzero(step == MISSING)
    anywhere = Table(table.name, np.zeros_like(table.thread), table.start, table.duration)
    step[left] = enclosing(anywhere, np.zeros(len(left), np.int32), times[left])
    return step


def same_launches(trace: Trace, spans: StepSpans, launches: Ints) -> Ints:
    """For each of some launches, by its row, a number that it shares with the same of other steps; -1 outside steps.

    The same is the same call, as far into a step of the same name that has as many of these launches.
    """
    calls = trace.launches.take(launches)
    numbers: Interner[tuple[str, int, int, int]] = Interner()
    same = np.full(len(launches), MISSING, np.int64)
    of_step = rows_by(step_at(spans, calls.thread, calls.start))
    of_step.pop(MISSING, None)
    for step, rows in of_step.items():
        ordered = rows[np.argsort(calls.start[rows], kind="stable")]
        names = calls.name[ordered].tolist()
        same[ordered] = numbers.ids((spans.names[step], len(rows), place, name) for place, name in enumerate(names))
    return same


def _complete(trace: Trace, links: Links, spans: StepSpans, inside: Ints) -> NDArray[np.bool_]:
    """Whether the trace holds what each step launched.

    A step is measured by the share of its calls that led to a device event: of its launches of kernels and graphs
    against every other step, because those run something whatever the step is, and of all its calls against the fullest
    step of the same name, by whose device events of graph launches it is measured too. In a trace that is cut off the
    calls are missing as well, so there a step also needs as many device events as its like, and one launched after it.
    """
    made, found = _calls_in_steps(trace, links, spans, running_launches(trace, links))
    work_share = np.where(made, found / np.maximum(made, 1), 1.0)
    complete: NDArray[np.bool_] = work_share >= COMPLETE_SHARE * work_share[made > 0].max(initial=0.0)

    made, found = _calls_in_steps(trace, links, spans, np.isin(trace.launches.name, _launching_names(trace, links)))
    share = found / np.maximum(made, 1)
    in_step = inside != MISSING
    events = np.bincount(inside[in_step], minlength=len(spans))
    graph_events = np.bincount(inside[links.graph & in_step], minlength=len(spans))

    names: Interner[str] = Interner()
    for steps in rows_by(names.ids(spans.names).astype(np.int64)).values():
        complete[steps] &= share[steps] >= COMPLETE_SHARE * share[steps].max()
        complete[steps] &= graph_events[steps] >= COMPLETE_SHARE * graph_events[steps].max()
        if trace.damage.truncated:
            complete[steps] &= share[steps] >= COMPLETE_SHARE
            complete[steps] &= events[steps] >= COMPLETE_SHARE * events[steps].max()
    if trace.damage.truncated:
        complete &= spans.end <= _last_launch(trace, links)
    return complete


def _calls_in_steps(trace: Trace, links: Links, spans: StepSpans, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each step how many of the chosen calls it made, and how many of those led to a device event."""
    calls = np.flatnonzero(chosen)
    step = step_at(spans, trace.launches.thread[calls], trace.launches.start[calls])
    placed = step != MISSING
    led = placed & np.isin(calls, links.launch)
    return np.bincount(step[placed], minlength=len(spans)), np.bincount(step[led], minlength=len(spans))


def _last_launch(trace: Trace, links: Links) -> int:
    """When the last launch was of the events on the busiest stream; a file holds those in their order."""
    streams, busiest = np.unique(trace.device_events.stream, return_inverse=True)
    launched = links.launch != MISSING
    if not launched.any():
        return int(np.iinfo(np.int64).min)
    main = launched & (busiest == np.bincount(busiest[launched], minlength=len(streams)).argmax())
    return int(trace.launches.start[links.launch[main]].max())


def _launching_names(trace: Trace, links: Links) -> Ids:
    """The calls that launch device work: those that did so in this trace, or are known to."""
    did = trace.launches.name[links.launch[links.launch != MISSING]]
    return np.union1d(did, trace.launches.name[work_launches(trace)]).astype(np.int32)


def _without_warmup(spans: StepSpans, usable: NDArray[np.bool_], warmup: int) -> NDArray[np.bool_]:
    counted = usable.copy()
    for stage in Stage:
        steps = [number for number, other in enumerate(spans.stages) if other is stage]
        counted[steps[:warmup]] = False
    return counted


def busy(start: Ints, end: Ints) -> int:
    """The length of the union of intervals: nanoseconds in which at least one of them ran."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gaps = start[1:] - end[:-1]
    return int(end[-1] - start[0] - gaps[gaps > 0].sum())
