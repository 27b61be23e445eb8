"""Chunks of events to the tables of a trace, at the speed of msgspec, with a slower way for whatever it refuses."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from mla_diag.errors import UnreadableInputError
from mla_diag.trace import records
from mla_diag.trace.columns import NO_TIME, Interner, durations, integers, nanoseconds
from mla_diag.trace.model import Damage, DeviceEvents, DeviceKind, Frames, Launches, Ops, Spans, Table, Trace
from mla_diag.trace.repair import lenient_object, split_events
from mla_diag.trace.source import Progress, TraceBytes
from mla_diag.trace.split import Chunk, EventChunks

TableT = TypeVar("TableT", bound=Table)
Columns = dict[str, Any]

_KINDS = {records.Kernel: DeviceKind.KERNEL, records.Memcpy: DeviceKind.MEMCPY, records.Memset: DeviceKind.MEMSET}


def read_trace(path: Path, *, frames: bool = True, progress: Progress | None = None) -> Trace:
    """Read one trace file.

    Args:
        path: A `.json` or `.json.gz` file; which of the two is told from its content.
        frames: Whether to keep Python frames, which are most of a trace recorded with stacks and give source lines.
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
            first_lost_at=decoder.first_lost_at,
            repaired_events=decoder.repaired,
            clamped_durations=tables.clamped_durations,
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
        """The events of a chunk, without those that nothing reads or that could not be read."""
        text = b"[" + chunk.text + b"]"
        try:
            events = self._many.decode(text)
        except msgspec.ValidationError:  # valid JSON, but an event without a category, a new one, or a strange type
            parts: Iterable[tuple[int, Any]] = ((0, raw) for raw in msgspec.json.decode(text, type=list[msgspec.Raw]))
            events = self._one_by_one(parts, chunk.offset)
        except (msgspec.DecodeError, UnicodeDecodeError):
            events = self._one_by_one(split_events(chunk.text), chunk.offset)
        self.count += len(events)
        return events

    def _one_by_one(self, parts: Iterable[tuple[int, Any]], offset: int) -> list[Any]:
        events = []
        for start, text in parts:
            try:
                events.append(self._one.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError):
                if (event := self._strange(bytes(text))) is not None:
                    events.append(event)
                else:
                    self.lost += 1
                    if self.first_lost_at is None:
                        self.first_lost_at = offset + start
        return events

    def _strange(self, text: bytes) -> Any:
        """An event that the fast way refuses, or None if it cannot be read at all."""
        event = lenient_object(text)
        if event is None:
            return None
        category = event.get("cat")
        if not isinstance(category, str):
            return msgspec.convert(event, records.Metadata)
        if category not in self._known:
            self._learn(category)
            self._build()
            return self._one.decode(msgspec.json.encode({"cat": category}))
        self.repaired += 1
        event["name"] = str(event.get("name", ""))
        try:
            event["dur"] = float(event.get("dur") or 0)
        except (TypeError, ValueError):
            event["dur"] = -1.0
        for drop in ((), ("pid", "tid"), ("args",)):
            event = {key: value for key, value in event.items() if key not in drop}
            try:
                return self._one.decode(msgspec.json.encode(event))
            except msgspec.ValidationError:
                continue
        return None

    def _learn(self, category: str) -> None:
        self._types.append(records.skipped(category))
        self._known.add(category)

    def _build(self) -> None:
        union = reduce(operator.or_, self._types)
        self._one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(union)
        self._many: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[union])  # type: ignore[valid-type]


class TableBuilder:
    """Turns decoded events into columns, chunk by chunk, so that only the columns stay in memory."""

    def __init__(self) -> None:
        self.without_time = 0
        self.clamped_durations = 0
        self._names: Interner[str] = Interner()
        self._values: Interner[bytes] = Interner()
        self._threads: Interner[tuple[Any, Any]] = Interner()
        self._parts: dict[str, list[Columns]] = defaultdict(list)

    def add(self, events: list[Any]) -> None:
        """Append the events of one chunk."""
        by_type: dict[type[Any], list[Any]] = defaultdict(list)
        for event in events:
            by_type[type(event)].append(event)
        for kind, (table, columns) in self._columns_of().items():
            if found := by_type.get(kind):
                self._parts[table].append(self._timed(kind, found, columns))

    def trace(self, path: Path, metadata: dict[str, Any], event_count: int, damage: Damage) -> Trace:
        """All that was added, as a trace."""
        return Trace(
            path=path,
            metadata=metadata,
            names=self._names.values_by_id(),
            values=self._values.values_by_id(),
            threads=self._threads.values_by_id(),
            device_events=self._table(DeviceEvents, "device_events"),
            launches=self._table(Launches, "launches"),
            ops=self._table(Ops, "ops"),
            spans=self._table(Spans, "spans"),
            device_spans=self._table(Spans, "device_spans"),
            frames=self._table(Frames, "frames"),
            event_count=event_count,
            damage=damage,
        )

    def _columns_of(self) -> dict[type[Any], tuple[str, Callable[[list[Any], type[Any]], Columns]]]:
        return {
            records.Kernel: ("device_events", self._device),
            records.Memcpy: ("device_events", self._device),
            records.Memset: ("device_events", self._device),
            records.RuntimeCall: ("launches", self._launch),
            records.DriverCall: ("launches", self._launch),
            records.CpuOp: ("ops", self._op),
            records.Span: ("spans", self._external),
            records.DeviceSpan: ("device_spans", self._external),
            records.Frame: ("frames", lambda events, kind: {}),
        }

    def _timed(self, kind: type[Any], events: list[Any], columns: Callable[[list[Any], type[Any]], Columns]) -> Columns:
        start = nanoseconds([event.ts for event in events])
        if (start == NO_TIME).any():
            self.without_time += int((start == NO_TIME).sum())
            events = [event for event, time in zip(events, start, strict=True) if time != NO_TIME]
            start = start[start != NO_TIME]
        duration, clamped = durations([event.dur for event in events])
        self.clamped_durations += clamped
        return {
            "name": self._names.ids([event.name for event in events]),
            "thread": self._threads.ids([(event.pid, event.tid) for event in events]),
            "start": start,
            "duration": duration,
            **columns(events, kind),
        }

    def _external(self, events: list[Any], kind: type[Any]) -> Columns:
        return {"external_id": integers([event.args and event.args.external_id for event in events])}

    def _launch(self, events: list[Any], kind: type[Any]) -> Columns:
        correlation = integers([event.args and event.args.correlation for event in events])
        return {**self._external(events, kind), "correlation": correlation}

    def _op(self, events: list[Any], kind: type[Any]) -> Columns:
        args = [event.args or records.OpArgs() for event in events]
        return {
            **self._external(events, kind),
            "dims": self._values.ids([bytes(arg.dims) for arg in args]),
            "types": self._values.ids([bytes(arg.types) for arg in args]),
            "strides": self._values.ids([bytes(arg.strides) for arg in args]),
        }

    def _device(self, events: list[Any], kind: type[Any]) -> Columns:
        args = [event.args or records.DeviceArgs() for event in events]
        device = [event.pid if arg.device is None else arg.device for event, arg in zip(events, args, strict=True)]
        stream = [event.tid if arg.stream is None else arg.stream for event, arg in zip(events, args, strict=True)]
        return {
            **self._launch(events, kind),
            "kind": np.full(len(events), _KINDS[kind], np.int8),
            "device": integers(device),
            "stream": integers(stream),
            "grid": self._values.ids([bytes(arg.grid) for arg in args]),
            "block": self._values.ids([bytes(arg.block) for arg in args]),
            "bytes": integers([arg.bytes for arg in args]),
        }

    def _table(self, table: type[TableT], name: str) -> TableT:
        parts = self._parts.pop(name, None) or [_empty(table)]
        return table(**{column: np.concatenate([part[column] for part in parts]) for column in parts[0]})


def _empty(table: type[Table]) -> Columns:
    narrow = ("name", "thread", "dims", "types", "strides", "grid", "block", "kind")
    return {column: np.empty(0, np.int32 if column in narrow else np.int64) for column in table.__dataclass_fields__}
