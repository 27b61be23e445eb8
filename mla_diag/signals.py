"""Handlers of signals for as long as a block runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Have a handler see some signals until the block is left, which puts back what saw them before.

    What is ignored stays so: nohup has SIGHUP ignored. Off the main thread, which alone may set handlers and runs them,
    nothing changes.
    """
    heeded = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        heeded = []
    earlier = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)
