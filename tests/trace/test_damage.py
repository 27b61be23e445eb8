"""Traces that are cut off, damaged or overwritten, through the whole reader."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_diag.trace.model import Damage
from tests.trace.reading import every_kind_of_event, read, read_or_refuse, rows
from tests.trace_builder import Layout, TraceBuilder


def events_before(text: bytes, cut: int) -> list[dict[str, Any]]:
    """The events of a trace that end before a byte of its text."""
    decoder = json.JSONDecoder()
    whole = text.decode()
    at = whole.index("[", whole.index('"traceEvents"')) + 1
    events = []
    while True:
        at += len(whole[at:]) - len(whole[at:].lstrip(" \n,"))
        if whole[at] == "]":
            return events
        event, at = decoder.raw_decode(whole, at)
        if len(whole[:at].encode()) > cut:
            return events
        events.append(event)


@pytest.mark.parametrize("layout", [Layout.KINETO, Layout.COMPACT, Layout.METADATA_LAST])
def test_a_trace_cut_off_at_any_byte_gives_the_events_before(tmp_path, layout):
    """chakra#192: "Unterminated string ... line 985848"."""
    trace = TraceBuilder(device=None)
    trace.process_name("ä\\")
    trace.dispatch('aten::"copy_" }, {"ph', 10, [("copy", 120, 40)], dims=[[4, 1, 576], []])
    trace.replay(30, [("a", 200, 1)])
    text = trace.text(layout)
    path = tmp_path / "cut.json"
    for cut in range(len(text.rstrip())):
        path.write_bytes(text[:cut])
        found = read_or_refuse(path)
        events = events_before(text, cut)
        if found is None:
            assert not events, cut
            continue
        starts = sorted(event["ts"] * 1000 for event in events if event.get("cat") == "kernel")
        assert sorted(found.device_events.start.tolist()) == starts, cut
        assert len(found.launches) == sum(event.get("cat") == "cuda_runtime" for event in events), cut
        assert found.event_count == len(events), cut
        assert found.damage == Damage(cut_at=cut), cut
        assert found.damage.truncated
    assert len(events) == len(trace.events)


def test_a_gzip_trace_cut_off_at_any_byte_gives_the_events_before(tmp_path):
    trace = every_kind_of_event()
    whole = rows(read(tmp_path, trace))
    data = gzip.compress(trace.text(), mtime=0)
    path = tmp_path / "cut.json.gz"
    counts = []
    for cut in range(0, len(data), 3):
        path.write_bytes(data[:cut])
        found = read_or_refuse(path)
        if found is None:
            assert not counts
            continue
        assert found.damage.gzip == f"the gzip data stops at byte {cut:,} without its end marker"
        assert found.damage.lost_events == 0
        assert all(set(these) <= set(whole[table]) for table, these in rows(found).items())
        counts.append(found.event_count)
    assert counts == sorted(counts)
    assert counts[-1] == len(trace.events)


def test_damage_anywhere_in_a_gzip_trace_is_no_crash(tmp_path):
    data = gzip.compress(every_kind_of_event().text(), mtime=0)
    path = tmp_path / "damaged.json.gz"
    for at in range(2, len(data), 5):  # before that it is no gzip file
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        found = read_or_refuse(path)
        # Bytes 4 to 9 of a gzip file are its date and origin, which no checksum covers.
        assert found is None or found.damage.gzip is not None or at < 10, at


@pytest.mark.parametrize("byte", [b"\x00", b'"', b"}", b"]", b"\xff", b""])
def test_damage_anywhere_in_the_text_costs_little(tmp_path, byte):
    trace = every_kind_of_event()
    text = trace.text()
    first = text.index(b'"ph"')
    path = tmp_path / "damaged.json"
    for at in range(first, len(text), 151):
        path.write_bytes(text[:at] + byte + text[at + 1 :])
        found = read_or_refuse(path)
        assert found is not None, at
        assert found.event_count >= len(trace.events) - 2, at


DAMAGE = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(
        [b"", b'"', b"}", b"]", b"{", b",", b"}, {", b'}], "x": {', b"\\", b"\\ud800", b"NaN", b"\xff", b"1e999"]
    ),
    st.sampled_from([0, 1, 5, 200]),
)


@settings(max_examples=150)
@given(st.sampled_from(Layout), st.lists(DAMAGE, min_size=1, max_size=6))
def test_whatever_is_overwritten_in_a_trace_it_is_read_or_refused(tmp_path_factory, layout, damage):
    text = every_kind_of_event().text(layout)
    for where, with_what, over in damage:
        at = int(where * len(text))
        text = text[:at] + with_what + text[at + over :]
    path = tmp_path_factory.getbasetemp() / "overwritten.json"
    path.write_bytes(text)
    found = read_or_refuse(path)
    if found is not None:
        rows(found)  # fails unless the columns of each table are of one length
        "".join([*found.names, repr(found.metadata)]).encode()
