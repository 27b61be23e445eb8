"""Handlers of signals for as long as a block runs."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mla_diag.signals import handled


@pytest.fixture
def seen() -> list[int]:
    return []


def test_a_handler_sees_signals_until_the_block_is_left(seen: list[int]):
    before = signal.getsignal(signal.SIGTERM)

    class LeftError(Exception):
        pass

    def leave() -> None:
        with handled([signal.SIGTERM], lambda number, _: seen.append(number)):
            signal.raise_signal(signal.SIGTERM)
            raise LeftError

    with pytest.raises(LeftError):
        leave()
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_ignored_stays_so(seen: list[int]):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled([signal.SIGHUP], lambda number, _: seen.append(number)):
            signal.raise_signal(signal.SIGHUP)
        assert (seen, signal.getsignal(signal.SIGHUP)) == ([], signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_sets_no_handler(seen: list[int]):
    before = signal.getsignal(signal.SIGTERM)

    def look() -> bool:
        with handled([signal.SIGTERM], lambda number, _: seen.append(number)):
            return signal.getsignal(signal.SIGTERM) is before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result()
