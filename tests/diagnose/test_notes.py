"""What a reader is told before trusting the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.explain import explain
from tests.trace_builder import TraceBuilder

EARLY = "began before the one ahead of them on their stream had ended"


def early(path: Path) -> list[str]:
    return [note for trace in explain(path, sources=False).traces for note in trace.notes if EARLY in note]


def built(tmp_path: Path, *kernels: tuple[str, int, int, int]) -> Path:
    """A trace of one step with kernels: name, start and duration in microseconds, stream."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    for name, start, duration, stream in kernels:
        builder.kernel(name, start, duration, builder.launch(start - 5), stream=stream)
    return builder.write(tmp_path / "trace.json")


def test_a_kernel_that_was_launched_early_is_said_to_have_waited(tmp_path: Path):
    """A combine of 10 us of which it waited 6 looked like half of an attention of 20."""
    trace = built(tmp_path, ("attention", 100, 20, 7), ("combine", 114, 10, 7), ("gemm", 130, 70, 7))
    (note,) = early(trace)
    assert note.startswith("6% of the device time is kernels that began")
    assert "mostly combine" in note


def test_two_streams_run_beside_each_other_and_nothing_waits(tmp_path: Path):
    assert early(built(tmp_path, ("gemm", 100, 50, 7), ("copy", 110, 30, 20))) == []


def test_kernels_one_after_the_other_wait_for_nothing(tmp_path: Path):
    assert early(built(tmp_path, ("gemm", 100, 50, 7), ("norm", 150, 10, 7))) == []


IMPOSSIBLE = "duration cannot be right"


def impossible(path: Path) -> list[str]:
    return [note for trace in explain(path, sources=False).traces for note in trace.notes if IMPOSSIBLE in note]


def stepped(tmp_path: Path, *, lasts: int, in_step: int, stream: int = 7, moved: int = 0) -> Path:
    """Four steps of ten kernels of 10 us; in one the fifth lasts so long, and what follows may come so much later."""
    builder = TraceBuilder()
    for step in range(4):
        builder.span("step[DECODE bs=1]", 1000 * step, 900)
        for place in range(10):
            odd = (step, place) == (in_step, 4)
            at = 1000 * step + 100 + 20 * place + (moved if (step, place) > (in_step, 4) else 0)
            correlation = builder.launch(1000 * step + 10 * place)
            builder.kernel("odd" if odd else "k", at, lasts if odd else 10, correlation, stream=stream if odd else 7)
    return builder.write(tmp_path / "trace.json")


@pytest.mark.parametrize("in_step", [1, 3])
def test_a_kernel_that_outlasts_all_that_follows_on_its_stream_is_named(tmp_path: Path, in_step: int):
    """A kernel of 12 days in a step of 7 ms made a device busy for 2,778,042,159 % of the time."""
    (note,) = impossible(stepped(tmp_path, lasts=10**9, in_step=in_step))
    assert note.startswith("odd is recorded to last 1,000,000.000 ms in a step of ")
    assert f"{5 + 10 * (3 - in_step)} later events of its stream ended before it" in note


def test_a_kernel_that_made_all_others_wait_is_no_mistake(tmp_path: Path):
    """A collective waits for another rank, and everything after it for the collective."""
    assert impossible(stepped(tmp_path, lasts=10**6, in_step=1, moved=10**6)) == []


def test_a_kernel_on_a_stream_of_its_own_may_outlast_many_steps(tmp_path: Path):
    assert impossible(stepped(tmp_path, lasts=10**6, in_step=1, stream=9)) == []


def test_a_recording_of_kernels_launched_early(recordings: Path):
    (note,) = early(recordings / "kernel-both-stages.trace.json.gz")
    assert "mostly mla_fp8_sm90_combine" in note
    assert early(recordings / "native-graph-decode.trace.json.gz") == []
