"""Decoded events to the tables of a trace."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from mla_diag.trace import records
from mla_diag.trace.columns import NO_TIME, Interner, durations, integers, nanoseconds
from mla_diag.trace.link import parse_source
from mla_diag.trace.model import (
    SCALARS_OF,
    Damage,
    DeviceEvents,
    DeviceKind,
    Frames,
    Launches,
    Ops,
    Spans,
    Table,
    Trace,
)
from mla_diag.trace.remote import TraceFile

TableT = TypeVar("TableT", bound=Table)
Columns = dict[str, Any]

_KINDS = {records.Kernel: DeviceKind.KERNEL, records.Memcpy: DeviceKind.MEMCPY, records.Memset: DeviceKind.MEMSET}
_NAME, _THREAD = operator.attrgetter("name"), operator.attrgetter("pid", "tid")


class _ServingFrames(dict[str, bool]):
    """Whether a frame is of a serving package; the others, more than half, name nothing that can be blamed."""

    def __missing__(self, frame: str) -> bool:
        self[frame] = known = parse_source(frame) is not None
        return known


class TableBuilder:
    """Turns decoded events into columns, chunk by chunk, so that only the columns stay in memory.

    Attributes:
        without_time: Events left out because they say no time.
        device_without_time: The device events among them.
        clamped_durations: Durations that were missing, negative or no number, and count as 0.
        clamped_device_durations: Those of device events among them.
    """

    def __init__(self) -> None:
        self.without_time = 0
        self.device_without_time = 0
        self.clamped_durations = 0
        self.clamped_device_durations = 0
        self._names: Interner[str] = Interner()
        self._values: Interner[bytes] = Interner()
        self._threads: Interner[tuple[Any, Any]] = Interner()
        self._parts: dict[str, list[Columns]] = defaultdict(list)
        self._serving = _ServingFrames()

    def add(self, events: list[Any]) -> None:
        """Append the events of one chunk."""
        by_type: dict[type[Any], list[Any]] = defaultdict(list)
        for event in events:
            by_type[type(event)].append(event)
        for kind, (table, columns) in self._columns_of().items():
            found = by_type.get(kind, [])
            if kind is records.Frame:
                found = list(compress(found, map(self._serving.__getitem__, map(_NAME, found))))
            if found:
                self._parts[table].append(self._timed(kind, found, columns))

    def trace(self, path: TraceFile, metadata: dict[str, Any], event_count: int, damage: Damage) -> Trace:
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
            without = int((start == NO_TIME).sum())
            self.without_time += without
            self.device_without_time += without if kind in _KINDS else 0
            events = [event for event, time in zip(events, start, strict=True) if time != NO_TIME]
            start = start[start != NO_TIME]
        duration, clamped = durations([event.dur for event in events])
        if clamped:
            clamped -= sum(event.dur is None and event.ph != records.COMPLETE for event in events)
            self.clamped_durations += clamped
            self.clamped_device_durations += clamped if kind in _KINDS else 0
        return {
            "name": self._names.ids(map(_NAME, events)),
            "thread": self._threads.ids(map(_THREAD, events)),
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
            "scalars": self._values.ids(
                [
                    bytes(arg.scalars) if event.name in SCALARS_OF else b""
                    for event, arg in zip(events, args, strict=True)
                ]
            ),
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
        # Column by column out of the parts, so that no table is ever in memory twice.
        return table(**{column: np.concatenate([part.pop(column) for part in parts]) for column in list(parts[0])})


def _empty(table: type[Table]) -> Columns:
    narrow = dict.fromkeys(("name", "thread", "dims", "types", "strides", "scalars", "grid", "block"), np.int32)
    types: dict[str, Any] = {**narrow, "kind": np.int8}
    return {column: np.empty(0, types.get(column, np.int64)) for column in table.__dataclass_fields__}
