"""How a command that has something to clean up ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mla_diag.signals import handled

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

    with handled(_ENDED_BY, leave):
        yield
