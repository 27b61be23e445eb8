"""Traces that others recorded, and those of ours too large to keep here: each has a report or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

import mla_diag
from mla_diag.errors import UnreadableInputError

HOST_ONLY = {"hta-cpu-only.json.gz", "hta-rank-not-found.json.gz"}


def test_every_shared_trace_is_explained_or_refused_in_one_line(shared_traces: Path):
    for path in sorted(shared_traces.glob("*/*.json.gz")):
        if path.name in HOST_ONLY:
            with pytest.raises(UnreadableInputError, match="no device work") as caught:
                mla_diag.explain(path)
            assert len(str(caught.value).splitlines()) == 1
            continue
        diagnosis = mla_diag.explain(path)
        (trace,) = diagnosis.traces
        assert diagnosis.stages, path.name
        parts = sum(
            stage.steps * (stage.device_ms_per_step + stage.between_steps_ms_per_step) for stage in diagnosis.stages
        )
        apart = trace.before_first_step_ms + trace.left_out_ms + trace.unattributed_ms
        assert parts + apart == pytest.approx(trace.device_ms, rel=1e-9), path.name
        assert all(stage.busy_ms_per_step <= stage.device_ms_per_step + 1e-9 for stage in diagnosis.stages)


def test_stack_recording_blames_the_cast_on_forward_decode(shared_traces: Path):
    diagnosis = mla_diag.explain(shared_traces / "h200" / "base-eager-decode-stack.trace.json.gz")
    (stage,) = diagnosis.stages
    assert stage.steps == 4
    assert stage.device_ms_per_step == pytest.approx(73.435, abs=0.001)
    first = stage.ops[0]
    assert first.op == "aten::copy_"
    assert first.launches_per_step == 78
    assert first.ms_per_step == pytest.approx(67.630, abs=0.001)
    assert first.share == pytest.approx(0.921, abs=0.0005)
    assert first.shapes == [[495553, 1, 576], [495553, 1, 576]]
    assert first.dtypes == ["BFloat16", "Float8_e4m3fn"]
    assert first.bytes_per_launch == 495553 * 576 * (2 + 1)
    assert first.bytes_source == "shapes"
    assert first.source is not None
    assert first.source.file == "sglang/srt/layers/attention/flashinfer_mla_backend.py"
    assert first.source.function == "forward_decode"


def test_prefill_kernels_that_run_late_are_not_blamed_on_the_next_step(shared_traces: Path):
    """By the clock, 463 of this trace's 493 ms would fall into the decode that follows; by launch none does."""
    diagnosis = mla_diag.explain(shared_traces / "public" / "tracelens-sglang-qwen3-8b-prefill-mi300x.json.gz")
    (stage,) = diagnosis.stages
    assert (stage.stage.value, stage.steps) == ("prefill", 1)
    assert stage.device_ms_per_step == pytest.approx(492.688, abs=0.001)
    assert sum(op.launches_per_step for op in stage.ops) == 524
    assert sum(kernel.launches_per_step for op in stage.ops for kernel in op.kernels) == 524


def test_graph_replay_on_amd_is_one_decode_step(shared_traces: Path):
    diagnosis = mla_diag.explain(shared_traces / "public" / "tracelens-sglang-qwen3-8b-decode-graph-mi300x.json.gz")
    (stage,) = diagnosis.stages
    assert (stage.stage.value, stage.steps) == ("decode", 1)
    assert stage.device_ms_per_step == pytest.approx(9.694, abs=0.001)
    assert {op.launched_by for op in stage.ops} >= {"graph"}
    assert all(op.source is None for op in stage.ops if op.launched_by == "graph")


@pytest.mark.parametrize(
    ("file", "stage", "source"),
    [
        ("tracelens-vllm-eager-b200.json.gz", "prefill", "execute-span"),
        ("tracelens-vllm-piecewise.json.gz", "mixed", "execute-span"),
        ("hta-ns-resolution.json.gz", "other", "profiler-step"),
        ("hta-alexnet.json.gz", "other", "capture"),
        ("tracelens-gpu-only-mi210.json.gz", "other", "capture"),
    ],
)
def test_traces_of_other_programs_say_how_steps_were_told_apart(
    shared_traces: Path, file: str, stage: str, source: str
):
    diagnosis = mla_diag.explain(shared_traces / "public" / file)
    (report,) = diagnosis.stages
    assert (report.stage.value, report.step_source.value) == (stage, source)
    assert any(note.startswith("steps are told apart by") for note in diagnosis.traces[0].notes)


def test_kernels_without_a_launch_are_unattributed_and_said_to_be(shared_traces: Path):
    """509 kernels of this trace have no launch event (FIELD.md, section G)."""
    diagnosis = mla_diag.explain(shared_traces / "public" / "tracelens-qwen1.5-0.5b-h100.json.gz")
    (trace,) = diagnosis.traces
    assert trace.unattributed_ms == pytest.approx(13.742, abs=0.001)
    assert any("509 of 1,707 device events have no launch" in note for note in trace.notes)


def test_capture_of_a_graph_is_named_as_such(shared_traces: Path):
    diagnosis = mla_diag.explain(shared_traces / "public" / "tracelens-sglang-qwen3-8b-capture-bs32-mi300x.json.gz")
    assert any("while a CUDA graph is captured" in note for note in diagnosis.traces[0].notes)
