"""host-bound: gaps in which nothing was queued, and none that have another reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnose.rules.finding import STEP_US, found, steps
from tests.trace_builder import TraceBuilder

KIND = "host-bound"


def launches(
    *, gap: float, delay: float = 10, ahead: bool = False, duration: float = 80
) -> Callable[[TraceBuilder, float], None]:
    """Kernels with gaps between them, launched `delay` before each begins, or all of them at once, ahead."""

    def fill(builder: TraceBuilder, start: float) -> None:
        at = start + 500
        number = 0
        while at + duration < start + STEP_US:
            correlation = builder.launch(start + 10 + 2 * number if ahead else at - delay, 2)
            builder.kernel("gemm", at, duration, correlation)
            at += duration + gap
            number += 1

    return fill


def test_an_eager_step_whose_kernels_start_as_they_are_launched(tmp_path: Path):
    """95 kernels of 80 us and 94 gaps of 20 us in steps of 10 ms."""
    (finding,) = found(steps(launches(gap=20), count=3).write(tmp_path / "a.json"), KIND)
    evidence = finding.evidence
    assert evidence["wall_ms_per_step"] == pytest.approx(10.0)
    assert evidence["device_events_per_step"] == 95
    assert evidence["late_launches_per_step"] == 94
    assert evidence["waits_for_host_ms_per_step"] == pytest.approx(94 * 0.020)
    assert evidence["launch_to_start_us_median"] == pytest.approx(10.0)
    assert finding.cost_ms_per_step == pytest.approx(1.88)
    assert finding.share == pytest.approx(0.188)
    assert finding.confidence == "high"
    assert "CUDA graphs" in finding.remedy


@pytest.mark.parametrize(("gap", "count"), [(17, 1), (12, 0)])
def test_a_step_that_waits_for_a_seventh_of_its_time(tmp_path: Path, gap: float, count: int):
    """Gaps of 17 us beside 80 us of work are 16.5 % of the step, of 12 us 12.3 %."""
    assert len(found(steps(launches(gap=gap)).write(tmp_path / "a.json"), KIND)) == count


def test_gaps_while_work_is_queued_are_not_the_hosts(tmp_path: Path):
    assert not found(steps(launches(gap=40, ahead=True)).write(tmp_path / "a.json"), KIND)


@pytest.mark.parametrize(("delay", "count"), [(45, 1), (60, 0)])
def test_what_starts_long_after_its_launch_waited_for_something_else(tmp_path: Path, delay: float, count: int):
    path = steps(launches(gap=70, delay=delay, duration=100)).write(tmp_path / "a.json")
    assert len(found(path, KIND)) == count


def test_waiting_for_a_request_between_steps_is_no_fault(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        correlation = builder.launch(start + 10, 2)
        builder.kernel("gemm", start + 20, 3_000, correlation)

    assert not found(steps(fill, count=4).write(tmp_path / "a.json"), KIND)


def test_what_was_profiled_with_ops_is_less_sure_and_with_stacks_has_no_cost(tmp_path: Path):
    builder = steps(launches(gap=40))
    builder.op("aten::mm", 10, 5)
    (with_ops,) = found(builder.write(tmp_path / "a.json"), KIND)
    assert with_ops.confidence == "medium"
    builder.metadata["with_stack"] = 1
    (with_stacks,) = found(builder.write(tmp_path / "b.json"), KIND, sources=False)
    assert (with_stacks.confidence, with_stacks.cost_ms_per_step, with_stacks.share) == ("low", None, None)
    assert "without Python stacks" in with_stacks.remedy
    assert with_stacks.evidence == {**with_ops.evidence, "python_stacks": True}


def test_a_graph_replay_of_which_little_was_recorded_is_not_the_hosts_fault(tmp_path: Path):
    """Hyperloom#1047: of 7,242 ms of a replay 63 were recorded as busy, and 99 % was reported as idle."""

    def fill(builder: TraceBuilder, start: float) -> None:
        builder.replay(start + 10, [("gemm", start + 100 + 1_000 * number, 10) for number in range(9)])

    path = steps(fill).write(tmp_path / "a.json")
    assert not found(path, KIND)
    assert len(found(path, "dropped-events")) == 1


def test_the_eager_server_waits_for_its_host_and_the_one_with_graphs_does_not(recordings: Path):
    (finding,) = found(recordings / "base-eager-decode.trace.json.gz", KIND)
    assert finding.cost_ms_per_step == pytest.approx(30.67, abs=0.01)
    assert finding.evidence["busy_ms_per_step"] == pytest.approx(73.48, abs=0.01)
    assert finding.evidence["wall_ms_per_step"] == pytest.approx(104.81, abs=0.01)
    assert finding.evidence["cuda_graphs"] is False
    assert "--disable-cuda-graph" in finding.remedy
    for name in ("base", "fa3", "native", "bf16kv"):
        assert not found(recordings / f"{name}-graph-decode.trace.json.gz", KIND)


@pytest.mark.parametrize(
    "name", ["hta-sampled-rank-0", "hta-alexnet", "tracelens-gpu-only-mi210", "tracelens-qwen1.5-0.5b-h100"]
)
def test_idle_time_of_thinned_out_and_unmarked_traces_is_not_judged(shared_traces: Path, name: str):
    assert not found(shared_traces / "public" / f"{name}.json.gz", KIND)
