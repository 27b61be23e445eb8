"""Device events belong to the step that launched them, whenever they ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.diagnose.steps import Steps, busy, find_steps
from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import link
from mla_diag.trace.model import Trace
from tests.trace_builder import TraceBuilder

OTHER_THREAD = (538, 540)


def steps_of(builder: TraceBuilder, path: Path, warmup: int = 0) -> tuple[Trace, Steps]:
    (trace,) = read_trace(builder.write(path)).by_rank()
    return trace, find_steps(trace, link(trace), warmup)


def kernels_of(trace: Trace, steps: Steps, step: int) -> set[str]:
    return {trace.names[name] for name in trace.device_events.name[steps.inside == step].tolist()}


def test_kernels_that_run_during_the_next_step_belong_to_the_one_that_launched_them(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 100)
    builder.dispatch("aten::mm", 10, [("first", 90, 60)])
    builder.span("step[DECODE bs=1]", 120, 100)
    builder.dispatch("aten::mm", 130, [("second", 215, 60)])
    trace, steps = steps_of(builder, tmp_path / "t.json")
    assert kernels_of(trace, steps, 0) == {"first"}
    assert kernels_of(trace, steps, 1) == {"second"}


def test_work_launched_between_steps_is_neither_lost_nor_blamed(tmp_path: Path):
    builder = TraceBuilder()
    builder.dispatch("aten::zeros", -50, [("early", -40, 3)])
    builder.span("step[DECODE bs=1]", 0, 100)
    builder.dispatch("aten::mm", 10, [("inside", 20, 60)])
    builder.dispatch("aten::argmax", 110, [("sampling", 112, 5)])
    builder.span("step[DECODE bs=1]", 140, 100)
    builder.dispatch("aten::mm", 150, [("inside", 160, 60)])
    diagnosis = explain(builder.write(tmp_path / "t.json"))
    (trace,), (stage,) = diagnosis.traces, diagnosis.stages
    assert stage.steps == 2
    assert stage.device_ms_per_step == pytest.approx(0.060)
    assert stage.between_steps_ms_per_step == pytest.approx(0.005 / 2)
    assert trace.before_first_step_ms == pytest.approx(0.003)
    assert trace.device_ms == pytest.approx(0.128)


def test_a_forward_on_a_thread_of_its_own_is_inside_the_step(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 100)
    builder.dispatch("aten::mm", 10, [("kernel", 20, 60)], thread=OTHER_THREAD)
    trace, steps = steps_of(builder, tmp_path / "t.json")
    assert kernels_of(trace, steps, 0) == {"kernel"}


def test_overlapping_steps_of_two_threads_keep_their_own_kernels(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 100)
    builder.span("step[EXTEND bs=1 toks=9]", 50, 100, thread=OTHER_THREAD)
    builder.dispatch("aten::mm", 60, [("decode", 70, 5)])
    builder.dispatch("aten::mm", 61, [("extend", 80, 5)], thread=OTHER_THREAD)
    trace, steps = steps_of(builder, tmp_path / "t.json")
    assert kernels_of(trace, steps, 0) == {"decode"}
    assert kernels_of(trace, steps, 1) == {"extend"}


def test_kernels_without_a_launch_belong_to_the_device_span_that_covers_them(tmp_path: Path):
    builder = TraceBuilder()
    step = builder.span("step[DECODE bs=1]", 0, 100)
    builder.dispatch("aten::mm", 10, [("launched", 20, 10)])
    builder.device_span("step[DECODE bs=1]", 20, 100, id=step)
    builder.kernel("covered", 50, 10)
    builder.kernel("orphan", 300, 10)
    trace, steps = steps_of(builder, tmp_path / "t.json")
    assert kernels_of(trace, steps, 0) == {"launched", "covered"}
    assert explain(tmp_path / "t.json").traces[0].unattributed_ms == pytest.approx(0.010)


def test_a_trace_of_the_device_alone_has_the_steps_of_its_device_spans(tmp_path: Path):
    builder = TraceBuilder()
    for step in range(3):
        builder.device_span("step[DECODE bs=1]", 100 * step, 80, id=step + 1, stream=7)
        builder.device_span("step[DECODE bs=1]", 100 * step + 10, 80, id=step + 1, stream=8)
        builder.kernel("kernel", 100 * step + 5, 50, stream=7)
        builder.kernel("kernel", 100 * step + 20, 50, stream=8)
    _, steps = steps_of(builder, tmp_path / "t.json")
    assert steps.spans.source is StepSource.STEP_SPAN
    assert len(steps.spans) == 3
    assert np.bincount(steps.inside).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("step[DECODE bs=7]", Stage.DECODE),
        ("step[EXTEND bs=2 toks=128]", Stage.PREFILL),
        ("step[SPLIT_PREFILL bs=2]", Stage.PREFILL),
        ("step[DLLM_EXTEND bs=2]", Stage.PREFILL),
        ("step[MIXED bs=2]", Stage.MIXED),
        ("step[TARGET_VERIFY bs=2]", Stage.DECODE),  # sglang#35690 counts it as a prefill
        ("step[DRAFT_LOOP raw_bs=1 bs=1 topk=1]", Stage.OTHER),
        ("step[IDLE bs=0]", Stage.OTHER),
        ("execute_context_1(888_788544)_generation_0(0)", Stage.PREFILL),
        ("execute_32_context_0(sq0)_generation_32(sq32)", Stage.DECODE),
        ("execute_8192_context_9(sq8155)_generation_37(sq37)", Stage.MIXED),
        ("ProfilerStep#12", Stage.OTHER),
    ],
)
def test_stage_of_a_step_span(tmp_path: Path, name: str, stage: Stage):
    builder = TraceBuilder()
    builder.span(name, 0, 100)
    builder.dispatch("aten::mm", 10, [("kernel", 20, 60)])
    assert steps_of(builder, tmp_path / "t.json")[1].spans.stages == [stage]


def test_sglang_spans_win_over_those_around_them(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("ProfilerStep#3", 0, 1000)
    builder.span("execute_32_context_0(sq0)_generation_32(sq32)", 0, 500)
    builder.span("step[DECODE bs=32]", 10, 100)
    builder.dispatch("aten::mm", 20, [("kernel", 30, 60)])
    _, steps = steps_of(builder, tmp_path / "t.json")
    assert (steps.spans.source, len(steps.spans)) == (StepSource.STEP_SPAN, 1)


def test_old_releases_without_spans_have_the_steps_of_the_model_runner(tmp_path: Path):
    """SGLang before the step[...] spans, eager: its stage is that of the functions called inside."""
    builder = TraceBuilder()
    runner = "sglang/srt/model_executor/model_runner.py"
    for number, function in enumerate(("forward_extend", "forward_decode", "forward_decode")):
        at = 1000 * number
        builder.frame(f"/usr/lib/python3/dist-packages/{runner}(1216): forward", at, 500)
        builder.frame(f"/usr/lib/python3/dist-packages/{runner}(1168): {function}", at + 1, 400)
        builder.dispatch("aten::mm", at + 10, [("kernel", at + 100, 60)])
    _, steps = steps_of(builder, tmp_path / "t.json")
    assert steps.spans.source is StepSource.FORWARD_FRAME
    assert steps.spans.stages == [Stage.PREFILL, Stage.DECODE, Stage.DECODE]


def test_graph_launches_are_steps_where_nothing_else_marks_them(tmp_path: Path):
    builder = TraceBuilder()
    for step in range(4):
        at = 1000 * step
        builder.dispatch("aten::copy_", at, [("inputs", at + 30, 2)])
        builder.replay(at + 50, [(f"layer_{n}", at + 60 + 5 * n, 4) for n in range(60)])
    _, steps = steps_of(builder, tmp_path / "t.json")
    assert steps.spans.source is StepSource.GRAPH_LAUNCH
    assert steps.spans.stages == [Stage.DECODE] * 4
    assert np.bincount(steps.inside[steps.inside >= 0]).tolist() == [61, 61, 61, 60]


def test_pieces_of_piecewise_graphs_are_not_steps(tmp_path: Path):
    builder = TraceBuilder()
    for piece in range(40):
        builder.replay(100 * piece, [("a", 100 * piece + 10, 5), ("b", 100 * piece + 20, 5)])
    _, steps = steps_of(builder, tmp_path / "t.json")
    assert (steps.spans.source, len(steps.spans)) == (StepSource.CAPTURE, 1)


@pytest.mark.parametrize(("suffix", "stage"), [("DECODE", Stage.DECODE), ("EXTEND", Stage.PREFILL)])
def test_the_stage_of_an_unmarked_trace_is_that_of_its_file_name(tmp_path: Path, suffix: str, stage: Stage):
    builder = TraceBuilder()
    builder.dispatch("aten::mm", 10, [("kernel", 20, 60)])
    path = tmp_path / f"1790857026.7-TP-0-{suffix}.trace.json.gz"
    assert steps_of(builder, path)[1].spans.stages == [stage]


def test_warmup_steps_are_left_out_at_the_head_of_each_stage(tmp_path: Path):
    builder = TraceBuilder()
    names = ["step[EXTEND bs=1 toks=9]", "step[DECODE bs=1]", "step[DECODE bs=1]", "step[EXTEND bs=1 toks=9]"]
    for number, name in enumerate(names):
        at = 1000 * number
        builder.span(name, at, 500)
        builder.dispatch("aten::mm", at + 10, [("kernel", at + 20, 100 * (number + 1))])
    path = builder.write(tmp_path / "t.json")
    stages = {stage.stage: stage for stage in explain(path, warmup=1).stages}
    assert {stage: report.steps for stage, report in stages.items()} == {Stage.DECODE: 1, Stage.PREFILL: 1}
    assert stages[Stage.DECODE].device_ms_per_step == pytest.approx(0.3)
    assert stages[Stage.PREFILL].device_ms_per_step == pytest.approx(0.4)
    assert stages[Stage.DECODE].steps_left_out == 1
    assert explain(path, warmup=1).traces[0].left_out_ms == pytest.approx(0.1 + 0.2)
    assert not any("--warmup" in note for note in explain(path, warmup=1).traces[0].notes)


def test_a_stage_that_the_warmup_leaves_nothing_of_is_said(recordings: Path):
    diagnosis = explain(recordings / "base-graph-decode.trace.json.gz", warmup=5)
    assert diagnosis.stages == []
    assert "--warmup leaves no decode step: the trace has 5 of them, all left out" in diagnosis.traces[0].notes


def test_a_step_whose_kernels_the_profiler_dropped_does_not_count(tmp_path: Path):
    builder = TraceBuilder()
    for step in range(3):
        at = 1000 * step
        builder.span("step[DECODE bs=1]", at, 500)
        for number in range(10):
            if step < 2 or number < 5:
                builder.dispatch("aten::mm", at + 30 * number, [("kernel", at + 30 * number + 20, 10)])
            else:
                builder.launch(at + 30 * number)
    diagnosis = explain(builder.write(tmp_path / "t.json"))
    (stage,) = diagnosis.stages
    assert (stage.steps, stage.steps_left_out) == (2, 1)
    assert stage.device_ms_per_step == pytest.approx(0.1)
    assert diagnosis.traces[0].left_out_ms == pytest.approx(0.05)
    assert any("1 step is incomplete" in note for note in diagnosis.traces[0].notes)


def launches_of_a_step(builder: TraceBuilder, name: str, at: int, lost: int = 0) -> None:
    """A step of ten launches, of which the last few have no kernel in the trace."""
    builder.span(name, at, 500)
    for number in range(10):
        correlation = builder.launch(at + 30 * number)
        if number < 10 - lost:
            builder.kernel("kernel", at + 30 * number + 20, 10, correlation)


@pytest.mark.parametrize("lost", [5, 10])
def test_a_step_of_a_name_of_its_own_that_lost_kernels_does_not_count(tmp_path: Path, lost: int):
    """An EXTEND's name has its tokens, so it is measured against steps of other names."""
    builder = TraceBuilder()
    launches_of_a_step(builder, "step[EXTEND bs=1 toks=64]", 0, lost)
    launches_of_a_step(builder, "step[EXTEND bs=2 toks=128]", 1000)
    diagnosis = explain(builder.write(tmp_path / "t.json"))
    (stage,) = diagnosis.stages
    assert (stage.steps, stage.steps_left_out) == (1, 1)
    assert stage.device_ms_per_step == pytest.approx(0.1)
    assert "1 step is incomplete in this trace and left out of every figure" in diagnosis.traces[0].notes


@pytest.mark.parametrize("lost", [5, 10])
def test_the_only_step_of_a_stage_does_not_count_where_it_lost_kernels(tmp_path: Path, lost: int):
    builder = TraceBuilder()
    launches_of_a_step(builder, "step[EXTEND bs=1 toks=64]", 0, lost)
    launches_of_a_step(builder, "step[DECODE bs=1]", 1000)
    diagnosis = explain(builder.write(tmp_path / "t.json"))
    assert [stage.stage for stage in diagnosis.stages] == [Stage.DECODE]
    assert diagnosis.traces[0].notes[0].endswith("left out of every figure; no prefill step is left")


def test_a_step_that_launches_nothing_counts_in_no_figure(tmp_path: Path):
    builder = TraceBuilder()
    launches_of_a_step(builder, "step[DECODE bs=1]", 0)
    builder.span("step[DECODE bs=2]", 1000, 500)
    builder.span("step[IDLE bs=0]", 2000, 500)
    diagnosis = explain(builder.write(tmp_path / "t.json"))
    (stage,) = diagnosis.stages
    assert (stage.stage, stage.steps, stage.steps_left_out) == (Stage.DECODE, 1, 1)
    assert stage.device_ms_per_step == pytest.approx(0.1)
    assert "2 steps have no device work in this trace and are left out of every figure" in diagnosis.traces[0].notes
    assert not any("incomplete" in note for note in diagnosis.traces[0].notes)


def test_a_step_of_copies_that_run_nothing_is_complete_beside_one_without_them(tmp_path: Path):
    """A public trace (HTA's hta-ns-resolution) has 235 cudaMemsetAsync without a device event: no bytes to fill."""
    builder = TraceBuilder()
    launches_of_a_step(builder, "step[DECODE bs=1]", 0)
    builder.memset(400, 5, builder.launch(390, name="cudaMemsetAsync"), size=64)
    launches_of_a_step(builder, "step[EXTEND bs=1 toks=9]", 1000)
    builder.launch(1390, name="cudaMemsetAsync")
    assert steps_of(builder, tmp_path / "t.json")[1].counted.tolist() == [True, True]


def test_a_step_that_captures_a_graph_is_complete_without_what_it_captured(tmp_path: Path):
    builder = TraceBuilder()
    launches_of_a_step(builder, "ProfilerStep#1", 0)
    builder.launch(400, name="cudaStreamBeginCapture")
    builder.launch(410)
    builder.launch(420, name="cudaStreamEndCapture")
    launches_of_a_step(builder, "ProfilerStep#2", 1000)
    assert steps_of(builder, tmp_path / "t.json")[1].counted.tolist() == [True, True]


def test_where_no_step_has_all_its_kernels_those_that_have_as_many_as_any_count(tmp_path: Path):
    builder = TraceBuilder()
    launches_of_a_step(builder, "step[DECODE bs=1]", 0, lost=3)
    launches_of_a_step(builder, "step[EXTEND bs=1 toks=9]", 1000, lost=3)
    assert steps_of(builder, tmp_path / "t.json")[1].counted.tolist() == [True, True]


def test_a_cut_file_counts_the_steps_before_the_cut(recordings: Path, tmp_path: Path):
    import gzip  # noqa: PLC0415

    text = gzip.decompress((recordings / "base-graph-decode.trace.json.gz").read_bytes())
    cut = tmp_path / "cut.json"
    cut.write_bytes(text[: len(text) // 2])
    whole = explain(recordings / "base-graph-decode.trace.json.gz").stages[0]
    diagnosis = explain(cut)
    (stage,) = diagnosis.stages
    assert 1 <= stage.steps < whole.steps
    assert stage.device_ms_per_step == pytest.approx(whole.device_ms_per_step, rel=1e-3)
    assert any("cut off" in note for note in diagnosis.traces[0].notes)


def test_a_file_cut_before_any_device_event_says_so(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 100)
    builder.dispatch("aten::mm", 10, [("kernel", 20, 60)])
    text = builder.text()
    path = tmp_path / "cut.json"
    path.write_bytes(text[: text.index(b"cudaLaunchKernel")])
    diagnosis = explain(path)
    assert diagnosis.stages == []
    assert any("no device event comes before the cut" in note for note in diagnosis.traces[0].notes)


def test_wall_time_runs_to_the_next_steps_first_event_and_ignores_a_pause(tmp_path: Path):
    builder = TraceBuilder()
    for at in (0, 1000, 2000, 3000, 90_000):
        builder.span("step[DECODE bs=1]", at, 500)
        builder.dispatch("aten::mm", at + 10, [("kernel", at + 20, 600)])
    (stage,) = explain(builder.write(tmp_path / "t.json")).stages
    assert stage.wall_ms_per_step == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=40))
def test_busy_is_the_length_of_the_union(intervals: list[tuple[int, int]]):
    start = np.array([begin for begin, _ in intervals], np.int64)
    end = start + np.array([length for _, length in intervals], np.int64)
    covered = {nano for begin, length in intervals for nano in range(begin, begin + length)}
    assert busy(start, end) == len(covered)
