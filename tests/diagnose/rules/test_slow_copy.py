"""slow-copy: pure data movement far under the card's rate, and nothing that is small, fast, unknown or the pool's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.rules.finding import COPY, found, steps
from tests.trace_builder import H200, TraceBuilder

KIND = "slow-copy"
BF16 = "c10::BFloat16"
PEAK = 4.8e12
SHAPE = [4000, 128, 192]  # 98 million elements: 393 MB read and written
BYTES = 2 * 2 * 4000 * 128 * 192


def copy_of(
    rate: float, *, shape: list[int] = SHAPE, op: str = "aten::copy_", other_us: float = 1000
) -> Callable[[TraceBuilder, float], None]:
    """A step with one copy at a part of the card's peak, and other work."""
    moved = 2 * 2 * shape[0] * shape[1] * shape[2]
    duration = moved / (rate * PEAK) * 1e6

    def fill(builder: TraceBuilder, start: float) -> None:
        tensors: dict[str, Any] = {"dims": [shape, shape], "types": [BF16, BF16]}
        builder.dispatch(op, start + 10, [(COPY, start + 100, duration, [96_000, 1, 1])], **tensors)
        builder.dispatch("aten::mm", start + 200, [("gemm", start + 150 + duration, other_us)])

    return fill


def test_a_copy_at_a_fifth_of_the_rate_costs_what_a_good_one_would_save(tmp_path: Path):
    (finding,) = found(steps(copy_of(0.20)).write(tmp_path / "a.json"), KIND)
    evidence = finding.evidence
    assert evidence["bytes_per_launch"] == BYTES
    assert evidence["bandwidth_share"] == pytest.approx(0.20, rel=1e-3)
    assert evidence["ms_per_step"] == pytest.approx(BYTES / (0.20 * PEAK) * 1e3, rel=1e-3)
    assert finding.cost_ms_per_step == pytest.approx(evidence["ms_per_step"] * (1 - 0.20 / 0.85), rel=1e-3)
    assert finding.share == pytest.approx(finding.cost_ms_per_step / (evidence["ms_per_step"] + 1.0), rel=1e-3)


def test_batches_of_different_sizes_are_one_copy(tmp_path: Path):
    """A prefill copies as many rows as it has tokens, another number in each step; no size alone costs enough."""
    builder = TraceBuilder()
    for number in range(8):
        builder.span(f"step[EXTEND bs=1 toks={4000 + number}]", 10_000 * number, 9_000)
        copy_of(0.2, shape=[4000 + number, 128, 192], other_us=8_000)(builder, 10_000 * number)
    (finding,) = found(builder.write(tmp_path / "a.json"), KIND)
    assert finding.evidence["distinct_shapes"] == 8
    assert finding.evidence["launches_per_step"] == 1


@pytest.mark.parametrize(("rate", "count"), [(0.32, 1), (0.35, 0), (0.90, 0)])
def test_the_rate_decides(tmp_path: Path, rate: float, count: int):
    assert len(found(steps(copy_of(rate)).write(tmp_path / "a.json"), KIND)) == count


@pytest.mark.parametrize(("rows", "count"), [(520, 1), (480, 0)])
def test_copies_shorter_than_the_time_to_get_up_to_speed_are_not_judged(tmp_path: Path, rows: int, count: int):
    """At 4.8 TB/s ten microseconds are 48 MB, which is 489 rows of these."""
    path = steps(copy_of(0.1, shape=[rows, 128, 192], other_us=10)).write(tmp_path / "a.json")
    assert len(found(path, KIND)) == count


def test_what_costs_a_fiftieth_of_the_step_or_less_is_left_alone(tmp_path: Path):
    """The copy wastes 0.31 ms: 2.1 % of a step of 15 ms, 1.7 % of one of 18."""
    for other_us, count in ((14_500, 1), (18_000, 0)):
        path = steps(copy_of(0.2, other_us=other_us), count=1).write(tmp_path / f"{other_us}.json")
        assert len(found(path, KIND)) == count


def test_an_unknown_card_has_no_rate_to_compare_with(tmp_path: Path):
    path = steps(copy_of(0.1), builder=TraceBuilder(device={**H200, "name": "A card of 2031"})).write(
        tmp_path / "a.json"
    )
    assert not found(path, KIND)


def test_an_op_that_computes_is_no_copy(tmp_path: Path):
    assert not found(steps(copy_of(0.1, op="aten::add_")).write(tmp_path / "a.json"), KIND)


@pytest.mark.parametrize(
    ("name", "count"),
    [("Memcpy DtoD (Device -> Device)", 1), ("Memcpy HtoD (Pageable -> Device)", 0)],
)
def test_memcpys_within_the_device_are_judged_and_those_over_the_host_link_are_not(
    tmp_path: Path, name: str, count: int
):
    def fill(builder: TraceBuilder, start: float) -> None:
        correlation = builder.launch(start + 10, name="cudaMemcpyAsync")
        builder.memcpy(start + 50, 1000, correlation, size=200_000_000, name=name)

    assert len(found(steps(fill).write(tmp_path / "a.json"), KIND)) == count


def test_the_whole_pool_is_another_rules_to_blame(shared_traces: Path, recordings: Path):
    """It runs at a fifth of the card's rate, and is said once: by shapes, and by geometry under CUDA graphs."""
    for name in ("base-eager-decode", "base-graph-decode"):
        path = recordings / f"{name}.trace.json.gz"
        assert len(found(path, "whole-pool-copy")) == 1
        assert not found(path, KIND)


def test_the_concatenation_of_rotary_halves_on_a_real_h100(shared_traces: Path):
    (finding,) = found(shared_traces / "public" / "tracelens-qwen1.5-0.5b-h100.json.gz", KIND)
    assert finding.evidence["op"] == "aten::cat"
    assert finding.evidence["launches_per_step"] == 48
    assert finding.evidence["bandwidth_share"] == pytest.approx(0.2606, abs=1e-4)
    assert finding.cost_ms_per_step == pytest.approx(1.397, abs=1e-3)
