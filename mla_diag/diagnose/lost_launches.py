"""Launches whose device events the profiler lost, and what those would have taken.

A launch does not say which kernel it starts, nor how long that runs; what the same launch did in other steps does, and
what the same op did on inputs of the same shapes, as in other layers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_diag.diagnose.communication import is_communication
from mla_diag.diagnose.step_spans import StepSpans
from mla_diag.diagnose.steps import same_launches
from mla_diag.trace.columns import MISSING, Ints, rows_by
from mla_diag.trace.link import Links, enclosing, graph_launches, running_launches
from mla_diag.trace.model import Trace


@dataclass(frozen=True)
class LostLaunches:
    """Launches of kernels and graphs, row by row, and which of them led to nothing that the trace holds.

    Attributes:
        launch: Row of `Trace.launches`.
        lost: Whether the trace has no device event of it.
        nanoseconds: What a lost one would have taken: the mean of its like. NaN of one that nothing is like, and of
            those that are not lost.
        by_step: Whether its like are the same launch of other steps; else they are other calls of the same op.
    """

    launch: Ints
    lost: NDArray[np.bool_]
    nanoseconds: NDArray[np.float64]
    by_step: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.launch)

    def take(self, rows: NDArray[np.bool_]) -> LostLaunches:
        """Some of them, by a mask."""
        columns = {field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)}
        return LostLaunches(**columns)

    @property
    def count(self) -> int:
        """How many are lost."""
        return int(self.lost.sum())

    @property
    def timed(self) -> NDArray[np.bool_]:
        """Whether it is lost and its like tell what it would have taken."""
        return ~np.isnan(self.nanoseconds)

    @property
    def unknown(self) -> int:
        """How many are lost that nothing is like."""
        return self.count - int(self.timed.sum())

    def time_share(self, recorded: int) -> float:
        """What the others would have taken, as a part of that and of what was recorded, 0 to 1.

        Args:
            recorded: The device time of the launches that are not lost, in nanoseconds.
        """
        taken = float(np.nansum(self.nanoseconds))
        return taken / (recorded + taken) if taken else 0.0

    def share(self, recorded: int) -> float:
        """How much of what ran is lost, 0 to 1: by time, and where that is unknown by count, as launches of mean time.

        Args:
            recorded: As for `time_share`.
        """
        by_time, by_count = self.time_share(recorded), self.unknown / max(len(self), 1)
        return by_time + by_count * (1.0 - by_time)


class _Ran(NamedTuple):
    """What launches ran: a number for the kernel and its geometry, and the device time."""

    kernel: Ints
    nanoseconds: NDArray[np.float64]

    def take(self, rows: Ints) -> _Ran:
        return _Ran(self.kernel[rows], self.nanoseconds[rows])


def find_lost_launches(trace: Trace, links: Links, spans: StepSpans) -> LostLaunches:
    """Find the launches that lack device events, and their like.

    Args:
        trace: One rank's trace. What it launched into a graph is left out: it runs when that is replayed.
        links: Its links.
        spans: Where its steps are.
    """
    launch = np.flatnonzero(running_launches(trace, links))
    lost = ~np.isin(launch, links.launch)
    nanoseconds, by_step = np.full(len(launch), np.nan), np.zeros(len(launch), bool)
    if lost.any():
        ran = _ran(trace, links).take(launch)
        nanoseconds = _mean_of_like(same_launches(trace, spans, launch), lost, ran)
        by_step = ~np.isnan(nanoseconds)
        nanoseconds = np.where(by_step, nanoseconds, _mean_of_like(_same_ops(trace, launch), lost, ran))
    return LostLaunches(launch, lost, nanoseconds, by_step)


def _ran(trace: Trace, links: Links) -> _Ran:
    """What each launch ran.

    A graph has no number: it is the same if its launch is. A collective has no time: it runs for as long as another
    rank keeps it waiting, which no other call tells (in a public trace, HTA's hta-sampled-rank-0, 12 to 42 ms of one).
    """
    events, table = np.flatnonzero(links.launch != MISSING), trace.device_events
    launch = links.launch[events]
    kernel = np.full(len(trace.launches), MISSING, np.int64)
    keys = np.stack([table.name, table.grid, table.block])[:, events]
    kernel[launch] = np.unique(keys, axis=1, return_inverse=True)[1]
    kernel[graph_launches(trace)] = MISSING
    nanoseconds = np.zeros(len(trace.launches))
    np.add.at(nanoseconds, launch, table.duration[events])
    collectives = [name for name in np.unique(table.name).tolist() if is_communication(trace.names[name])]
    nanoseconds[launch[np.isin(table.name[events], collectives) & ~links.graph[events]]] = np.nan
    return _Ran(kernel, nanoseconds)


def _same_ops(trace: Trace, launch: Ints) -> Ints:
    """For each of some launches a number that it shares with those as far into an op of the same name and inputs.

    -1 where no op is around it or its inputs were not recorded: without them a copy of the pool is like one of a row.
    """
    calls, ops = trace.launches.take(launch), trace.ops
    same = np.full(len(launch), MISSING, np.int64)
    op = enclosing(ops, calls.thread, calls.start)
    place = np.zeros(len(launch), np.int64)
    for rows in rows_by(op).values():
        place[rows[np.argsort(calls.start[rows], kind="stable")]] = np.arange(len(rows))
    told = np.flatnonzero(op != MISSING)
    recorded = np.array([bool(value) for value in trace.values] or [False])
    told = told[recorded[ops.dims[op[told]]]]
    of_op = np.stack([ops.name, ops.dims, ops.types, ops.strides])[:, op[told]]
    same[told] = np.unique(np.vstack([of_op, calls.name[told], place[told]]), axis=1, return_inverse=True)[1]
    return same


def _mean_of_like(like: Ints, lost: NDArray[np.bool_], ran: _Ran) -> NDArray[np.float64]:
    """For each lost launch the mean time of those of its number; NaN if none ran, or not all of them one kernel."""
    numbers = int(like.max(initial=MISSING)) + 1
    known, wanted = ~lost & (like != MISSING), lost & (like != MISSING)
    kernels = np.bincount(np.unique(np.stack([like, ran.kernel])[:, known], axis=1)[0], minlength=numbers)
    mean, result = np.zeros(numbers), np.full(len(like), np.nan)
    np.add.at(mean, like[known], ran.nanoseconds[known])
    mean /= np.maximum(np.bincount(like[known], minlength=numbers), 1)
    mean[kernels != 1] = np.nan
    result[wanted] = mean[like[wanted]]
    return result
