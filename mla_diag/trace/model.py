"""One trace in memory: tables of numpy columns, all times in nanoseconds as int64."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mla_diag.trace.columns import Ids, Ints
from mla_diag.trace.rank import Coordinates, coordinates_in, global_rank_in
from mla_diag.trace.remote import TraceFile

# Slices of a request's row of the page table tell how long its context is; other ops' scalars are many and of no use.
SCALARS_OF = frozenset({"aten::slice"})

TableT = TypeVar("TableT", bound="Table")


class DeviceKind(IntEnum):
    """What a device event is."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


@dataclass(frozen=True)
class Table:
    """Columns of equal length. `name` numbers `Trace.names`, `thread` numbers `Trace.threads`."""

    name: Ids
    thread: Ids
    start: Ints
    duration: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Ints:
        """Where each event ends."""
        return self.start + self.duration

    def take(self: TableT, rows: NDArray[Any]) -> TableT:
        """Some rows, by index or by mask."""
        columns = {field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **columns)


@dataclass(frozen=True)
class Frames(Table):
    """Python frames of serving packages, where the trace has them and they were asked for."""


@dataclass(frozen=True)
class Spans(Table):
    """`record_function` ranges on the CPU, or their shadows on the device, one a stream."""

    external_id: Ints


@dataclass(frozen=True)
class Ops(Table):
    """CPU ops. The last columns number `Trace.values`: raw JSON lists as long as the op's arguments.

    `scalars` holds the values of arguments that are no tensors, for the ops of `SCALARS_OF` only.
    """

    external_id: Ints
    dims: Ids
    types: Ids
    strides: Ids
    scalars: Ids


@dataclass(frozen=True)
class Launches(Table):
    """Calls into the CUDA or HIP runtime or driver, joined to what they launched by `correlation`."""

    external_id: Ints
    correlation: Ints


@dataclass(frozen=True)
class DeviceEvents(Table):
    """Kernels, memcpys and memsets. `grid` and `block` number `Trace.values`; `bytes` is -1 where none is recorded."""

    external_id: Ints
    correlation: Ints
    kind: NDArray[np.int8]
    device: Ints
    stream: Ints
    grid: Ids
    block: Ids
    bytes: Ints


@dataclass(frozen=True)
class Damage:
    """What of a file could not be read.

    Attributes:
        cut_at: The byte of the JSON text at which it stops before its end, or None.
        gzip: What is wrong with the gzip data, or None.
        lost_events: Events that could not be read and were left out.
        untimed_device_events: The device events among them that could be read but for their times.
        first_lost_at: The byte of the JSON text where the first of them is.
        repaired_events: Malformed events that could be read all the same.
        clamped_durations: Durations that were missing, negative or no number, and count as 0.
        clamped_device_durations: Those of device events among them.
    """

    cut_at: int | None = None
    gzip: str | None = None
    lost_events: int = 0
    untimed_device_events: int = 0
    first_lost_at: int | None = None
    repaired_events: int = 0
    clamped_durations: int = 0
    clamped_device_durations: int = 0

    @property
    def truncated(self) -> bool:
        """Whether the file ends before its end, so that steps may be incomplete."""
        return self.cut_at is not None or self.gzip is not None


@dataclass(frozen=True)
class Trace:
    """One process's trace, or several processes' in one file (see `by_rank`).

    Attributes:
        path: The file.
        metadata: What the file holds beside its events, as written.
        names: The text of every `name` column.
        values: The raw JSON of every value column.
        threads: The `(pid, tid)` of every `thread` column, as written.
        event_count: Events in the file, read or not.
        label: The rank's label in a merged trace, such as `TP00-DP01`, else None.
    """

    path: TraceFile
    metadata: dict[str, Any]
    names: list[str]
    values: list[bytes]
    threads: list[tuple[Any, Any]]
    device_events: DeviceEvents
    launches: Launches
    ops: Ops
    spans: Spans
    device_spans: Spans
    frames: Frames
    event_count: int
    damage: Damage
    label: str | None = None

    @property
    def rank(self) -> int | None:
        """The number of the rank among those that it was started with; of replicas, each counts its own from 0.

        Recorded in the trace, else as the file's name or the merged label gives it, by TP if by nothing else; or None.
        """
        info = self.metadata.get("distributedInfo")
        recorded = info.get("rank") if isinstance(info, dict) else None
        if self.label is None and isinstance(recorded, int):
            return recorded
        named = global_rank_in(self.label or self.path.name)
        return named if named is not None or self.coordinates is None else self.coordinates.tp

    @property
    def coordinates(self) -> Coordinates | None:
        """TP, DP, PP and EP rank, as the merged label or the file's name gives them; None if neither does."""
        return coordinates_in(self.label or self.path.name)

    @property
    def device(self) -> str | None:
        """The name of the device that most events ran on, or None where the trace does not say."""
        properties = self.device_properties
        name = properties.get("name") if properties else None
        return name if isinstance(name, str) and name else None

    @property
    def device_properties(self) -> dict[str, Any] | None:
        """What the trace says of that device: name, numSms, totalGlobalMem and more."""
        listed = self.metadata.get("deviceProperties")
        if not isinstance(listed, list):
            return None
        devices, events = np.unique(self.device_events.device, return_counts=True)
        main = int(devices[events.argmax()]) if len(devices) else 0
        known = [entry for entry in listed if isinstance(entry, dict)]
        return next((entry for entry in known if entry.get("id") == main), known[0] if known else None)

    def by_rank(self) -> list[Trace]:
        """The trace of each rank: itself, or the parts of a merged trace, the one without a label last.

        SGLang merges traces by writing the rank before every process id, as in `[TP00-DP01] 538`, and keeps
        correlations and ids as they were, so that they repeat from rank to rank (sglang/srt/utils/profile_merger.py).
        """
        labels = [_label(pid) for pid, _ in self.threads]
        distinct: list[str | None] = [*sorted({label for label in labels if label is not None}), None]
        if len(distinct) == 1:
            return [self]
        of_thread = np.array([distinct.index(label) for label in labels])
        parts = []
        for number, label in enumerate(distinct):
            tables: dict[str, Any] = {
                field.name: table.take(of_thread[table.thread] == number)
                for field in dataclasses.fields(self)
                if isinstance(table := getattr(self, field.name), Table)
            }
            # Without a label there are marks of viewers, as a rule; device work is not to be lost, whoever wrote it.
            if label is not None or len(tables["device_events"]):
                parts.append(dataclasses.replace(self, label=label, **tables))
        return parts

    def to_hta(self) -> Any:
        """This trace, all ranks of it, as a `TraceAnalysis` of Holistic Trace Analysis (extra `hta`); see `to_hta`.

        Raises:
            UsageError: Holistic Trace Analysis is not installed.
        """
        from mla_diag.trace.hta import to_hta  # noqa: PLC0415 - it imports this module, and pandas

        return to_hta([self])


def _label(pid: Any) -> str | None:
    found = re.match(r"\[([^\]]+)\] ", pid) if isinstance(pid, str) else None
    return found[1] if found else None
