"""How a command that has something to clean up ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDED_BY = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does, so that what it started ends with it.

    Not for what runs kernels in this process: one that hangs would hold off every handler, and these signals with it.
    """

    def leave(number: int, _: FrameType | None) -> None:
        for each in _ENDED_BY:
            signal.signal(each, signal.SIG_IGN)  # cleaning up is under way
        raise SystemExit(128 + number)

    # What is ignored stays so: nohup has SIGHUP ignored.
    heeded = [number for number in _ENDED_BY if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
