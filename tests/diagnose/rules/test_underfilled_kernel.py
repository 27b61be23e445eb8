"""underfilled-kernel: fewer blocks than multiprocessors where it matters, on NVIDIA's grids and on HIP's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.diagnose.rules.finding import ALL_REDUCE, GEMM, found, steps
from tests.trace_builder import TraceBuilder

KIND = "underfilled-kernel"
SECOND_STAGE = "_fwd_kernel_stage2"
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}


def kernels(
    name: str,
    grid: Sequence[int] | None,
    duration: float = 20,
    *,
    other_us: float = 1000,
    call: str = "cuLaunchKernelEx",
) -> Callable[[TraceBuilder, float], None]:
    """Ten launches of a kernel and other work that fills the card."""

    def fill(builder: TraceBuilder, start: float) -> None:
        for number in range(10):
            at = start + 10 + 200 * number
            correlation = builder.launch(at, 2, name=call)
            builder.kernel(name, at + 10, duration, correlation, grid=grid, block=(256, 1, 1))
        correlation = builder.launch(start + 3_000, 2, name=call)
        builder.kernel("filling_kernel", start + 3_100, other_us, correlation, grid=(300_000, 1, 1), block=(256, 1, 1))

    return fill


def test_the_triton_second_stage_leaves_most_of_the_card_unused(tmp_path: Path):
    """SGLang's sglang/srt/layers/attention/triton_ops/decode_attention.py: one block a request and head."""
    (finding,) = found(steps(kernels(SECOND_STAGE, (1, 16, 1))).write(tmp_path / "a.json"), KIND)
    assert (finding.evidence["blocks_least"], finding.evidence["multiprocessors"]) == (16, 132)
    assert finding.evidence["launches_per_step"] == 10
    assert finding.evidence["ms_per_step"] == pytest.approx(0.2)
    assert finding.cost_ms_per_step == pytest.approx(0.2 * (1 - 16 / 132))
    assert "--triton-attention-num-kv-splits" in finding.remedy


@pytest.mark.parametrize(("blocks", "count"), [(16, 1), (90, 1), (95, 0), (128, 0), (132, 0), (1000, 0)])
def test_what_counts_is_the_unused_part(tmp_path: Path, blocks: int, count: int):
    """A sixth of the step on 90 of 132 multiprocessors wastes 5.3 % of it, on 95 4.7 %; 128 is a persistent kernel."""
    path = steps(kernels(GEMM, (blocks, 1, 1), other_us=1000)).write(tmp_path / "a.json")
    assert len(found(path, KIND)) == count


@pytest.mark.parametrize(("duration", "other_us", "count"), [(5.2, 100, 1), (4.8, 10, 0)])
def test_a_launch_alone_takes_as_long(tmp_path: Path, duration: float, other_us: float, count: int):
    path = steps(kernels(GEMM, (1, 1, 1), duration, other_us=other_us)).write(tmp_path / "a.json")
    assert len(found(path, KIND)) == count


def test_collectives_use_few_blocks_on_purpose(tmp_path: Path):
    assert not found(steps(kernels(ALL_REDUCE, (24, 1, 1))).write(tmp_path / "a.json"), KIND)


def test_without_geometry_or_a_count_of_multiprocessors_nothing_is_said(tmp_path: Path):
    for number, grid in enumerate((None, (), (0, 1, 1), (1, 1))):
        fill = kernels(GEMM, grid, call="hipExtModuleLaunchKernel")
        assert not found(steps(fill).write(tmp_path / f"{number}.json"), KIND)
    nameless = TraceBuilder(device={"id": 0, "name": "NVIDIA H200"})
    assert not found(steps(kernels(GEMM, (1, 1, 1)), builder=nameless).write(tmp_path / "b.json"), KIND)


@pytest.mark.parametrize(
    ("call", "count"), [("hipExtModuleLaunchKernel", 1), ("hipModuleLaunchKernel", 0), ("hipLaunchKernel", 0)]
)
def test_hip_counts_the_grid_in_threads_for_one_call_and_in_blocks_for_the_others(
    tmp_path: Path, call: str, count: int
):
    """25,600 threads in blocks of 256 are 100 blocks on 304 compute units."""
    builder = TraceBuilder(device=MI300X)
    fill = kernels("Cijk_Alik_Bljk_BBS_BH_MT256x16x64", (25_600, 1, 1), call=call)
    findings = found(steps(fill, builder=builder).write(tmp_path / "a.json"), KIND)
    assert [finding.evidence["blocks_most"] for finding in findings] == [100] * count


def test_a_step_too_short_to_be_a_models(shared_traces: Path):
    """A trace of a graph's capture has two fills of a block each, and nothing else ran."""
    assert not found(shared_traces / "public" / "tracelens-sglang-qwen3-8b-capture-bs32-mi300x.json.gz", KIND)


def test_matrix_products_of_one_token(recordings: Path):
    (finding,) = found(recordings / "bf16kv-graph-decode.trace.json.gz", KIND)
    evidence = finding.evidence
    assert evidence["kernel"] == GEMM
    assert (evidence["blocks_least"], evidence["blocks_most"]) == (32, 64)
    assert evidence["launches_per_step"] == 313
    assert evidence["ms_per_step"] == pytest.approx(1.828, abs=1e-3)
    assert finding.cost_ms_per_step == pytest.approx(1.206, abs=1e-3)
    assert "split-K" in finding.remedy
