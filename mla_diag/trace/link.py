"""Who launched what: each device event to its launch, the CPU op around that, and the Python frame around both.

Attribution is by launch, not by clock: the host runs ahead of the device, so when a kernel runs says nothing of which
code asked for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_diag.trace.columns import MISSING, Ids, Ints
from mla_diag.trace.model import Table, Trace

# Serving code whose frames are worth naming, in this order: a kernel launched by SGLang's code is blamed on SGLang's
# line, not on the line of PyTorch or of a kernel library below it.
SERVING_PACKAGES = ("sglang", "vllm")

_GRAPH_LAUNCH = re.compile(r"GraphLaunch", re.IGNORECASE)
_KERNEL_LAUNCH = re.compile(r"Launch(?:Cooperative)?Kernel", re.IGNORECASE)
_CAPTURE_BEGINS = re.compile(r"StreamBeginCapture", re.IGNORECASE)
_CAPTURE_ENDS = re.compile(r"StreamEndCapture", re.IGNORECASE)


class Source(NamedTuple):
    """A Python function that launched something.

    The profiler records where a function begins, so `line` is that of its `def` or first decorator, not of the call.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Links:
    """For each device event of a trace, row by row, what it belongs to; -1 where nothing is known.

    Attributes:
        launch: Row of `Trace.launches`.
        op: Row of `Trace.ops`: the innermost op around the launch. A kernel replayed from a graph has none.
        graph: Whether it was launched as part of a CUDA or HIP graph.
    """

    trace: Trace
    launch: Ints
    op: Ints
    graph: NDArray[np.bool_]

    @cached_property
    def source(self) -> Ids:
        """For each device event the number in `sources` of the innermost serving frame around its launch, or -1.

        A kernel replayed from a graph has none: the frame around the replay is not what put the kernel into the graph.
        """
        return self._frames[0]

    @cached_property
    def sources(self) -> list[Source]:
        """The functions that launched something."""
        return self._frames[1]

    @cached_property
    def _frames(self) -> tuple[Ids, list[Source]]:
        return innermost_sources(self.trace, np.where(self.graph, MISSING, self.launch))


def link(trace: Trace) -> Links:
    """Link the device events of one rank's trace."""
    events, launches = trace.device_events, trace.launches
    launch = _first_match(launches.correlation, events.correlation)
    launched = launch != MISSING
    graph = launched.copy()
    graph[launched] = graph_launches(trace)[launch[launched]]

    # The op is the one whose time encloses the launch. Its recorded id names the same one in newer traces and a stale
    # one in some older (2022), so it speaks only where time does not.
    op = np.full(len(events), MISSING, np.int64)
    rows = launch[launched]
    op[launched] = enclosing(trace.ops, launches.thread[rows], launches.start[rows])
    external = events.external_id.copy()
    unnamed = launched & (external == MISSING)
    external[unnamed] = launches.external_id[launch[unnamed]]
    op = np.where(op == MISSING, _first_match(trace.ops.external_id, external), op)
    op[graph] = MISSING
    return Links(trace, launch, op, graph)


def graph_launches(trace: Trace) -> NDArray[np.bool_]:
    """Whether each of a trace's launches launches a CUDA or HIP graph."""
    return _calls(trace, _GRAPH_LAUNCH)


def kernel_launches(trace: Trace) -> NDArray[np.bool_]:
    """Whether each of a trace's launches launches a kernel by itself."""
    return _calls(trace, _KERNEL_LAUNCH)


def work_launches(trace: Trace) -> NDArray[np.bool_]:
    """Whether each of a trace's launches always leads to work on the device, as launches of kernels and graphs do.

    Copies and fills do not: one of no bytes runs nothing.
    """
    return kernel_launches(trace) | graph_launches(trace)


def running_launches(trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Whether each of a trace's launches has to have led to work on the device when it was made."""
    return work_launches(trace) & ~captured_launches(trace, links)


def captured_launches(trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Whether each launch was made while a graph was captured: it runs when that is replayed, not then.

    On whichever thread: autograd launches from a thread of its own into the stream that another one captures. Where a
    capture's beginning or end is missing, because the trace began or ended in it or the profiler lost it, the capture
    reaches as far as launches led to nothing.
    """
    begins, ends = _calls(trace, _CAPTURE_BEGINS), _calls(trace, _CAPTURE_ENDS)
    captured = np.zeros(len(begins), bool)
    if not (begins.any() or ends.any()):
        return captured
    ordered = np.argsort(trace.launches.start, kind="stable")
    ran = np.flatnonzero(np.isin(ordered, links.launch))  # these and the following are places in that order
    within = np.zeros(len(ordered), bool)
    begun: list[int] = []
    for place in np.flatnonzero((begins | ends)[ordered]).tolist():
        if begins[ordered[place]]:
            begun.append(place)
        elif begun:
            within[begun.pop() : place] = True
        else:
            before = ran[: np.searchsorted(ran, place)]
            within[before[-1] + 1 if len(before) else 0 : place] = True
    for place in begun:
        after = ran[np.searchsorted(ran, place) :]
        within[place : after[0] if len(after) else None] = True
    captured[ordered] = within
    return captured


def _calls(trace: Trace, names: re.Pattern[str]) -> NDArray[np.bool_]:
    """Whether each of a trace's launches is a call of such a name."""
    named = np.array([bool(names.search(name)) for name in trace.names] or [False])
    return named[trace.launches.name]


def enclosing(intervals: Table, threads: Ids, times: Ints) -> Ints:
    """The innermost interval around each instant on its thread: the row of the last begun that has not ended, or -1.

    Profilers write intervals that do not nest; an interval that outlives its parent is still found.
    """
    found = np.full(len(times), MISSING, np.int64)
    for thread in np.unique(threads):
        rows = np.flatnonzero(intervals.thread == thread)
        asked = np.flatnonzero(threads == thread)
        found[asked] = _enclosing_on_one_thread(intervals.start[rows], intervals.end[rows], rows, times[asked])
    return found


def _enclosing_on_one_thread(starts: Ints, ends: Ints, rows: Ints, times: Ints) -> Ints:
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    first, last = np.searchsorted(ordered, starts), np.searchsorted(ordered, ends, "right")
    useful = np.flatnonzero(first < last)  # most intervals hold no instant that was asked for
    useful = useful[np.lexsort((-ends[useful], starts[useful]))]
    answer = np.full(len(times), MISSING, np.int64)
    stack: list[tuple[int, int]] = []
    pending = iter(zip(starts[useful].tolist(), ends[useful].tolist(), rows[useful].tolist(), strict=True))
    upcoming = next(pending, None)
    for position, time in zip(order.tolist(), ordered.tolist(), strict=True):
        while upcoming is not None and upcoming[0] <= time:
            stack.append((upcoming[1], upcoming[2]))
            upcoming = next(pending, None)
        while stack and stack[-1][0] < time:
            stack.pop()
        if stack:
            answer[position] = stack[-1][1]
    return answer


def _first_match(keys: Ints, wanted: Ints) -> Ints:
    """For each wanted value the first row of `keys` that has it, or -1; a wanted -1 is never found."""
    if not len(keys):
        return np.full(len(wanted), MISSING, np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys[order], wanted)
    row = order[np.minimum(place, len(keys) - 1)]
    return np.where((keys[row] == wanted) & (wanted != MISSING), row, MISSING)


def parse_source(frame: str) -> Source | None:
    """A frame's name, such as `sglang/srt/layers/linear.py(141): forward`, if it is of a serving package.

    The path is cut to begin at the package, so that it is the same wherever the package is installed.
    """
    found = re.match(r"(.*\.py)\((\d+)\): (.+)$", frame)
    if found is None:
        return None
    path = found[1].replace("\\", "/")
    for package in SERVING_PACKAGES:
        at = max(path.rfind(f"/{package}/") + 1, 0 if path.startswith(f"{package}/") else -1)
        if path.startswith(f"{package}/", at):
            return Source(path[at:], int(found[2]), found[3])
    return None


def innermost_sources(trace: Trace, launch: Ints) -> tuple[Ids, list[Source]]:
    """For each launch, by its row or -1, the number of the innermost serving function around it, or -1; and those."""
    result = np.full(len(launch), MISSING, np.int32)
    launched = np.flatnonzero(launch != MISSING)
    rows = launch[launched]
    around = enclosing(trace.frames, trace.launches.thread[rows], trace.launches.start[rows])
    known = around != MISSING
    names = trace.frames.name[around[known]]
    by_name = {name: source for name in set(names.tolist()) if (source := parse_source(trace.names[name]))}
    sources = sorted(set(by_name.values()))
    number_of = {name: sources.index(source) for name, source in by_name.items()}
    result[launched[known]] = [number_of.get(name, MISSING) for name in names.tolist()]
    return result, sources
