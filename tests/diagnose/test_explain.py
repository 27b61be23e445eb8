"""From paths to a diagnosis, and to DataFrames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mla_diag
from mla_diag.diagnose.explain import find_traces
from mla_diag.errors import UnreadableInputError, UsageError
from tests.trace_builder import TraceBuilder


def write(path: Path, *, rank: int | None = 0, name: str = "step[DECODE bs=1]", duration: float = 60) -> Path:
    builder = TraceBuilder(rank=rank)
    builder.span(name, 0, 100)
    builder.dispatch("aten::mm", 10, [("kernel", 20, duration)])
    return builder.write(path)


def test_a_directory_stands_for_the_traces_in_it(tmp_path: Path):
    for rank in (1, 0):
        write(tmp_path / f"17-TP-{rank}.trace.json.gz", rank=rank)
    (tmp_path / "server_info.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not a trace")
    diagnosis = mla_diag.explain(tmp_path)
    assert [trace.rank for trace in diagnosis.traces] == [0, 1]
    assert [(stage.trace, stage.rank) for stage in diagnosis.stages] == [(0, 0), (1, 1)]


def test_a_pattern_finds_traces_and_each_file_is_read_once(tmp_path: Path):
    paths = [write(tmp_path / f"{name}.json") for name in "ab"]
    assert find_traces([tmp_path / "*.json", paths[0], tmp_path]) == paths


@pytest.mark.parametrize("given", ["*.json", "."])
def test_nothing_found_is_said(tmp_path: Path, given: str):
    with pytest.raises(UsageError, match="no trace"):
        find_traces([tmp_path / given])


def test_one_unreadable_file_does_not_hide_the_others(tmp_path: Path):
    write(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("")
    diagnosis = mla_diag.explain(tmp_path)
    assert len(diagnosis.traces) == 1
    assert [line.split(":")[0] for line in diagnosis.unreadable] == [str(tmp_path / "b.json")]


def test_nothing_readable_is_an_error_with_a_line_a_file(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text("[1")
    with pytest.raises(UnreadableInputError) as caught:
        mla_diag.explain(tmp_path)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("time", [10**18, None, "soon"])
def test_device_events_without_a_usable_time_are_not_called_missing(tmp_path: Path, time: Any):
    """They read as a trace of the host alone, and as advice to profile with GPU activities."""
    builder = TraceBuilder()
    builder.dispatch("aten::mm", 10, [("kernel", 20, 60)])
    for event in builder.events:
        event["ts"] = time
    with pytest.raises(UnreadableInputError, match="none of the times of its 1 device event can be read") as caught:
        mla_diag.explain(builder.write(tmp_path / "t.json"))
    assert "GPU activities" not in str(caught.value)


def test_stage_and_rank_choose_and_say_when_there_is_none(tmp_path: Path):
    write(tmp_path / "a.json", rank=0)
    write(tmp_path / "b.json", rank=1, name="step[EXTEND bs=1 toks=5]")
    assert [stage.rank for stage in mla_diag.explain(tmp_path, stage="prefill").stages] == [1]
    assert [trace.rank for trace in mla_diag.explain(tmp_path, rank=0).traces] == [0]
    with pytest.raises(UsageError, match="no mixed steps"):
        mla_diag.explain(tmp_path, stage="mixed")
    with pytest.raises(UsageError, match="no trace of rank 7"):
        mla_diag.explain(tmp_path, rank=7)


def test_ranks_of_replicas_are_told_apart_by_their_names(tmp_path: Path):
    """Each replica numbers its ranks from 0, in the traces too."""
    for dp in (0, 1):
        for tp in (0, 1):
            write(tmp_path / f"17-TP-{tp}-DP-{dp}.trace.json.gz", rank=tp)

    def names(rank: int | str) -> list[str | None]:
        return [trace.rank_name for trace in mla_diag.explain(tmp_path, rank=rank).traces]

    assert names("TP1-DP0") == ["TP-1 DP-0"]
    assert names("DP1") == ["TP-0 DP-1", "TP-1 DP-1"]
    assert names(1) == names("1") == ["TP-1 DP-0", "TP-1 DP-1"]
    with pytest.raises(UsageError, match="no trace of rank TP2 among"):
        mla_diag.explain(tmp_path, rank="TP2")
    with pytest.raises(UsageError, match="--rank first: no rank; write a number, or TP1-DP0"):
        mla_diag.explain(tmp_path, rank="first")


def test_a_rank_that_is_not_recorded_is_unknown_and_not_0(tmp_path: Path):
    """HTA#17, HTA#107: a trace without distributedInfo was taken for rank 0."""
    (trace,) = mla_diag.explain(write(tmp_path / "a.json", rank=None)).traces
    assert trace.rank is None


def test_a_merged_trace_is_explained_rank_by_rank(tmp_path: Path):
    """SGLang's merged traces repeat correlations and ids from rank to rank (sglang/srt/utils/profile_merger.py)."""
    builder = TraceBuilder(rank=None)
    for rank, duration in ((0, 60), (1, 90)):
        host, device = (f"[TP0{rank}] 538", 538), f"[TP0{rank}] 0"
        builder.span("step[DECODE bs=1]", 0, 100, thread=host, id=1)
        builder.op("aten::mm", 10, 20, thread=host, id=2)
        builder.launch(12, thread=host, correlation=3, id=2)
        builder.complete(
            "kernel", "gemm", 20, duration, (device, 7), {"device": 0, "stream": 7, "correlation": 3, "External id": 2}
        )
    diagnosis = mla_diag.explain(builder.write(tmp_path / "merged-17.trace.json"))
    assert [(trace.rank, trace.label) for trace in diagnosis.traces] == [(0, "TP00"), (1, "TP01")]
    assert [stage.device_ms_per_step for stage in diagnosis.stages] == [pytest.approx(0.06), pytest.approx(0.09)]
    assert [stage.ops[0].op for stage in diagnosis.stages] == ["aten::mm", "aten::mm"]


def test_a_rank_of_a_merged_trace_without_device_work_costs_that_rank_only(tmp_path: Path):
    builder = TraceBuilder(rank=None)
    for rank in (0, 1):
        host = (f"[TP0{rank}] 538", 538)
        builder.span("step[DECODE bs=1]", 0, 100, thread=host, id=1)
        builder.op("aten::mm", 10, 20, thread=host, id=2)
    builder.launch(12, thread=("[TP01] 538", 538), correlation=3, id=2)
    builder.complete("kernel", "gemm", 20, 50, ("[TP01] 0", 7), {"device": 0, "stream": 7, "correlation": 3})
    diagnosis = mla_diag.explain(builder.write(tmp_path / "merged.json"))
    assert [trace.label for trace in diagnosis.traces] == ["TP01"]
    assert ["TP00" in line for line in diagnosis.unreadable] == [True]


def test_the_library_gives_data_frames(recordings: Path):
    diagnosis = mla_diag.explain(recordings / "base-eager-decode-stack.trace.json.gz")
    ops, steps = diagnosis.ops, diagnosis.steps
    assert ops.loc[0, ["stage", "op", "function"]].tolist() == ["decode", "aten::copy_", "forward_decode"]
    assert ops["ms_per_step"].sum() == pytest.approx(steps.loc[0, "device_ms_per_step"])
    assert steps.loc[0, "step_source"] == "step-span"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": "bogus"}, "stage bogus: not one of decode, prefill, mixed, other"),
        ({"rank": "TP"}, "--rank TP: no rank"),
        ({"warmup": -1}, "not below 0"),
        ({"ignore": "bogus"}, "--ignore bogus: no such kind"),
        ({"paths": []}, "no trace is given"),
    ],
)
def test_arguments_that_make_no_sense_are_said(recordings: Path, arguments: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        mla_diag.explain(**{"paths": recordings / "base-graph-decode.trace.json.gz"} | arguments)


def test_without_sources_no_frame_is_read(recordings: Path):
    diagnosis = mla_diag.explain(recordings / "base-eager-decode-stack.trace.json.gz", sources=False)
    assert all(op.source is None for op in diagnosis.stages[0].ops)
    assert diagnosis.stages[0].ops[0].launches_per_step == 78
