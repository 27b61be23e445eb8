from __future__ import annotations

import json

import pytest

from mla_diag.trace.repair import lenient_object, split_events
from tests.trace.reading import read
from tests.trace_builder import TraceBuilder


def trace_with(tmp_path, marker: bytes, replacement: bytes, *, around: int = 3):
    """Read a trace of some kernels, the text of the middle one changed after it was encoded."""
    trace = TraceBuilder()
    for at in range(2 * around + 1):
        trace.kernel("MARK" if at == around else f"kernel {at}", at, 1, at + 1)
    return read(tmp_path, trace.text().replace(marker, replacement))


def kernel_names(trace) -> list[str]:
    return [trace.names[number] for number in trace.device_events.name[trace.device_events.start.argsort()]]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (b'{"device": "cpu"}(12): run', '{"device": "cpu"}(12): run'),
        (b'"quoted"', '"quoted"'),
        (b'say "hi", then "bye"', 'say "hi", then "bye"'),
        (b'already \\"escaped\\" and "not"', 'already "escaped" and "not"'),
    ],
)
def test_unescaped_quotes_in_a_name_are_repaired(tmp_path, written, meant):
    """pytorch#113001, pytorch#146900, kineto#1459."""
    trace = trace_with(tmp_path, b"MARK", written)
    assert kernel_names(trace)[3] == meant
    assert len(trace.device_events) == 7
    assert (trace.damage.lost_events, trace.damage.repaired_events) == (0, 1)


@pytest.mark.parametrize("character", [b"\x01", b"\x00", b"\n", b"\t", b"\x1f"])
def test_control_characters_in_a_name_are_kept(tmp_path, character):
    """pytorch#136180, pytorch#130622, perfetto#598."""
    trace = trace_with(tmp_path, b"MARK", b"a" + character + b"b")
    assert kernel_names(trace)[3] == f"a{character.decode()}b"
    assert trace.damage.lost_events == 0


@pytest.mark.parametrize("value", [b"N/A", b"n/a", b"nan", b"-inf", b"None", b"NaN", b"-Infinity", b"undefined"])
def test_bare_words_as_values_count_as_nothing(tmp_path, value):
    """kineto#131, kineto#133: N/A; NaN and Infinity are what Python's json writes."""
    trace = trace_with(tmp_path, b'"correlation":4', b'"correlation": ' + value + b', "occupancy": ' + value)
    assert len(trace.device_events) == 7
    assert sorted(trace.device_events.correlation.tolist()) == [-1, 1, 2, 3, 5, 6, 7]
    assert trace.damage.lost_events == 0


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (b"\\ud800", "\ufffd"),
        (b"\\udc00", "\ufffd"),
        (b"\\uD83D\\uDE00", "\U0001f600"),
        (b"\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        ("µs".encode(), "µs"),
    ],
)
def test_names_come_out_as_text_that_can_be_written(tmp_path, written, meant):
    trace = trace_with(tmp_path, b"MARK", written)
    assert kernel_names(trace)[3] == meant
    "".join(trace.names).encode()
    assert trace.damage.lost_events == 0


def test_metadata_comes_out_as_text_that_can_be_written(tmp_path):
    text = b'{"a": "\\ud800", "b": "\xff", "traceEvents": [{"ph": "M"}], "c": "\\udfff", "d": "\xff", "e": NaN}'
    metadata = read(tmp_path, text).metadata
    assert metadata == {"a": "\ufffd", "b": "\ufffd", "c": "\ufffd", "d": "\ufffd", "e": None}


def test_an_event_beyond_repair_is_lost_and_named_by_its_byte(tmp_path):
    trace = trace_with(tmp_path, b'"name": "MARK"', b'"name": MARK"')
    assert kernel_names(trace) == [f"kernel {at}" for at in (0, 1, 2, 4, 5, 6)]
    assert trace.damage.lost_events == 1
    text = (tmp_path / "test.trace.json").read_bytes()
    at = trace.damage.first_lost_at
    assert at is not None
    assert text[at : text.index(b"}", at)].count(b"MARK") == 1
    assert text[at:].startswith(b"{")


def test_an_event_that_is_no_object_is_lost_and_named_by_its_byte(tmp_path):
    text = b'[{"cat": "kernel", "name": "k", "ts": 1}, null, 7, {"cat": "kernel", "name": "k", "ts": 2}]'
    trace = read(tmp_path, text)
    assert len(trace.device_events) == 2
    assert trace.damage.lost_events == 2
    assert trace.damage.first_lost_at == text.index(b"null")


@pytest.mark.parametrize("depth", [900, 5_000, 200_000])
def test_deep_nesting_costs_no_other_event(tmp_path, depth):
    trace = trace_with(tmp_path, b'"correlation":4', b'"x": ' + b"[" * depth + b"]" * depth)
    assert len(trace.device_events) >= 6
    assert trace.damage.lost_events == 7 - len(trace.device_events)


def test_a_repaired_event_does_not_hide_one_without_category_in_the_same_chunk(tmp_path):
    trace = TraceBuilder()
    trace.process_name("python")
    trace.kernel("MARK", 1, 1)
    trace.kernel("k", 2, 1)
    found = read(tmp_path, trace.text().replace(b"MARK", b'a "b" c'))
    assert kernel_names(found) == ['a "b" c', "k"]
    assert found.event_count == 3


def test_the_object_that_a_text_begins_with_may_have_to_be_alone():
    assert lenient_object(b' {"a": 1} ], "b"') == {"a": 1}
    assert lenient_object(b' {"a": 1} ', alone=True) == {"a": 1}
    assert lenient_object(b'{"a": 1} ]', alone=True) is None
    assert lenient_object(b"[1]") is None
    assert lenient_object(b"") is None


def test_splitting_finds_events_where_their_text_is():
    events = [b'{"ph": "X", "name": "a "b" }, { c"}', b'{"name": "d"}', b'{\n  "ts": 1\n}']
    text = b" ,\n".join(events)
    parts = list(split_events(text))
    assert [part for _, part in parts] == events
    assert all(text[at:].startswith(part) for at, part in parts)
    assert list(split_events(b"nothing")) == [(0, b"nothing")]


def test_numbers_too_large_for_json_readers_cost_no_other_event(tmp_path):
    for number in (b"1e400", b"1" * 30, b"1" * 5000, b"-1e-400"):
        trace = trace_with(tmp_path, b'"correlation":4', b'"correlation":4, "x":' + number)
        assert len(trace.device_events) >= 6
        assert json.dumps(trace.metadata)
