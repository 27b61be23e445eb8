from __future__ import annotations

import pytest

from mla_diag.trace.rank import Coordinates, coordinates_in, global_rank_in, parse_rank


@pytest.mark.parametrize(
    ("text", "coordinates"),
    [
        ("1795971432.2475967-TP-0-DECODE.trace.json.gz", Coordinates(tp=0)),
        ("1795971432.24-TP-3-DP-1-PP-2-EP-3-EXTEND.trace.json.gz", Coordinates(3, 1, 2, 3)),
        ("TP00-DP01", Coordinates(tp=0, dp=1)),
        ("TP07-PP01-EP03", Coordinates(tp=7, pp=1, ep=3)),
        ("dp1_pp0_tp3_dcp0_ep2_rank7.1795971432.pt.trace.json.gz", Coordinates(3, 1, 0, 2)),  # vLLM's names
        ("a-TP12.json", Coordinates(tp=12)),
        ("glm-dp8-test-1795971432-TP-1.trace.json.gz", Coordinates(tp=1)),  # a prefix that somebody chose
        ("Unknown", None),
        ("http-1.json", None),
        ("step5.json", None),
        ("merged-17.trace.json.gz", None),
    ],
)
def test_coordinates_of_names_and_labels(text: str, coordinates: Coordinates | None):
    assert coordinates_in(text) == coordinates


def test_coordinates_are_written_as_far_as_they_are_known():
    assert str(Coordinates(tp=3, dp=1)) == "TP-3 DP-1"
    assert str(Coordinates(0, 0, 0, 0)) == "TP-0 DP-0 PP-0 EP-0"


def test_a_global_rank_in_a_name():
    assert (global_rank_in("capture/bs_8_rank2.json.gz"), global_rank_in("rank-3.json")) == (2, 3)
    assert global_rank_in("TP-1.json") is None


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        (Coordinates(tp=0), [0, 2]),
        (Coordinates(dp=1), [2, 3]),
        (Coordinates(tp=1, dp=1), [3]),
        (Coordinates(pp=0), [0, 1, 2, 3]),  # where there is one, names leave it out
        (Coordinates(pp=1), []),
    ],
)
def test_coordinates_that_are_given_in_part_stand_for_several_ranks(asked: Coordinates, ranks: list[int]):
    job = [Coordinates(tp=tp, dp=dp) for dp in (0, 1) for tp in (0, 1)]
    assert [number for number, rank in enumerate(job) if rank.within(asked)] == ranks


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("3", 3),
        ("TP1-DP0", Coordinates(tp=1, dp=0)),
        ("tp-1-dp-0", Coordinates(tp=1, dp=0)),
        ("DP01", Coordinates(dp=1)),
        (str(Coordinates(tp=1, dp=0)), Coordinates(tp=1, dp=0)),
        ("-1", None),
        ("TP", None),
        ("first", None),
        ("x-TP1", None),
        ("", None),
    ],
)
def test_what_somebody_asks_for(text: str, rank: int | Coordinates | None):
    assert parse_rank(text) == rank
