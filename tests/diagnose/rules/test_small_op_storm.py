"""small-op-storm: hundreds of tiny launches of one op, said once, and none of what a model needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnose.rules.finding import CAST, GEMM, found, steps
from tests.trace_builder import TraceBuilder

KIND = "small-op-storm"
FRAME = "sglang/srt/layers/attention/flashattention_backend.py(690): forward_decode"


def storm(
    launches: int, duration: float = 1.5, *, other_us: float = 1000, kernel: str = CAST, op: str = "aten::copy_"
) -> Callable[[TraceBuilder, float], None]:
    """Launches of one op in two shapes by turns, from one function, and other work."""

    def fill(builder: TraceBuilder, start: float) -> None:
        builder.frame(FRAME, start + 1, 9_000)
        for number in range(launches):
            at = start + 10 + 10 * number
            shape = [1, 16 if number % 2 else 1, 576]
            tensors = {"dims": [shape, shape], "types": ["c10::Float8_e4m3fn", "c10::BFloat16"]}
            builder.dispatch(op, at, [(kernel, at + 9, duration, [1, 1, 1])], duration=8, **tensors)
        builder.dispatch("aten::mm", start + 9_000, [(GEMM, start + 9_100, other_us)])

    return fill


def test_casts_of_an_fp8_pool_are_one_finding_whatever_their_shapes(tmp_path: Path):
    """sglang#30815: per layer a cast of the query and of what is written, 192 launches and more a step."""
    (finding,) = found(steps(storm(192)).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["launches_per_step"] == 192
    assert finding.evidence["distinct_shapes"] == 2
    assert finding.evidence["microseconds_per_launch"] == pytest.approx(1.5)
    assert finding.cost_ms_per_step == pytest.approx(0.288)
    assert finding.share == pytest.approx(0.288 / 1.288)
    assert finding.cause is not None
    assert finding.cause.function == "forward_decode"


def test_what_to_do_depends_on_whether_it_converts(tmp_path: Path):
    """Any elementwise kernel may load with a cast; that does not make it one."""
    add = "void at::native::elementwise_kernel<at::native::CUDAFunctor_add<float>, LoadWithCast<2> >()"
    (cast,) = found(steps(storm(150)).write(tmp_path / "cast.json"), KIND)
    (addition,) = found(steps(storm(150, kernel=add, op="aten::add")).write(tmp_path / "add.json"), KIND)
    assert cast.remedy.startswith("convert inside the kernel")
    assert addition.remedy.startswith("fuse these")


@pytest.mark.parametrize(("launches", "count"), [(100, 1), (99, 0)])
def test_one_launch_a_layer_is_how_models_are_written(tmp_path: Path, launches: int, count: int):
    assert len(found(steps(storm(launches)).write(tmp_path / "a.json"), KIND)) == count


@pytest.mark.parametrize(("duration", "count"), [(3.0, 1), (3.1, 0)])
def test_longer_kernels_do_something(tmp_path: Path, duration: float, count: int):
    assert len(found(steps(storm(150, duration)).write(tmp_path / "a.json"), KIND)) == count


@pytest.mark.parametrize(("other_us", "count"), [(9_000, 1), (12_000, 0)])
def test_under_a_fiftieth_of_the_step_it_is_not_worth_a_line(tmp_path: Path, other_us: float, count: int):
    """150 launches of 1.5 us are 0.225 ms: 2.4 % of a step of 9.2 ms, 1.8 % of one of 12.2."""
    path = steps(storm(150, other_us=other_us), count=1).write(tmp_path / "a.json")
    assert len(found(path, KIND)) == count


@pytest.mark.parametrize(
    "kernel", ["void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(int)", "set_mla_kv_buffer_kernel"]
)
def test_norms_and_fused_writes_are_what_others_fuse_into(tmp_path: Path, kernel: str):
    assert not found(steps(storm(200, kernel=kernel, op="sglang::norm")).write(tmp_path / "a.json"), KIND)


def test_the_unfused_write_of_an_fp8_pool_under_graphs(recordings: Path):
    """A BF16 pool is written by one fused kernel a layer, an FP8 pool after two casts."""
    (finding,) = found(recordings / "native-graph-decode.trace.json.gz", KIND)
    assert finding.evidence["launches_per_step"] == 156
    assert finding.evidence["launched_by"] == "graph"
    assert finding.cost_ms_per_step == pytest.approx(0.219, abs=1e-3)
    assert not found(recordings / "bf16kv-graph-decode.trace.json.gz", KIND)
