"""A process in a session of its own, and the signals that come while it is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mla_diag.bench.start import kill_session, start_session

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]


def test_it_leads_a_session_and_is_ended_with_it():
    process = start_session(SLEEP)
    assert os.getsid(process.pid) == process.pid
    kill_session(process)
    assert process.wait(timeout=10) == -signal.SIGKILL
    kill_session(process)  # that is gone


def interrupted_popen(number: int, started: list[subprocess.Popen[bytes]]) -> Callable[..., subprocess.Popen[bytes]]:
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        signal.raise_signal(number)
        started.append(real(*args, **options))
        return started[0]

    return popen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_is_started_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, number: signal.Signals):
    """Of 120 signals within 3 ms of the start, 7 left a server running."""
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", interrupted_popen(number, started))

    class EndedError(Exception):
        pass

    def end(*_: object) -> None:
        raise EndedError

    before = signal.signal(number, end)
    try:
        with pytest.raises(EndedError):
            start_session(SLEEP)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
        ended = [process.returncode for process in started]
        for process in started:
            kill_session(process)
    assert ended == [-signal.SIGKILL]


def test_what_cannot_be_run_is_an_error():
    with pytest.raises(OSError, match="no-such-program"):
        start_session(["/no-such-program"])
