from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mla_diag.trace.columns import MISSING, NO_TIME, Interner, durations, integers, nanoseconds, rows_by

EPOCH = 1_790_857_026_000_000  # microseconds, September 2026


def read(*texts: str) -> list[int]:
    return nanoseconds([msgspec.Raw(text.encode()) for text in texts]).tolist()


def exact(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))


def written(whole: int, digits: int, decimals: int) -> str:
    return f"{whole}.{digits % 10**decimals:0{decimals}d}" if decimals else str(whole)


counts = st.one_of(st.integers(0, 10**9), st.integers(0, 2**43 - 1), st.integers(EPOCH - 10**12, EPOCH + 10**12))
times = st.builds(written, counts, st.integers(0, 10**9 - 1), st.integers(0, 9))
with_three_decimals = st.builds(written, counts, st.integers(0, 999), st.just(3))


@given(st.lists(with_three_decimals, max_size=20))
@example([f"{EPOCH}.001", f"{EPOCH}.999", "0.001"])
@example(["8796093022207.999", "5103897882739.474"])
def test_times_of_three_decimals_are_exact(texts):
    assert read(*texts) == [exact(text) for text in texts]


@given(st.lists(times, max_size=20))
@example([f"{EPOCH}.25", f"{EPOCH}", "5"])
def test_times_of_any_decimals_are_right_to_the_nanosecond(texts):
    for found, text in zip(read(*texts), texts, strict=True):
        assert abs(Decimal(found) - Decimal(text) * 1000) <= (Decimal("0.5") if len(text) > 20 else 1)


@given(st.lists(st.one_of(counts.map(str), counts.map(lambda count: f"-{count}")), max_size=20))
def test_whole_microseconds_are_exact(texts):
    assert read(*texts) == [int(text) * 1000 for text in texts]


@given(st.integers(1, 10**6), st.integers(-9, 9))
def test_exponents_are_understood(mantissa, exponent):
    text = f"{mantissa}e{exponent}"
    for spelled in (text, text.upper(), f"{mantissa}.0E{exponent:+d}"):
        assert abs(read(spelled)[0] - exact(text)) <= 1


def test_epoch_times_keep_their_nanoseconds():
    """A double holds them to a quarter of a microsecond."""
    assert read(f"{EPOCH}.001", f"{EPOCH}.002") == [EPOCH * 1000 + 1, EPOCH * 1000 + 2]


@pytest.mark.parametrize(
    "odd",
    [
        *("", "null", '"soon"', "true", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e400", "1e999999", "9" * 40),
        *("4611686018427388", "-4611686018427388", str(2**63 - 1), str(2**63), "4611686018427387.904"),
    ],
)
@pytest.mark.parametrize("others", [("1", "2"), ("1.5", "2.5"), (f"{EPOCH}.001", f"{EPOCH}.002")])
def test_what_is_no_time_spoils_no_other(odd, others):
    assert read(others[0], odd, others[1]) == [exact(others[0]), NO_TIME, exact(others[1])]


@pytest.mark.parametrize("odd", ["", "null", "{}", "NaN", str(2**63)])
def test_a_lone_time_that_is_none_is_one_row(odd):
    assert read(odd) == [NO_TIME]
    assert read(odd, odd) == [NO_TIME] * 2


def test_times_may_be_text():
    assert read('"12.5"', "1") == [12_500, 1000]
    assert read(f'"{EPOCH}.001"') == [EPOCH * 1000 + 1]


def test_no_times_are_no_times():
    assert read() == []


def test_durations_are_never_negative_and_never_rounded_up_front():
    """HTA#317: rounding 100.7 + 0.2 to whole microseconds gave -1; kineto#646: an end of 0 gave a negative duration."""
    found, clamped = durations([0.2, 0.001, 0.0, -0.5, -877_000_000.0, float("nan"), float("inf"), 1e300])
    assert found.tolist() == [200, 1, 0, 0, 0, 0, 0, 0]
    assert clamped == 5


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))))
def test_integers_stay(values):
    assert integers(values).tolist() == [MISSING if value is None else value for value in values]


def test_integers_come_as_text_and_floats_too():
    odd = [3, "4", "0x1f", 5.0, None, "", "x", float("nan"), float("inf"), 2**64, -(2**63) - 1, "-1", "08"]
    assert integers(odd).tolist() == [3, 4, 31, 5] + [MISSING] * 7 + [-1, MISSING]


def test_unsigned_ids_stay_distinct():
    ids = [2**63 + 5, 2**64 - 2, 2**64 - 1, 7]
    found = integers(ids).tolist()
    assert len(set(found)) == 4
    assert found[2] == MISSING  # how -1 looks unsigned
    assert found[3] == 7


def test_interning_numbers_values_by_first_sight():
    names: Interner[str] = Interner()
    assert names.ids(["b", "a", "b"]).tolist() == [0, 1, 0]
    assert names.ids(iter(["c", "a"])).tolist() == [2, 1]
    assert names.ids([]).dtype == np.int32
    assert names.values_by_id() == ["b", "a", "c"]


@given(st.lists(st.integers(-3, 3)))
def test_rows_by_value(values: list[int]):
    grouped = {value: rows.tolist() for value, rows in rows_by(np.array(values, np.int64)).items()}
    assert grouped == {value: [n for n, other in enumerate(values) if other == value] for value in set(values)}
