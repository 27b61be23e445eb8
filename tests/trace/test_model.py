from __future__ import annotations

import pytest

from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import link
from mla_diag.trace.rank import Coordinates
from tests.trace.reading import read, rows
from tests.trace_builder import TraceBuilder


def merged(*labels: str) -> TraceBuilder:
    """A trace as SGLang's profile_merger writes it: each rank's label before its process ids, its ids as they were."""
    whole = TraceBuilder()
    for rank, label in enumerate(labels):
        part = TraceBuilder()
        part.span("step[DECODE bs=1]", 0, 100)
        part.frame("sglang/srt/x.py(1): f", 0, 100)
        part.dispatch(f"op of {rank}", 10, [(f"kernel of {rank}", 50, rank + 1)])
        part.process_name("python")
        for event in part.events:
            whole.event(**{**event, "pid": f"[{label}] {event['pid']}"})
    return whole


def test_a_merged_trace_falls_into_its_ranks(tmp_path):
    labels = ["TP00", "TP01", "TP02-DP01"]
    parts = read(tmp_path, merged(*labels)).by_rank()
    assert [part.label for part in parts] == labels
    assert [part.rank for part in parts] == [0, 1, 2]
    assert [part.coordinates for part in parts] == [Coordinates(0), Coordinates(1), Coordinates(tp=2, dp=1)]
    for rank, part in enumerate(parts):
        assert [len(table) for table in rows(part).values()] == [1, 1, 1, 1, 0, 1]
        links = link(part)  # correlations repeat from rank to rank
        assert part.names[part.device_events.name[0]] == f"kernel of {rank}"
        assert part.names[part.ops.name[links.op[0]]] == f"op of {rank}"
        assert part.device_events.duration.tolist() == [(rank + 1) * 1000]
        assert links.sources[links.source[0]].function == "f"


def test_device_work_without_a_label_is_not_lost(tmp_path):
    builder = merged("TP00", "TP01")
    builder.event(name="Record Window End", ph="i", s="g", pid="", tid="", ts=4000)
    assert len(read(tmp_path, builder).by_rank()) == 2
    builder.kernel("stray", 1, 1)
    *_, stray = read(tmp_path, builder).by_rank()
    assert (stray.label, len(stray.device_events)) == (None, 1)


def test_a_trace_of_one_rank_is_its_own_part(tmp_path):
    trace = read(tmp_path, TraceBuilder(rank=5))
    assert trace.by_rank() == [trace]


@pytest.mark.parametrize(
    ("info", "name", "rank"),
    [
        ({"rank": 3}, "trace-TP-1.json", 3),
        ({"rank": 7}, "trace.json", 7),
        ({}, "1790857026-TP-4-DECODE.trace.json", 4),
        ({"rank": "3"}, "a-TP12.json", 12),
        (None, "dp1_pp0_tp0_dcp0_ep0_rank4.1790857026.pt.trace.json.gz", 4),
        (None, "rank_6.json", 6),
        ([1], "rank-8.json", 8),
        (None, "trace.json", None),
    ],
)
def test_the_rank_is_recorded_or_in_the_name_or_unknown(tmp_path, info, name, rank):
    """HTA#17, HTA#107: no rank was an error, and one without a blank after the colon was overlooked."""
    trace = TraceBuilder(rank=None)
    trace.kernel("k", 1, 1)
    if info is not None:
        trace.metadata["distributedInfo"] = info
    assert read_trace(trace.write(tmp_path / name)).rank == rank


def test_the_device_is_that_of_most_events(tmp_path):
    trace = TraceBuilder()
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "idle"}, "odd", {"id": 3, "name": "busy", "numSms": 132}]
    trace.kernel("k", 1, 1, device=0)
    for at in range(3):
        trace.kernel("k", at, 1, device=3)
    found = read(tmp_path, trace)
    assert found.device == "busy"
    assert (found.device_properties or {})["numSms"] == 132


@pytest.mark.parametrize("device", [-1, 2**40, 2**62, 2**63])
def test_a_strange_device_number_is_no_matter(tmp_path, device):
    trace = TraceBuilder()
    trace.kernel("k", 1, 1, device=device)
    assert read(tmp_path, trace).device == "NVIDIA H200"


@pytest.mark.parametrize("properties", [None, [], {}, "H200", [None], [{"id": 0}], [{"id": 0, "name": ""}]])
def test_a_trace_that_does_not_name_its_device_has_none(tmp_path, properties):
    trace = TraceBuilder(device=None)
    trace.metadata["deviceProperties"] = properties
    trace.kernel("k", 1, 1)
    assert read(tmp_path, trace).device is None
