"""dropped-events: what is missing from a trace, counted, and nothing where all is there."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.diagnose.rules.finding import COPY, GEMM, found, steps
from tests.trace_builder import TraceBuilder

KIND = "dropped-events"


def launches(builder: TraceBuilder, start: float, *, count: int = 100, lost: int = 0, orphans: int = 0) -> None:
    """Launches of which the first few have no kernel, and kernels of which the first few have no launch."""
    for number in range(count):
        at = start + 10 + 20 * number
        correlation = builder.launch(at, 2) if number >= orphans else None
        if number >= lost:
            builder.kernel(GEMM, at + 5, 10, correlation)


def replay(builder: TraceBuilder, start: float, kernels: int, gap: float = 2, duration: float = 10) -> None:
    builder.replay(start + 10, [(GEMM, start + 100 + (duration + gap) * place, duration) for place in range(kernels)])


@pytest.mark.parametrize(("lost", "count"), [(0, 0), (1, 1), (30, 1)])
def test_launches_that_led_to_nothing(tmp_path: Path, lost: int, count: int):
    findings = found(steps(lambda builder, at: launches(builder, at, lost=lost)).write(tmp_path / "a.json"), KIND)
    assert [finding.evidence["launches_without_device_event"] for finding in findings] == [2 * lost] * count
    assert all(finding.cost_ms_per_step is None and finding.stage is None for finding in findings)


def test_below_a_hundredth_no_printed_figure_changes(tmp_path: Path):
    builder = steps(lambda builder, at: launches(builder, at, count=150, lost=1))
    assert not found(builder.write(tmp_path / "a.json"), KIND)


def copies_and_small_ops(builder: TraceBuilder, *, lost_copies: int = 0, lost_small: int = 0) -> TraceBuilder:
    """Two steps, each of a copy of 850 us and 200 kernels of 2 us, other ones of which are lost in each."""
    for step in range(2):
        start = 10_000 * step
        builder.span("step[DECODE bs=1]", start, 9_000)
        copy = builder.launch(start + 1, 1)
        if step >= lost_copies:
            builder.kernel(COPY, start + 2, 850, copy)
        for number in range(200):
            correlation = builder.launch(start + 10 + 20 * number, 1)
            if number % 100 // 10 != step or number % 10 >= lost_small:
                builder.kernel(GEMM, start + 900 + 20 * number, 2, correlation)
    return builder


def test_one_long_kernel_is_much_to_lose(tmp_path: Path):
    """A launch of 402 is 850 us of 2,500, and was under the hundredth from which a loss was told."""
    (finding,) = found(copies_and_small_ops(TraceBuilder(), lost_copies=1).write(tmp_path / "a.json"), KIND)
    assert finding.title == (
        "1 of 402 launches have no device event: device times are too low by about 0.85 ms, 34.0% of what ran, "
        "if they took what their like did"
    )
    assert (finding.severity, finding.evidence["too_low"]) == ("high", True)
    assert finding.evidence["launches_timed_by_other_steps"] == 1
    assert finding.evidence["lost_ms"] == pytest.approx(0.85)


def test_many_short_kernels_are_little_to_lose(tmp_path: Path):
    """A tenth of the launches is a sixtieth of the time, if that."""
    (finding,) = found(copies_and_small_ops(TraceBuilder(), lost_small=10).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["launches_without_device_event"] == 40
    assert finding.evidence["lost_share_of_time"] == pytest.approx(0.08 / 2.5)
    assert finding.severity == "low"


def test_so_little_that_no_printed_figure_changes_hides_no_ratio(tmp_path: Path):
    (finding,) = found(copies_and_small_ops(TraceBuilder(), lost_small=3).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["launches_without_device_event"] == 12
    assert (finding.severity, finding.evidence["too_low"]) == ("low", False)


def test_what_no_launch_is_like_is_judged_by_count_and_said_to_be(tmp_path: Path):
    path = copies_and_small_ops(TraceBuilder(), lost_copies=2, lost_small=3).write(tmp_path / "a.json")
    (finding,) = found(path, KIND)
    assert "0.02 ms, 3.0% of what ran, if 12 of them took" in finding.title
    assert finding.title.endswith("; what the other 2 took is not known, and judged by their number")
    assert finding.evidence["launches_of_unknown_time"] == 2

    (finding,) = found(steps(lambda b, at: launches(b, at, lost=10)).write(tmp_path / "b.json"), KIND)
    assert finding.title.endswith("device times are too low; what they took is not known, and judged by their number")
    assert (finding.severity, finding.evidence["too_low"]) == ("high", True)


def test_kernels_that_nothing_launched(tmp_path: Path):
    (finding,) = found(steps(lambda b, at: launches(b, at, orphans=20)).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["device_events_without_launch"] == 40
    assert finding.evidence["ms_without_launch"] == pytest.approx(0.4)
    assert finding.severity == "high"


@pytest.mark.parametrize("mark", ["cudaStreamBeginCapture", "cudaStreamEndCapture"])
def test_launches_into_a_graph_that_is_captured_run_later(tmp_path: Path, mark: str):
    """Also where the capture ends after the trace, or began before it."""

    def fill(builder: TraceBuilder, start: float) -> None:
        begins = "Begin" in mark
        launches(builder, start, lost=0 if begins else 100)
        builder.launch(start + 3_000, 1, name=mark)
        launches(builder, start + 3_010, lost=100 if begins else 0)

    assert not found(steps(fill, count=1).write(tmp_path / "a.json"), KIND)


def test_a_capture_hides_no_loss_outside_it(tmp_path: Path):
    """A trace in which one graph was captured had none of its lost launches counted."""

    def fill(builder: TraceBuilder, start: float) -> None:
        launches(builder, start, lost=30)
        builder.launch(start + 3_000, 1, name="cudaStreamBeginCapture")
        launches(builder, start + 3_010, lost=100)
        builder.launch(start + 6_000, 1, name="cudaStreamEndCapture")
        builder.launch(start + 7_000, 2, name="cudaGraphLaunch")

    (finding,) = found(steps(fill).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["launches"] == 2 * (100 + 1)
    assert finding.evidence["launches_without_device_event"] == 2 * (30 + 1)
    assert finding.evidence["empty_graph_replays"] == 2


@pytest.mark.parametrize("mark", ["cudaStreamBeginCapture", "cudaStreamEndCapture"])
def test_half_a_capture_hides_no_loss(tmp_path: Path, mark: str):
    """The profiler lost the other half: six steps, three of which lost all their kernels, had no launch to lose."""
    builder = TraceBuilder()
    for number in range(6):
        at = 10_000 * number
        builder.span("step[DECODE bs=1]", at, 9_000)
        launches(builder, at, lost=100 * (number % 2))
    builder.launch(5 if "Begin" in mark else 59_000, 1, name=mark)
    (finding,) = found(builder.write(tmp_path / "a.json"), KIND)
    assert finding.evidence["launches_without_device_event"] >= 200


def test_a_step_that_lacks_what_its_like_have(tmp_path: Path):
    builder = TraceBuilder()
    for number in range(4):
        builder.span("step[DECODE bs=1]", 10_000 * number, 9_000)
        launches(builder, 10_000 * number, lost=40 if number == 2 else 0)
    (finding,) = found(builder.write(tmp_path / "a.json"), KIND)
    assert (finding.evidence["incomplete_steps"], finding.evidence["steps"]) == (1, 4)


@pytest.mark.parametrize(("timeless", "count"), [(1, 0), (2, 1), (50, 1)])
def test_kernels_without_a_duration(tmp_path: Path, timeless: int, count: int):
    """Half of the copies without one halved a step and doubled the rate of its copies."""
    builder = steps(launches, count=2)
    for event in [event for event in builder.events if event["cat"] == "kernel"][:timeless]:
        event["dur"] = None
    findings = found(builder.write(tmp_path / "a.json"), KIND)
    assert [finding.evidence["device_events_without_duration"] for finding in findings] == [timeless] * count


def test_a_replay_with_fewer_kernels_than_the_same_replay_of_other_steps(tmp_path: Path):
    builder = TraceBuilder()
    for number, kernels in enumerate((100, 100, 60)):
        builder.span("step[DECODE bs=1]", 10_000 * number, 9_000)
        replay(builder, 10_000 * number, kernels)
    (finding,) = found(builder.write(tmp_path / "a.json"), KIND)
    assert (finding.evidence["short_graph_replays"], finding.evidence["graph_replays"]) == (1, 3)


def test_pieces_of_a_piecewise_graph_differ_and_are_whole(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        for place, kernels in enumerate((60, 10, 30)):
            replay(builder, start + 1_000 * place, kernels)

    assert not found(steps(fill, count=3).write(tmp_path / "a.json"), KIND)


def test_replays_of_which_most_is_blank(tmp_path: Path):
    """Hyperloom#1047: graph replays under-recorded, 63 ms of kernels in 7,242 ms."""
    path = steps(lambda builder, at: replay(builder, at, 50, gap=100, duration=1), count=3).write(tmp_path / "a.json")
    (finding,) = found(path, KIND)
    assert finding.evidence["idle_graph_replays"] == 3
    assert finding.evidence["idle_share_of_worst_replay"] == pytest.approx(1 - 50 / (50 + 49 * 100))


def test_kernels_shorter_than_the_gaps_of_a_graph_are_all_there(tmp_path: Path):
    """A graph of kernels of 1 us is idle for most of its time and lacks nothing."""
    path = steps(lambda builder, at: replay(builder, at, 200, gap=4, duration=1), count=3).write(tmp_path / "a.json")
    assert not found(path, KIND)


def test_a_graph_launch_without_any_kernel(tmp_path: Path):
    def fill(builder: TraceBuilder, start: float) -> None:
        launches(builder, start, count=400)
        builder.launch(start + 9_000, 2, name="cudaGraphLaunch")

    (finding,) = found(steps(fill).write(tmp_path / "a.json"), KIND)
    assert finding.evidence["empty_graph_replays"] == 2


def test_a_file_cut_off_is_said_with_the_steps_that_are_whole(tmp_path: Path):
    """chakra#192: a trace copied while it was written."""
    path = steps(launches, count=4).write(tmp_path / "a.json")
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(path.read_bytes()[: int(path.stat().st_size * 0.7)]))
    (finding,) = found(cut, KIND)
    assert finding.evidence["cut_at_byte"]
    assert "cut off" in finding.title
    assert 0 < finding.evidence["incomplete_steps"] < finding.evidence["steps"]


def test_a_trace_of_two_stages_says_it_once(tmp_path: Path):
    builder = steps(lambda builder, at: launches(builder, at, lost=30))
    for number in (3, 4):
        builder.span("step[EXTEND bs=1 toks=9]", 10_000 * number, 9_000)
        launches(builder, 10_000 * number, lost=30)
    assert len(found(builder.write(tmp_path / "a.json"), KIND)) == 1


def test_kernels_of_a_profiler_that_did_not_record_launches_by_the_driver(shared_traces: Path):
    (finding,) = found(shared_traces / "public" / "tracelens-qwen1.5-0.5b-h100.json.gz", KIND)
    assert finding.evidence["device_events_without_launch"] == 509
    assert finding.evidence["ms_without_launch"] == pytest.approx(13.742, abs=1e-3)
