"""Lists of decoded events to numpy columns: interned text, exact times, integers whatever type they came in."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from decimal import Decimal
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mla_diag.trace.records import Number

Ints: TypeAlias = NDArray[np.int64]
Ids: TypeAlias = NDArray[np.int32]
Key = TypeVar("Key", bound=Hashable)

MISSING = -1
NANOS_PER_MS = 1e6  # every time in a trace's columns is in nanoseconds
NO_TIME = np.iinfo(np.int64).min
# Below this many microseconds a double still tells neighbouring nanoseconds apart; traces that count from the epoch
# are above it (kineto: baseTimeNanoseconds keeps newer ones below).
_EXACT_IN_DOUBLE = float(2**43)
# Times and durations beyond are no times; within, an end is a start plus a duration without overflow. In microseconds.
_LIMIT = 2**62 // 1000


class Interner(dict[Key, int], Generic[Key]):
    """Gives equal values equal small numbers: `interner[value]`, in order of first sight."""

    def __missing__(self, value: Key) -> int:
        """Number a new value."""
        self[value] = number = len(self)
        return number

    def ids(self, values: Iterable[Key]) -> Ids:
        """The numbers of many values."""
        return np.fromiter(map(self.__getitem__, values), np.int32)

    def values_by_id(self) -> list[Key]:
        """The values, at the index of their number."""
        return list(self)


def rows_by(values: Ints) -> dict[int, Ints]:
    """For each distinct value the rows that have it, in order; together as long as the values."""
    order = np.argsort(values, kind="stable")
    distinct, first = np.unique(values[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order, first[1:]), strict=True)) if len(values) else {}


def nanoseconds(texts: Sequence[msgspec.Raw]) -> Ints:
    """Times as the trace writes them, in microseconds, to int64 nanoseconds; `NO_TIME` for what is no number.

    A double holds microseconds since the epoch to a quarter of one; so those are read from their digits.
    """
    joined = b",".join(texts) or b"null"  # a lone missing time must not read as none at all
    try:
        if b"." not in joined and b"e" not in joined:
            whole = np.array(msgspec.json.decode(b"[" + joined + b"]", type=list[int]), np.int64)
            return np.where(np.abs(whole) < _LIMIT, whole * 1000, NO_TIME)
        micros = np.array(msgspec.json.decode(b"[" + joined + b"]", type=list[float]))
    except (msgspec.MsgspecError, OverflowError):
        return _each_exactly(texts)
    if micros.size and np.abs(micros).max() >= _EXACT_IN_DOUBLE:
        return _by_digits(texts, joined, micros)
    floor = np.floor(micros)
    nanos: Ints = floor.astype(np.int64) * 1000 + np.rint((micros - floor) * 1000).astype(np.int64)
    return nanos


def _by_digits(texts: Sequence[msgspec.Raw], joined: bytes, micros: NDArray[np.float64]) -> Ints:
    """Times of three decimals, as Kineto writes them, are nanoseconds without the point; the others one by one."""
    try:
        nanos = np.array(msgspec.json.decode(b"[" + joined.replace(b".", b"") + b"]", type=list[int]), np.int64)
    except (msgspec.MsgspecError, OverflowError):
        return _each_exactly(texts)
    others = np.flatnonzero((np.abs(nanos - micros * 1000) > 1e-6 * np.abs(nanos)) | (np.abs(micros) >= _LIMIT))
    nanos[others] = _each_exactly([texts[row] for row in others.tolist()])
    return nanos


def _each_exactly(texts: Sequence[msgspec.Raw]) -> Ints:
    return np.fromiter(map(_nanoseconds_of_one, texts), np.int64, len(texts))


def durations(micros: Sequence[float | None]) -> tuple[Ints, int]:
    """Durations in microseconds to nanoseconds, and how many were missing, negative or no number and count as 0.

    Profilers have written negative ones (kineto#646, where an end of 0 overflowed).
    """
    values = np.array(micros, np.float64)
    with np.errstate(invalid="ignore"):
        bad = ~((values >= 0) & (values < _EXACT_IN_DOUBLE))
    values[bad] = 0.0
    return np.rint(values * 1000).astype(np.int64), int(bad.sum())


def integers(values: Sequence[Number]) -> Ints:
    """Numbers that may come as text, as floats or not at all, to int64; `MISSING` where there is none."""
    try:
        return np.array([MISSING if value is None else value for value in values], np.int64)
    except (ValueError, TypeError, OverflowError):
        return np.fromiter(map(_integer, values), np.int64, len(values))


def _integer(value: Number) -> int:
    try:
        number = int(value, 0) if isinstance(value, str) else MISSING if value is None else int(value)
    except (ValueError, OverflowError):
        return MISSING
    if 2**63 <= number < 2**64:  # unsigned ids; the largest is how some profilers write -1
        number -= 2**64
    return number if -(2**63) <= number < 2**63 else MISSING


def _nanoseconds_of_one(text: msgspec.Raw) -> int:
    try:
        micros: Any = json.loads(bytes(text), parse_float=Decimal, parse_int=Decimal)
        if isinstance(micros, str):
            micros = Decimal(micros)
        return round(micros * 1000) if isinstance(micros, Decimal) and abs(micros) < _LIMIT else int(NO_TIME)
    except (ValueError, ArithmeticError, RecursionError):
        return int(NO_TIME)
