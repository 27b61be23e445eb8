"""Reading small traces in tests, and comparing what was read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mla_diag.errors import UnreadableInputError
from mla_diag.trace import source, split
from mla_diag.trace.decode import read_trace
from mla_diag.trace.model import Table, Trace
from tests.trace_builder import Layout, TraceBuilder

Rows = dict[str, list[tuple[Any, ...]]]


def every_kind_of_event() -> TraceBuilder:
    """A trace with each kind of event that is read and some that are not, and text that looks like a border."""
    trace = TraceBuilder(rank=3)
    trace.process_name('python "}, {" ]')
    span = trace.span("step[DECODE bs=2]", 1000.125, 900)
    trace.frame("sglang/srt/layers/linear.py(141): forward", 1001, 800)
    for layer in range(4):
        at = 1010 + 100 * layer
        trace.dispatch(
            "aten::copy_", at, [("copy_kernel", at + 2000, 40)], dims=[[495553, 1, 576], []], types=["a", ""]
        )
        trace.dispatch('odd "name" }, {"ph": "X"} ],\n{', at + 30, [("k<1>}]", at + 2050, 3)], strides=[[576, 576, 1]])
        trace.memcpy(at + 2060, 2, trace.launch(at + 60, name="cudaMemcpyAsync"), size=4096)
        trace.memset(at + 2064, 1, trace.launch(at + 70, name="cudaMemsetAsync"), size=64)
        trace.flow(at + 60, 7)
    trace.kernel("triton_kernel", 3500, 7, trace.launch(1500, name="cuLaunchKernelEx", category="cuda_driver"))
    trace.replay(1600, [("graph_a", 3600, 5), ("graph_b", 3605, 6)])
    trace.device_span("step[DECODE bs=2]", 3010, 700, id=span)
    trace.complete("Trace", "PyTorch Profiler (0)", 990, 2000, ("Spans", "PyTorch Profiler"), {"Op count": 0})
    trace.event(name="Record Window End", ph="i", s="g", pid="", tid="", ts=4000)
    return trace


def read(path: Path, text: bytes | TraceBuilder, *, layout: Layout = Layout.KINETO, frames: bool = True) -> Trace:
    """Write a trace into a directory and read it."""
    file = path / "test.trace.json"
    file.write_bytes(text if isinstance(text, bytes) else text.text(layout))
    return read_trace(file, frames=frames)


def read_or_refuse(path: Path) -> Trace | None:
    """Read a damaged trace; None if it is refused, which must take one line."""
    try:
        return read_trace(path)
    except UnreadableInputError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}: ")
    return None


def rows(trace: Trace) -> Rows:
    """The rows of each table, numbers replaced by what they stand for, in an order that does not hang on chunks."""
    found: Rows = {}
    for field in dataclasses.fields(trace):
        table = getattr(trace, field.name)
        if isinstance(table, Table):
            columns = [
                _resolved(trace, column.name, getattr(table, column.name)) for column in dataclasses.fields(table)
            ]
            found[field.name] = sorted(zip(*columns, strict=True), key=repr)
    return found


def _resolved(trace: Trace, name: str, column: Any) -> list[Any]:
    if name == "name":
        return [trace.names[number] for number in column]
    if name == "thread":
        return [trace.threads[number] for number in column]
    if name in ("dims", "types", "strides", "scalars", "grid", "block"):
        return [repr(json.loads(trace.values[number] or b"null")) for number in column]
    return column.tolist()


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make reads and chunks so small that every border falls somewhere inside a small trace."""
    monkeypatch.setattr(source, "_READ_BYTES", size)
    monkeypatch.setattr(source, "_TEXT_BYTES", size)
    monkeypatch.setattr(split, "CHUNK_BYTES", size)
    monkeypatch.setattr(split, "_HELD_BACK", 2 * size)
