"""exposed-communication: what of the collectives nothing else of the device runs beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mla_diag.diagnose.communication import is_communication
from tests.diagnose.rules.finding import ALL_REDUCE, GEMM, found, steps
from tests.trace_builder import TraceBuilder

KIND = "exposed-communication"


def collective(duration: float, hidden: float = 0, name: str = ALL_REDUCE) -> Callable[[TraceBuilder, float], None]:
    """A kernel of 5 ms, and a collective on another stream of which it hides the first part."""

    def fill(builder: TraceBuilder, start: float) -> None:
        builder.frame("sglang/srt/distributed/parallel_state.py(519): all_reduce", start + 1, 100)
        first, second = builder.launch(start + 5, 2), builder.launch(start + 10, 2)
        builder.kernel(GEMM, start + 100, 5_000, first)
        builder.kernel(name, start + 5_100 - hidden, duration, second, stream=8)

    return fill


def test_the_part_that_nothing_hides(tmp_path: Path):
    (finding,) = found(steps(collective(1_000, hidden=400), count=3).write(tmp_path / "a.json"), KIND)
    evidence = finding.evidence
    assert evidence["communication_ms_per_step"] == pytest.approx(1.0)
    assert evidence["hidden_ms_per_step"] == pytest.approx(0.4)
    assert evidence["launches_per_step"] == 1
    assert finding.cost_ms_per_step == pytest.approx(0.6)
    assert finding.share == pytest.approx(0.1)
    assert finding.cause is not None
    assert finding.cause.function == "all_reduce"


@pytest.mark.parametrize(("duration", "count"), [(280, 1), (250, 0)])
def test_a_twentieth_of_the_step(tmp_path: Path, duration: float, count: int):
    """280 us beside 5 ms are 5.3 % of both, 250 us 4.8 %."""
    assert len(found(steps(collective(duration)).write(tmp_path / "a.json"), KIND)) == count


def test_hidden_collectives_cost_nothing(tmp_path: Path):
    assert not found(steps(collective(4_000, hidden=4_500)).write(tmp_path / "a.json"), KIND)


@pytest.mark.parametrize(
    "kernel",
    [
        ALL_REDUCE,
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
        "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)",
        "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(void*)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>(int)",
        "void mscclpp::allreduce_simple<float>(int)",
        "quickreduce::allreduce_prototype_twoshot<int>",
    ],
)
def test_collectives_by_their_names(kernel: str):
    assert is_communication(kernel)


@pytest.mark.parametrize(
    "kernel",
    [
        GEMM,
        "_combined_routing_compute",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)",
        "void cub::DeviceReduceByKeyKernel<cub::Policy>(int)",
        "_moe_combine_kernel",
        "paged_attention_ll4mi_reduce_kernel",
        "vectorized_gather_kernel",
    ],
)
def test_what_only_sounds_like_a_collective(kernel: str):
    assert not is_communication(kernel)


def test_all_reduces_through_symmetric_memory_on_a_real_b200(shared_traces: Path):
    (finding,) = found(shared_traces / "public" / "tracelens-vllm-eager-b200.json.gz", KIND)
    assert finding.cost_ms_per_step == pytest.approx(2.142, abs=1e-3)
    assert finding.evidence["launches_per_step"] == 74
    assert finding.evidence["hidden_ms_per_step"] == 0
    assert finding.cause is not None
    assert finding.cause.function == "all_reduce"


def test_nccl_of_a_training_job_of_which_a_part_is_hidden(shared_traces: Path):
    (finding,) = found(shared_traces / "public" / "hta-sampled-rank-0.json.gz", KIND)
    assert finding.evidence["communication_ms_per_step"] == pytest.approx(198.10, abs=0.01)
    assert finding.evidence["hidden_ms_per_step"] == pytest.approx(30.08, abs=0.01)


def test_one_card_has_no_collectives(recordings: Path):
    assert not found(recordings / "bf16kv-graph-decode.trace.json.gz", KIND)
