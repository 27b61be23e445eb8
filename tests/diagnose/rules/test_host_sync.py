"""host-sync: waiting inside a step that leaves the device without work, and no other waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnose.rules.finding import found, steps
from tests.trace_builder import TraceBuilder

KIND = "host-sync"
FRAME = "sglang/srt/layers/moe/topk.py(88): select_experts"


def waiting(
    call: str = "cudaStreamSynchronize", *, blocked: float = 2_000, idle: float = 300, op: str | None = "aten::item"
) -> Callable[[TraceBuilder, float], None]:
    """A step of two kernels; between their launches the host waits for the first to end."""

    def fill(builder: TraceBuilder, start: float) -> None:
        first = builder.launch(start + 10, 2)
        builder.kernel("gemm", start + 20, 2_000, first)
        end = start + 2_020  # of the kernel; the call returns a little later
        begin = end + 10 - blocked
        builder.frame(FRAME, begin - 5, blocked + 10)
        if op is not None:
            builder.op(op, begin - 1, blocked + 2)
        builder.launch(begin, blocked, name=call)
        second = builder.launch(end + idle - 8, 2)
        builder.kernel("gemm", end + idle, 7_000, second)

    return fill


def test_an_item_in_the_middle_of_a_step(tmp_path: Path):
    (finding,) = found(steps(waiting(), count=3).write(tmp_path / "a.json"), KIND)
    evidence = finding.evidence
    assert (evidence["call"], evidence["op"]) == ("cudaStreamSynchronize", "aten::item")
    assert evidence["calls_per_step"] == 1
    assert evidence["blocked_ms_per_step"] == pytest.approx(2.0)
    assert finding.cost_ms_per_step == pytest.approx(0.3)
    assert finding.share == pytest.approx(0.03)
    assert finding.cause is not None
    assert (finding.cause.file, finding.cause.function) == ("sglang/srt/layers/moe/topk.py", "select_experts")


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("cudaDeviceSynchronize", 1),
        ("cudaEventSynchronize", 1),
        ("hipStreamSynchronize", 1),
        ("hipMemcpyWithStream", 1),
        ("cudaMemcpy", 1),
        ("cuMemcpyDtoH_v2", 1),
        ("cuStreamSynchronize", 1),
        ("cudaMemcpyAsync", 0),
        ("cuMemcpyDtoHAsync_v2", 0),
        ("cudaMalloc", 0),
        ("cudaEventQuery", 0),
    ],
)
def test_which_calls_wait_for_the_device(tmp_path: Path, call: str, count: int):
    assert len(found(steps(waiting(call)).write(tmp_path / "a.json"), KIND)) == count


def test_an_asynchronous_copy_of_pageable_memory_waits_all_the_same(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        first = builder.launch(start + 10, 2)
        builder.kernel("gemm", start + 20, 2_000, first)
        copy = builder.launch(start + 20, 2_020, name="cudaMemcpyAsync")
        builder.memcpy(start + 2_022, 4, copy, size=4, name="Memcpy DtoH (Device -> Pageable)")
        second = builder.launch(start + 2_300, 2)
        builder.kernel("gemm", start + 2_310, 7_000, second)

    (finding,) = found(steps(fill).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["call"] == "cudaMemcpyAsync"
    assert finding.cost_ms_per_step == pytest.approx(0.284)


@pytest.mark.parametrize(("idle", "count"), [(110, 1), (90, 0)])
def test_below_a_hundredth_of_the_step_it_cannot_be_seen(tmp_path: Path, idle: float, count: int):
    assert len(found(steps(waiting(idle=idle)).write(tmp_path / "a.json"), KIND)) == count


@pytest.mark.parametrize(("blocked", "count"), [(51, 1), (49, 0)])
def test_a_short_call_found_the_device_done(tmp_path: Path, blocked: float, count: int):
    assert len(found(steps(waiting(blocked=blocked)).write(tmp_path / "a.json"), KIND)) == count


def test_waiting_for_the_result_after_the_last_launch_and_between_steps_is_normal(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        correlation = builder.launch(start + 10, 2)
        builder.kernel("gemm", start + 20, 5_000, correlation)
        builder.launch(start + 30, 5_000, name="cudaStreamSynchronize")
        builder.launch(start + 9_910, 60, name="cudaEventSynchronize")

    assert not found(steps(fill).write(tmp_path / "a.json"), KIND)


def test_another_thread_may_fetch_results_meanwhile(tmp_path: Path):
    """SGLang's overlap scheduler waits for the last step's tokens while another thread launches the next."""

    def fill(builder: TraceBuilder, start: float) -> None:
        waiting("cudaEventQuery")(builder, start)
        builder.launch(start + 30, 2_000, name="cudaEventSynchronize", thread=(538, 539))

    assert not found(steps(fill).write(tmp_path / "a.json"), KIND)


def test_a_second_stream_that_works_on_hides_the_wait(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        waiting()(builder, start)
        correlation = builder.launch(start + 12, 2)
        builder.kernel("gemm", start + 20, 5_000, correlation, stream=8)

    assert not found(steps(fill).write(tmp_path / "a.json"), KIND)


def test_sequence_lengths_fetched_before_a_graph_is_replayed(shared_traces: Path):
    """SGLang on ROCm copies them to pageable memory in the step: 463 ms until the prefill before it is done."""
    (finding,) = found(shared_traces / "public" / "tracelens-sglang-qwen3-8b-decode-graph-mi300x.json.gz", KIND)
    assert finding.evidence["call"] == "hipMemcpyWithStream"
    assert finding.evidence["blocked_ms_per_step"] == pytest.approx(463.06, abs=0.01)
    assert finding.cost_ms_per_step == pytest.approx(0.151, abs=0.001)
    assert finding.cause is not None
    assert finding.cause.function == "populate_from_forward_batch"


def test_copies_that_find_the_device_idle_are_not_to_blame(recordings: Path):
    """An eager decode step copies results to pageable memory three times, 12 us each: the device had long been done."""
    assert not found(recordings / "base-eager-decode.trace.json.gz", KIND)
