"""Start a process in a session of its own, which nothing but this one ends: so a signal must not come in between."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from mla_diag.signals import handled

__all__ = ["kill_session", "signal_session", "start_session"]

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_session(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that leads a session. A signal that arrives meanwhile is heeded then, and nothing has started.

    Args:
        command: What to run.
        **options: Of `subprocess.Popen`.

    Raises:
        OSError: It cannot be run.
    """
    process = None
    try:
        with _signals_held():
            process = subprocess.Popen(command, start_new_session=True, **options)
    except BaseException:
        if process is not None:
            kill_session(process)
            process.wait()
        raise
    return process


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    signal_session(process, signal.SIGKILL)


def signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and what it started, as far as they are there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Heed the signals that arrive in the block when it is left. A mask would do it too, but children inherit that."""
    arrived: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    try:
        with handled(_HELD, remember):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])
