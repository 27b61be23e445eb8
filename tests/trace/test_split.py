from __future__ import annotations

import json
import time

import pytest

from mla_diag.errors import UnreadableInputError
from mla_diag.trace import split
from mla_diag.trace.model import Damage
from mla_diag.trace.split import EventChunks
from tests.trace.reading import every_kind_of_event, read, rows, small_pieces
from tests.trace_builder import Layout, TraceBuilder

UNDAMAGED = Damage()


@pytest.mark.parametrize("layout", Layout)
def test_every_layout_gives_the_same_tables(tmp_path, layout):
    expected = read(tmp_path, every_kind_of_event())
    trace = read(tmp_path, every_kind_of_event(), layout=layout)
    assert rows(trace) == rows(expected)
    assert trace.damage == UNDAMAGED
    assert trace.event_count == len(every_kind_of_event().events)
    assert trace.rank == (None if layout is Layout.BARE_ARRAY else 3)
    assert trace.device == (None if layout is Layout.BARE_ARRAY else "NVIDIA H200")


@pytest.mark.parametrize("size", [1, 37, 101, 256, 1000, 2999])
@pytest.mark.parametrize("layout", Layout)
def test_chunk_borders_change_nothing(tmp_path, monkeypatch, layout, size):
    expected = read(tmp_path, every_kind_of_event(), layout=layout)
    small_pieces(monkeypatch, size)
    trace = read(tmp_path, every_kind_of_event(), layout=layout)
    assert rows(trace) == rows(expected)
    assert trace.damage == UNDAMAGED
    assert trace.event_count == expected.event_count


@pytest.mark.parametrize(
    "name",
    [
        "a}, {b",
        '}, {"ph": "X", "cat": "kernel"}, {',
        '}], "traceName": "x"}',
        "}\n  ],\n  ",
        '"traceEvents": [',
        "\\",
        '\\"}, {\\"ph\\": ',
        "]}",
    ],
)
def test_strings_that_look_like_borders_are_strings(tmp_path, monkeypatch, name):
    trace = TraceBuilder()
    trace.metadata["note"] = name
    for at in range(20):
        trace.kernel(name, at, 1)
    for layout in Layout:
        for size in (split.CHUNK_BYTES, 64):
            with monkeypatch.context() as patch:
                small_pieces(patch, size)
                found = read(tmp_path, trace, layout=layout)
            assert [found.names[number] for number in found.device_events.name] == [name] * 20
            assert found.damage == UNDAMAGED
            assert found.metadata.get("note") == (None if layout is Layout.BARE_ARRAY else name)


def test_lists_of_objects_inside_an_event_end_nothing(tmp_path, monkeypatch):
    trace = TraceBuilder()
    for at in range(50):
        trace.complete("kernel", "k", at, 1, (0, 7), {"inputs": [{"a": 1}, {"b": [{}]}], "stream": 7})
    for layout in Layout:
        for size in (split.CHUNK_BYTES, 100):
            with monkeypatch.context() as patch:
                small_pieces(patch, size)
                found = read(tmp_path, trace, layout=layout)
            assert len(found.device_events) == 50
            assert found.damage == UNDAMAGED


def test_many_lists_of_objects_inside_events_do_not_make_the_end_slow(tmp_path):
    trace = TraceBuilder()
    for at in range(4_000):
        trace.complete("kernel", "k", at, 1, (0, 7), {"inputs": [{"a": 1}], "stream": 7, "padding": "x" * 100})
    begin = time.perf_counter()
    assert len(read(tmp_path, trace).device_events) == 4_000
    assert time.perf_counter() - begin < 5  # it took minutes when each list was tried as the end with repairs


def test_metadata_after_the_events_may_be_longer_than_what_is_held_back(tmp_path, monkeypatch):
    """SGLang's profile_merger writes every rank's devices after the events."""
    trace = every_kind_of_event()
    trace.metadata["deviceProperties"] = [{"id": number % 8, "name": "NVIDIA H200"} for number in range(400)]
    trace.metadata["pg_config"] = [{"pg_name": str(number), "ranks": [{}]} for number in range(200)]
    expected = read(tmp_path, trace)
    small_pieces(monkeypatch, 500)
    found = read(tmp_path, trace, layout=Layout.METADATA_LAST)
    assert rows(found) == rows(expected)
    assert found.damage == UNDAMAGED
    assert found.metadata == {key: value for key, value in expected.metadata.items() if key != "traceName"}


def test_metadata_after_the_events_may_be_malformed(tmp_path):
    """kineto#131: a bare N/A as a value."""
    text = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}], "deviceProperties": '
    text += b'[{"id": 0, "name": "H"}, {"id": 1, "clock": NaN}], "smi": N/A}'
    trace = read(tmp_path, text)
    assert trace.damage == UNDAMAGED
    assert trace.device == "H"
    assert trace.metadata["smi"] is None


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("prefix", [b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf \n"])
def test_a_byte_order_mark_and_blanks_before_the_trace(tmp_path, layout, prefix):
    trace = read(tmp_path, prefix + every_kind_of_event().text(layout).lstrip())
    assert len(trace.device_events) == 19
    assert trace.damage == UNDAMAGED


@pytest.mark.parametrize("layout", Layout)
def test_a_trace_without_events_is_a_trace(tmp_path, layout):
    """HTA 0.6.0's change log: a trace of metadata only ended in a KeyError."""
    trace = read(tmp_path, TraceBuilder(), layout=layout)
    assert trace.event_count == 0
    assert trace.damage == UNDAMAGED
    assert all(not found for found in rows(trace).values())


def test_offsets_are_bytes_of_the_text(monkeypatch):
    monkeypatch.setattr(split, "CHUNK_BYTES", 300)
    monkeypatch.setattr(split, "_HELD_BACK", 300)
    text = every_kind_of_event().text(Layout.KINETO)
    blocks = [text[at : at + 100] for at in range(0, len(text), 100)]
    chunks = list(EventChunks(None, blocks))  # type: ignore[arg-type]
    assert len(chunks) > 5
    for chunk in chunks:
        assert text[chunk.offset : chunk.offset + len(chunk.text)] == chunk.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"   \n ", "nothing but 5 bytes of white space"),
        (b"\x00\x01\x02", "not JSON: byte 0"),
        (b"  <html>", "not JSON: byte 2 is b'<'"),
        (b"PK\x03\x04", "not JSON"),
        (b'{"model": "deepseek"}', 'no "traceEvents"'),
        (b'{"model": "deep', "stops or breaks within its first 15 bytes"),
        (b"{" * 100_000, "stops or breaks"),
        (b'{"traceEvents": {}}', 'no "traceEvents"'),
        (b'{"traceEvents": null}', 'no "traceEvents"'),
        (b'{"traceEvents": ', "stops or breaks"),
        (b'{"traceEvents": [', "cut off before its first event ends"),
        (b"[", "cut off before its first event ends"),
        (b'{"traceEvents": [{"ph": "X", "cat": "ker', "cut off before its first event ends"),
        (b'"a string"', "not JSON"),
        (b"[1, 2, null]", "byte 1 is b'1' where an event has '{'"),
        (b'{"traceEvents": [[{}]]}', "byte 17 is b'[' where an event has '{'"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(tmp_path, text, words):
    with pytest.raises(UnreadableInputError) as raised:
        read(tmp_path, text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_long_json_file_without_events_is_given_up_early(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "_HEAD_BYTES", 1000)
    with pytest.raises(UnreadableInputError):
        read(tmp_path, json.dumps({"weights": ["x" * 90] * 200}).encode())


@pytest.mark.parametrize("layout", Layout)
def test_events_that_begin_with_an_unheard_of_member_are_cut_all_the_same(tmp_path, monkeypatch, layout):
    trace = TraceBuilder()
    for at in range(40):
        trace.event(zz=1, ph="X", cat="kernel", name="k", pid=0, tid=7, ts=at, dur=1)
    small_pieces(monkeypatch, 200)
    found = read(tmp_path, trace, layout=layout)
    assert len(found.device_events) == 40
    assert found.damage == UNDAMAGED
