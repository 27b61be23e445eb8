"""Chunks of events to the tables of a trace, at the speed of msgspec, with a slower way for whatever it refuses."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from functools import reduce
from typing import Any

import msgspec

from mla_diag.errors import UnreadableInputError
from mla_diag.trace import records
from mla_diag.trace.model import Damage, Trace
from mla_diag.trace.remote import TraceFile
from mla_diag.trace.repair import lenient_object, split_events
from mla_diag.trace.source import Progress, TraceBytes
from mla_diag.trace.split import Chunk, EventChunks
from mla_diag.trace.tables import TableBuilder

# What msgspec raises for text that it cannot decode.
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Every category is a type of its own to the decoder; past so many, more are not worth a new one.
_MOST_CATEGORIES = 64
_NOTHING = records.Uncategorised()
_uncategorised = msgspec.json.Decoder(records.Uncategorised)


def read_trace(path: TraceFile, *, frames: bool = True, progress: Progress | None = None) -> Trace:
    """Read one trace file.

    Args:
        path: A `.json` or `.json.gz` file; which of the two is told from its content.
        frames: Whether to keep the Python frames of serving packages, which give source lines. Frames are most of a
            trace recorded with stacks.
        progress: Called with the bytes read so far and the bytes of the file.

    Raises:
        UnreadableInputError: The file cannot be read or is not a trace. A trace that is cut off or holds events that
            cannot be read gives what can be read; `Trace.damage` says what could not.
    """
    source = TraceBytes(path, progress)
    chunks = EventChunks(path, source)
    decoder = EventDecoder(frames=frames)
    tables = TableBuilder()
    for chunk in chunks:
        tables.add(decoder.decode(chunk))
    if not decoder.count and (decoder.lost or chunks.cut_at is not None):
        where = "cut off before its first event ends" if chunks.cut_at is not None else "no event in it can be read"
        raise UnreadableInputError(f"{path}: {where}; capture it again, or copy it again if it was being written")
    return tables.trace(
        path,
        chunks.metadata,
        decoder.count,
        Damage(
            cut_at=chunks.cut_at,
            gzip=source.damage,
            lost_events=decoder.lost + tables.without_time,
            untimed_device_events=tables.device_without_time,
            first_lost_at=decoder.first_lost_at,
            repaired_events=decoder.repaired,
            clamped_durations=tables.clamped_durations,
            clamped_device_durations=tables.clamped_device_durations,
        ),
    )


class EventDecoder:
    """Decodes chunks; counts events, repairs malformed ones, learns categories it has not met."""

    def __init__(self, *, frames: bool) -> None:
        """Keep Python frames or skip them."""
        self.count = 0
        self.lost = 0
        self.first_lost_at: int | None = None
        self.repaired = 0
        kept = [kind for kind in records.READ if frames or kind is not records.Frame]
        self._types: list[type[Any]] = [*kept, *map(records.skipped, records.Skipped.known)]
        self._known = {kind.__struct_config__.tag for kind in self._types}
        if not frames:
            self._learn("python_function")
        self._build()

    def decode(self, chunk: Chunk) -> list[Any]:
        """The events of a chunk, without those that could not be read."""
        try:
            events = self._many.decode(b"[" + chunk.text + b"]")
        except _REFUSED:  # an event without a category, of a new one, of a strange type; or the JSON is malformed
            events = self._one_by_one(chunk)
        self.count += len(events)
        return events

    def _one_by_one(self, chunk: Chunk) -> list[Any]:
        events = []
        for start, text in _split(chunk.text):
            try:
                event = self._one.decode(text)
            except _REFUSED:
                event = self._strange(bytes(text))
            if event is not None:
                events.append(event)
                continue
            self.lost += 1
            if self.first_lost_at is None:
                self.first_lost_at = chunk.offset + start
        return events

    def _strange(self, text: bytes) -> Any:
        """An event that the fast way refuses, or None if it cannot be read at all."""
        try:
            category = _uncategorised.decode(text).cat
        except _REFUSED:
            event = lenient_object(text)
            return None if event is None else self._repaired(event)
        if not isinstance(category, str):
            return _NOTHING
        if category in self._known:
            return self._repaired(lenient_object(text) or {})
        if len(self._known) < _MOST_CATEGORIES:
            self._learn(category)
            self._build()
        return _NOTHING

    def _repaired(self, event: dict[str, Any]) -> Any:
        """An event with its odd members replaced or, if that is not enough, left out."""
        if event.get("cat") not in self._known:
            return _NOTHING
        event["name"] = str(event.get("name") or "")
        event["dur"] = _finite(event.get("dur"))
        # One without a duration is not repaired by counting it as 0, and is counted as such by whoever does that.
        self.repaired += event["dur"] is not None or event.get("ph") != "X"
        for drop in ((), ("pid", "tid"), ("args",)):
            event = {key: value for key, value in event.items() if key not in drop}
            try:
                return self._one.decode(json.dumps(event))
            except (*_REFUSED, ValueError):
                continue
        return None

    def _learn(self, category: str) -> None:
        self._types.append(records.skipped(category))
        self._known.add(category)

    def _build(self) -> None:
        union = reduce(operator.or_, self._types)
        self._one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(union)
        self._many: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[union])  # type: ignore[valid-type]


def _finite(value: Any) -> float | None:
    """A number, whatever type it came in, or None; JSON has no others."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _split(text: bytes) -> Iterator[tuple[int, Any]]:
    """The events of a chunk, each with its offset: exactly if it is JSON, else by how they begin."""
    try:
        events = msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw])
    except _REFUSED:
        yield from split_events(text)
        return
    start = 0
    for event in events:
        start = text.find(event, start)
        yield start, event
        start += len(event)
