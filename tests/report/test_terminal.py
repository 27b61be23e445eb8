"""The terminal report at the widths that people have, and in a pipe."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

import mla_diag
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.report.terminal import print_report
from tests.trace_builder import KernelRun, TraceBuilder


@pytest.fixture(scope="module")
def diagnosis(recordings: Path) -> Diagnosis:
    return mla_diag.explain(recordings / "base-eager-decode-stack.trace.json.gz")


def printed(diagnosis: Diagnosis, width: int | None, top: int = 3) -> list[str]:
    file = io.StringIO()
    print_report(diagnosis, Console(file=file, width=width, force_terminal=width is not None, color_system=None), top)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 119, 120, 160, 240])
def test_no_line_is_wider_than_the_terminal(diagnosis: Diagnosis, width: int):
    assert max(map(len, printed(diagnosis, width))) <= width


@pytest.mark.parametrize("width", [80, 160, None])
def test_the_worst_op_shows_its_cost_shape_and_line(diagnosis: Diagnosis, width: int | None):
    text = "\n".join(printed(diagnosis, width))
    for part in ("67.65", "92.1%", "78", "aten::copy_", "forward_decode", "73.45 ms"):
        assert part in text
    if width != 160:
        assert "[495553,1,576] BFloat16 from Float8_e4m3fn" in text
        assert "flashinfer_mla_backend.py:616 forward_decode" in text


def test_a_pipe_gets_one_whole_line_an_op(diagnosis: Diagnosis):
    (row,) = [line for line in printed(diagnosis, None) if "aten::copy_" in line and "856.3 MB at 987 GB/s" in line]
    assert row.split()[:3] == ["67.65", "92.1%", "78"]
    assert row.endswith("attention/flashinfer_mla_backend.py:616 forward_decode")
    assert "…" not in row


def test_what_is_not_shown_is_summed(diagnosis: Diagnosis):
    stage = diagnosis.stages[0]
    rest = printed(diagnosis, None)[-1]
    assert rest.split()[0] == f"{sum(op.ms_per_step for op in stage.ops[3:]):.3f}"
    assert f"in {len(stage.ops) - 3} more ops" in rest
    assert not any("more ops" in line for line in printed(diagnosis, None, top=len(stage.ops)))


def test_notes_are_printed(recordings: Path):
    given = mla_diag.explain(recordings / "base-graph-decode.trace.json.gz")
    assert any(line.startswith("note: 7,045 of 7,144 device events were replayed") for line in printed(given, None))


def run_of_ranks(path: Path, durations: list[float], *, known: bool = True) -> Diagnosis:
    for rank, duration in enumerate(durations):
        builder = TraceBuilder(rank=rank if known else None)
        for step in range(2):
            at = 1_000 * step
            builder.span("step[DECODE bs=1]", at, 900)
            builder.dispatch("aten::mm", at + 10, [("gemm", at + 20, duration)])
        builder.write(path / f"17-{rank}.trace.json.gz")
    return mla_diag.explain(path)


def test_ranks_of_a_run_are_compared_and_the_slowest_shown(tmp_path: Path):
    lines = printed(run_of_ranks(tmp_path, [300, 500, 400]), None)
    table = [line.split() for line in lines]
    assert ["0", "2", "0.300", "0.300", "1.000"] in table
    assert ["1", "2", "0.500", "0.500", "1.000"] in table
    assert sum("aten::mm" in line for line in lines) == 1
    assert any(line.startswith("above and below: rank 1, the slowest") for line in lines)


def test_the_slowest_of_ranks_whose_kernels_overlap_is_busy_for_longest(tmp_path: Path):
    """Rank 0 has more device time, of two streams at once; rank 1 is done later."""
    for rank, (first, second) in enumerate([(300, 300), (500, 50)]):
        builder = TraceBuilder(rank=rank)
        builder.span("step[DECODE bs=1]", 0, 900)
        builder.dispatch("aten::mm", 10, [("gemm", 20, first)])
        builder.dispatch("aten::mm", 12, [KernelRun("gemm", 22, second, stream=8)])
        builder.write(tmp_path / f"17-{rank}.trace.json.gz")
    lines = printed(mla_diag.explain(tmp_path), None)
    assert any(line.startswith("above and below: rank 1, the slowest") for line in lines)


def test_ranks_of_replicas_are_one_run_and_named_in_full(tmp_path: Path):
    for name, duration in (("TP-0-DP-0", 300), ("TP-0-DP-1", 500)):
        builder = TraceBuilder(rank=0)
        builder.span("step[DECODE bs=1]", 0, 900)
        builder.dispatch("aten::mm", 10, [("gemm", 20, duration)])
        builder.write(tmp_path / f"17-{name}.trace.json.gz")
    lines = printed(mla_diag.explain(tmp_path), None)
    assert any("rank TP-0 DP-0 · 4 events" in line for line in lines)
    assert any(line.startswith("above and below: rank TP-0 DP-1, the slowest") for line in lines)
    (header,) = [line for line in lines if line.split()[:2] == ["rank", "steps"]]
    (row,) = [line for line in lines if line.startswith("TP-0 DP-1 ")]
    assert len(row) == len(header)


def test_traces_of_unknown_ranks_are_reported_one_by_one(tmp_path: Path):
    lines = printed(run_of_ranks(tmp_path, [300, 500], known=False), None)
    assert sum("aten::mm" in line for line in lines) == 2
    assert not any("slowest" in line for line in lines)


def test_a_finding_of_several_ranks_is_printed_once_with_them(recordings: Path):
    (finding,) = mla_diag.explain(recordings / "base-graph-decode.trace.json.gz").findings
    given = mla_diag.explain(recordings / "base-graph-decode.trace.json.gz")
    ranks = [structs.replace(given.stages[0], rank=rank, trace=rank) for rank in range(3)]
    findings = [structs.replace(finding, rank=rank, trace=rank) for rank in (0, 2)]
    traces = [structs.replace(given.traces[0], rank=rank) for rank in range(3)]
    run = Diagnosis(traces=traces, stages=ranks, findings=findings)
    (line,) = [line for line in printed(run, None) if "whole-pool-copy" in line]
    assert "on ranks 0, 2" in line
