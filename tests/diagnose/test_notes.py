"""What a reader is told before trusting the figures."""

from __future__ import annotations

from pathlib import Path

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


def test_a_recording_of_kernels_launched_early(recordings: Path):
    (note,) = early(recordings / "kernel-both-stages.trace.json.gz")
    assert "mostly mla_fp8_sm90_combine" in note
    assert early(recordings / "native-graph-decode.trace.json.gz") == []
