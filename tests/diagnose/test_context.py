"""How long the requests' contexts are, from the scheduler's slices of the page table."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.context import longest_context, rows_needed
from mla_diag.trace.decode import read_trace
from mla_diag.trace.model import Trace
from tests.trace_builder import TraceBuilder


def with_slices(path: Path, *ends: int, width: int = 4096, begin: int = 0) -> Trace:
    builder = TraceBuilder()
    builder.op("aten::select", 0, 1, dims=[[9, width], [], []], types=["int", "Scalar", "Scalar"])
    for number, end in enumerate(ends):
        builder.op("aten::slice", 10 + number, 1, dims=[[width], [], [], [], []], types=["int"] + ["Scalar"] * 4)
        builder.events[-1]["args"]["Concrete Inputs"] = ["", "0", str(begin), str(end), "1"]
    return read_trace(builder.write(path))


def test_the_longest_slice_from_the_start_of_a_row_is_the_longest_context(tmp_path: Path):
    assert longest_context(with_slices(tmp_path / "t.json", 100, 2000, 7)) == 2000


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        pytest.param([9223372036854775807], {}, id="to the end of the row"),
        pytest.param([2000], {"begin": 64}, id="from elsewhere"),
        pytest.param([500], {"width": 512}, id="of a table too narrow for contexts"),
        pytest.param([], {}, id="none"),
    ],
)
def test_other_slices_tell_nothing(tmp_path: Path, ends: list[int], options: dict[str, int]):
    assert longest_context(with_slices(tmp_path / "t.json", *ends, **options)) is None


def test_slices_of_no_known_table_tell_nothing(tmp_path: Path):
    builder = TraceBuilder()
    builder.op("aten::slice", 0, 1, dims=[[4096], [], [], [], []], types=["int"] + ["Scalar"] * 4)
    builder.events[-1]["args"]["Concrete Inputs"] = ["", "0", "0", "100", "1"]
    assert longest_context(read_trace(builder.write(tmp_path / "t.json"))) is None


def test_each_request_of_a_batch_needs_the_longest_at_most(tmp_path: Path):
    trace = with_slices(tmp_path / "t.json", 2000)
    assert rows_needed(trace, ["step[DECODE bs=4]"]) == 8000
    assert rows_needed(trace, ["step[DECODE bs=1]", "step[DECODE bs=3]"]) == 4000
    assert rows_needed(trace, ["step[EXTEND bs=2 toks=128]"]) == 4000
    assert rows_needed(trace, ["ProfilerStep#3"]) is None


@pytest.mark.parametrize("recording", ["base-eager-decode", "base-eager-decode-stack", "base-graph-decode"])
def test_recordings_of_one_request_of_2000_tokens(recordings: Path, recording: str):
    assert longest_context(read_trace(recordings / f"{recording}.trace.json.gz", frames=False)) == 2000
