"""Ops by the device time that they take in a step of one stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from mla_diag.diagnose.diagnosis import KernelUse, Op, Source
from mla_diag.diagnose.geometry import bytes_moved
from mla_diag.diagnose.traffic import bytes_from_shapes, bytes_of_memcpy, tensors
from mla_diag.trace.columns import MISSING, Ints
from mla_diag.trace.link import Links
from mla_diag.trace.model import DeviceKind, Trace

_NANOS_PER_MS = 1e6


class RankedOp(NamedTuple):
    """A row of the ranking and the device events behind it."""

    op: Op
    events: Ints


class _Row(NamedTuple):
    """The device events of one row of the ranking and what they have in common."""

    events: Ints
    op: int
    graph: bool
    source: int


def rank_ops(trace: Trace, links: Links, events: Ints, steps: int) -> list[RankedOp]:
    """Rank what some steps of one stage launched.

    Events are one row if they were launched by the same op with the same shapes and types from the same function; where
    no op launched them, if they are the same kernel with the same geometry, which stands for the shapes.

    Args:
        trace: One rank's trace.
        links: Its links.
        events: The device events of the steps.
        steps: How many steps they are of.
    """
    total = trace.device_events.duration[events].sum()
    ranked = [RankedOp(_op(trace, links, row, steps, int(total)), row.events) for row in _rows(trace, links, events)]
    return sorted(ranked, key=lambda row: (-row.op.ms_per_step, row.op.kernel))


def _rows(trace: Trace, links: Links, events: Ints) -> Iterator[_Row]:
    if not len(events):
        return
    table, op = trace.device_events, links.op[events]
    by_op = op != MISSING
    # np.where evaluates both branches, so an event without an op reads some op's columns and drops them; where the
    # trace has no ops at all there is nothing to read.
    op_columns = [trace.ops.name, trace.ops.dims, trace.ops.types] if len(trace.ops) else [np.zeros(1, np.int32)] * 3
    kernel_columns = [table.name, table.grid, table.block]
    keys = np.stack(
        [
            by_op.astype(np.int64),
            *(np.where(by_op, a[op], b[events]) for a, b in zip(op_columns, kernel_columns, strict=True)),
            links.graph[events].astype(np.int64),
            links.source[events].astype(np.int64),
        ]
    )
    _, group = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        first = members[0]
        yield _Row(events[members], int(op[first]), bool(links.graph[events[first]]), int(links.source[events[first]]))


def _op(trace: Trace, links: Links, row: _Row, steps: int, total: int) -> Op:
    kernels = _kernels(trace, row.events, steps)
    spent = int(trace.device_events.duration[row.events].sum())
    launches = len(row.events)
    op = None if row.op == MISSING else trace.names[trace.ops.name[row.op]]
    calls = launches if op is None else len(np.unique(links.op[row.events]))
    inputs = None
    if op is not None:
        inputs = tensors(*(trace.values[c[row.op]] for c in (trace.ops.dims, trace.ops.types, trace.ops.strides)))
    moved, moved_source = _bytes_of_copies(trace, row.events)
    if moved is None and op is None:
        moved, moved_source = _bytes_from_geometry(kernels, steps)
    if (
        moved is None
        and op is not None
        and inputs
        and (per_call := bytes_from_shapes(op, inputs, kernels[0].kernel)) is not None
    ):
        moved, moved_source = per_call * calls, "shapes"
    if op is not None:
        launched_by = "op"
    elif row.graph:
        launched_by = "graph"
    else:
        launched_by = "direct" if links.launch[row.events[0]] != MISSING else "unknown"
    source = links.sources[row.source] if row.source != MISSING else None
    return Op(
        op=op,
        kernel=kernels[0].kernel,
        kernels=kernels,
        launched_by=launched_by,
        launches_per_step=launches / steps,
        calls_per_step=calls / steps,
        ms_per_step=spent / steps / _NANOS_PER_MS,
        share=spent / total if total else 0.0,
        shapes=None if inputs is None else [tensor.shape for tensor in inputs],
        dtypes=None if inputs is None else [tensor.dtype for tensor in inputs],
        bytes_per_launch=None if moved is None else round(moved / launches),
        bytes_source=moved_source,
        source=None if source is None else Source(*source),
    )


def launch_extents(trace: Trace, event: int) -> tuple[list[int] | None, list[int] | None]:
    """The grid and block of one device event, in blocks and threads."""
    table = trace.device_events
    return _extents(trace.values[table.grid[event]]), _extents(trace.values[table.block[event]])


def _kernels(trace: Trace, events: Ints, steps: int) -> list[KernelUse]:
    table = trace.device_events
    keys = np.stack([column[events].astype(np.int64) for column in (table.name, table.grid, table.block)])
    distinct, group, count = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    spent = np.bincount(group, table.duration[events])
    return [
        KernelUse(
            kernel=trace.names[distinct[0, number]],
            launches_per_step=int(count[number]) / steps,
            ms_per_step=float(spent[number]) / steps / _NANOS_PER_MS,
            grid=_extents(trace.values[distinct[1, number]]),
            block=_extents(trace.values[distinct[2, number]]),
        )
        for number in np.argsort(-spent, kind="stable").tolist()
    ]


def _bytes_of_copies(trace: Trace, events: Ints) -> tuple[int | None, str | None]:
    """What memcpys and memsets moved, if the row is nothing else and all of them say."""
    table = trace.device_events
    sizes = table.bytes[events]
    if (table.kind[events] == DeviceKind.KERNEL).any() or (sizes < 0).any():
        return None, None
    names = table.name[events].tolist()
    moved = sum(bytes_of_memcpy(trace.names[name], size) for name, size in zip(names, sizes.tolist(), strict=True))
    return moved, "memcpy"


def _bytes_from_geometry(kernels: list[KernelUse], steps: int) -> tuple[int | None, str | None]:
    """What kernels moved by their names and launches, if all of them tell."""
    parts = [(use, bytes_moved(use.kernel, use.grid, use.block)) for use in kernels]
    moved = [(use.launches_per_step * steps * part.total, part.least) for use, part in parts if part is not None]
    if not moved or len(moved) < len(parts):
        return None, None
    return round(sum(total for total, _ in moved)), "geometry-least" if any(least for _, least in moved) else "geometry"


def _extents(text: bytes) -> list[int] | None:
    """A launch's grid or block: a list in most traces, text in some."""
    try:
        value = msgspec.json.decode(text)
        return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, list[int])
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
