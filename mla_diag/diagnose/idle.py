"""When the device does nothing, and whether that is because the host had launched nothing.

A gap before a kernel is the host's if the kernel was launched only after the gap had begun, and ran soon after that:
its queue was empty. If it had been launched before, the device itself was slow to start it, or it waited for another
stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_diag.diagnose.steps import Steps
from mla_diag.diagnose.thresholds import LATE_LAUNCH_MICROSECONDS
from mla_diag.trace.columns import MISSING, Ints
from mla_diag.trace.link import Links
from mla_diag.trace.model import DeviceEvents, Trace


class Gaps(NamedTuple):
    """Stretches without any device event, in order.

    Attributes:
        start: Nanoseconds.
        end: Nanoseconds.
        before: The device event that ends each.
    """

    start: Ints
    end: Ints
    before: Ints

    @property
    def length(self) -> Ints:
        """Nanoseconds."""
        return self.end - self.start

    def take(self, rows: NDArray[np.bool_]) -> Gaps:
        """Some of them."""
        return Gaps(self.start[rows], self.end[rows], self.before[rows])


def gaps(events: DeviceEvents) -> Gaps:
    """The gaps between device events."""
    order = np.argsort(events.start, kind="stable")
    idle_from = np.maximum.accumulate(events.end[order])[:-1]
    idle_to = events.start[order][1:]
    open_ = idle_to > idle_from
    return Gaps(idle_from[open_], idle_to[open_], order[1:][open_])


def inside_steps(found: Gaps, trace: Trace, steps: Steps, chosen: Ints) -> Gaps:
    """The gaps between two device events of one chosen step; those before its first are not in it."""
    events = trace.device_events
    placed = np.flatnonzero(steps.inside != MISSING)
    first = np.full(len(steps.spans) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, steps.inside[placed], events.start[placed])
    step = steps.inside[found.before]
    return found.take(np.isin(step, chosen) & (found.start >= first[step]))


def launched_late(found: Gaps, trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Whether each gap is the host's: nothing was queued when it began."""
    launch = links.launch[found.before]
    known = launch != MISSING
    launched_at = np.zeros(len(launch), np.int64)
    launched_at[known] = trace.launches.start[launch[known]]
    waited = found.end - launched_at
    late: NDArray[np.bool_] = known & (launched_at > found.start) & (waited <= LATE_LAUNCH_MICROSECONDS * 1000)
    return late


def records_stacks(trace: Trace) -> bool:
    """Whether the profiler recorded Python frames, which makes the host two to three times slower."""
    return bool(trace.metadata.get("with_stack")) or len(trace.frames) > 0
