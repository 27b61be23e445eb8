"""Before and after: ops are matched by what they are, and every millisecond of the difference is somewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mla_diag
from mla_diag.diagnose.compare import Change, Comparison, StageChange, compare
from tests.trace_builder import TraceBuilder

Launch = tuple[str, str, list[int], str, float]  # op, kernel, shape, function, microseconds


def trace(path: Path, launches: list[Launch], *, rank: int = 0) -> Path:
    builder = TraceBuilder(rank=rank)
    for step in range(2):
        begin = 10_000 * step
        builder.span("step[DECODE bs=1]", begin, 9_000)
        for number, (op, kernel, shape, function, duration) in enumerate(launches):
            at = begin + 200 * number
            builder.frame(f"sglang/srt/layers/a.py({number + 1}): {function}", at, 190)
            builder.dispatch(op, at + 1, [(kernel, at + 50, duration)], dims=[shape], types=["float"])
    return builder.write(path)


@pytest.fixture
def changes(tmp_path: Path) -> Callable[[list[Launch], list[Launch]], StageChange]:
    def of(before: list[Launch], after: list[Launch]) -> StageChange:
        sides = (trace(tmp_path / "a.json", before), trace(tmp_path / "b.json", after))
        (stage,) = compare(*map(mla_diag.explain, sides)).stages
        return stage

    return of


def kinds(stage: StageChange) -> dict[str | None, Change]:
    return {op.op: op.change for op in stage.ops}


def test_what_went_came_grew_shrank_and_stayed(changes: Callable[[list[Launch], list[Launch]], StageChange]):
    stage = changes(
        [
            ("went", "k1", [1], "f", 50),
            ("grew", "k2", [1], "f", 10),
            ("shrank", "k3", [1], "f", 30),
            ("same", "k4", [1], "f", 20),
        ],
        [
            ("came", "k5", [1], "f", 5),
            ("grew", "k2", [1], "f", 20),
            ("shrank", "k3", [1], "f", 10),
            ("same", "k4", [1], "f", 20),
        ],
    )
    assert kinds(stage) == {name: Change(name) for name in ("went", "came", "grew", "shrank", "same")}
    assert [op.op for op in stage.ops] == ["went", "shrank", "grew", "came", "same"]
    assert stage.speedup == pytest.approx(110 / 55)
    total = sum(op.delta_ms_per_step for op in stage.ops)
    assert total == pytest.approx(stage.after_device_ms - stage.before_device_ms)


def test_a_renamed_kernel_of_the_same_op_place_and_shape_is_the_same_op(
    changes: Callable[[list[Launch], list[Launch]], StageChange],
):
    stage = changes([("aten::mm", "gemm_v1", [1, 8], "qkv", 40)], [("aten::mm", "nvjet_v2", [1, 8], "qkv", 20)])
    (op,) = stage.ops
    assert op.change is Change.SHRANK
    assert (op.before and op.before.kernel, op.after and op.after.kernel) == ("gemm_v1", "nvjet_v2")


def test_the_same_kernel_from_another_function_on_another_shape_is_not_confused(
    changes: Callable[[list[Launch], list[Launch]], StageChange],
):
    stage = changes(
        [("aten::mm", "gemm", [1, 8], "qkv", 40), ("aten::mm", "gemm", [1, 9], "gate", 10)],
        [("aten::mm", "gemm", [1, 9], "gate", 10), ("aten::mm", "gemm", [1, 8], "qkv", 20)],
    )
    assert [(op.source and op.source.function, op.change) for op in stage.ops] == [
        ("qkv", Change.SHRANK),
        ("gate", Change.SAME),
    ]


def test_attention_is_matched_with_attention_of_another_library(
    changes: Callable[[list[Launch], list[Launch]], StageChange],
):
    stage = changes(
        [("a", "BatchMLAPageAttentionKernel", [1], "f", 40)], [("b", "_fwd_grouped_kernel_stage1", [1], "g", 20)]
    )
    (op,) = stage.ops
    assert op.change is Change.SHRANK


def test_of_several_ranks_the_slowest_is_compared(tmp_path: Path):
    for side, durations in (("a", (10, 40)), ("b", (20, 10))):
        (tmp_path / side).mkdir()
        for rank, duration in enumerate(durations):
            trace(tmp_path / side / f"{rank}.json", [("op", "k", [1], "f", duration)], rank=rank)
    (stage,) = compare(mla_diag.explain(tmp_path / "a"), mla_diag.explain(tmp_path / "b")).stages
    assert (stage.before_device_ms, stage.after_device_ms) == (pytest.approx(0.040), pytest.approx(0.020))


def recorded(recordings: Path, before: str, after: str) -> Comparison:
    sides = (recordings / f"{name}.trace.json.gz" for name in (before, after))
    return compare(*map(mla_diag.explain, sides))


def test_the_fix_on_the_h200(recordings: Path):
    (stage,) = recorded(recordings, "base-graph-decode", "native-graph-decode").stages
    assert (stage.before_device_ms, stage.after_device_ms) == (
        pytest.approx(72.440, abs=1e-3),
        pytest.approx(6.960, abs=1e-3),
    )
    assert stage.speedup == pytest.approx(10.4, abs=0.05)
    assert "whole-pool-copy" in stage.fixed
    copy, attention = stage.ops[:2]
    assert (copy.change, copy.after, copy.delta_ms_per_step) == (Change.WENT, None, pytest.approx(-66.449, abs=1e-3))
    assert attention.change is Change.GREW
    assert attention.before is not None
    assert attention.after is not None
    assert "BatchMLAPageAttentionHopperKernel" in attention.after.kernel
    assert attention.before.us_per_launch == pytest.approx(19.5, abs=0.05)
    assert attention.after.us_per_launch == pytest.approx(37.65, abs=0.05)


def test_slowdown_is_that_of_the_stage_that_lost_most(recordings: Path):
    assert recorded(recordings, "bf16kv-graph-decode", "native-graph-decode").slowdown == pytest.approx(0.330, abs=1e-3)
    assert recorded(recordings, "base-graph-decode", "native-graph-decode").slowdown == 0.0
    assert recorded(recordings, "base-graph-decode", "base-graph-decode").slowdown == 0.0
