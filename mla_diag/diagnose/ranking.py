"""Ops by the device time that they take in a step of one stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mla_diag.diagnose.diagnosis import KernelUse, Op, Source
from mla_diag.diagnose.geometry import bytes_moved, extents
from mla_diag.diagnose.mapping import MappedOp, Mapping, mapped_op
from mla_diag.diagnose.traffic import Tensor, bytes_from_shapes, bytes_of_memcpy
from mla_diag.trace.columns import MISSING, NANOS_PER_MS, Ints
from mla_diag.trace.link import Links
from mla_diag.trace.model import DeviceKind, Trace

_NANOS_PER_SECOND = 1e9


class RankedOp(NamedTuple):
    """A row of the ranking and the device events behind it.

    Attributes:
        op: The row.
        events: The device events.
        inputs: The tensors among the op's inputs, with their strides, which tell a view; None where none were recorded.
    """

    op: Op
    events: Ints
    inputs: tuple[Tensor, ...] | None


class _Row(NamedTuple):
    """The device events of one row of the ranking and what they have in common."""

    events: Ints
    op: int
    mapped: int
    graph: bool
    source: int


def rank_ops(trace: Trace, links: Links, events: Ints, steps: int, mapping: Mapping | None = None) -> list[RankedOp]:
    """Rank what some steps of one stage launched.

    Events are one row if they were launched by the same op with the same shapes and types from the same function; where
    no op launched them, if they are the same kernel with the same geometry, which stands for the shapes.

    Args:
        trace: One rank's trace.
        links: Its links.
        events: The device events of the steps.
        steps: How many steps they are of.
        mapping: What launched the kernels of graph replays, from another trace.
    """
    total = int(trace.device_events.duration[events].sum())
    ranked = [_ranked(trace, links, row, steps, total, mapping) for row in _rows(trace, links, events, mapping)]
    return sorted(ranked, key=lambda row: (-row.op.ms_per_step, row.op.kernel))


def _rows(trace: Trace, links: Links, events: Ints, mapping: Mapping | None) -> Iterator[_Row]:
    if not len(events):
        return
    table, op = trace.device_events, links.op[events]
    mapped = np.full(len(events), MISSING, np.int64) if mapping is None else mapping.op[events].astype(np.int64)
    keys = np.stack([table.name, table.grid, table.block]).astype(np.int64)[:, events]
    by_op = op != MISSING
    keys[:, by_op] = np.stack([trace.ops.name, trace.ops.dims, trace.ops.types])[:, op[by_op]]
    if mapping is not None:
        # A mapped op is one row whatever its kernels; without an op the kernel is all that tells rows apart.
        named = np.array([entry.op is not None for entry in mapping.ops] or [False])
        keys[:, (mapped != MISSING) & named[mapped]] = 0
    keys = np.vstack([keys, by_op, mapped, links.graph[events], links.source[events]])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        first = members[0]
        yield _Row(
            events[members],
            int(op[first]),
            int(mapped[first]),
            bool(links.graph[events[first]]),
            int(links.source[events[first]]),
        )


def _ranked(trace: Trace, links: Links, row: _Row, steps: int, total: int, mapping: Mapping | None) -> RankedOp:
    kernels = _kernels(trace, row.events, steps)
    spent = int(trace.device_events.duration[row.events].sum())
    launches = len(row.events)
    by, calls = _launched_by(trace, links, row, mapping)
    moved, moved_source = _bytes(trace, row, by, calls, kernels, steps)
    if row.op != MISSING:
        how = "op"
    elif row.graph:
        how = "graph"
    else:
        how = "direct" if links.launch[row.events[0]] != MISSING else "unknown"
    op = Op(
        op=by.op,
        kernel=kernels[0].kernel,
        kernels=kernels,
        launched_by=how,
        mapped=row.mapped != MISSING,
        launches_per_step=launches / steps,
        calls_per_step=calls / steps,
        ms_per_step=spent / steps / NANOS_PER_MS,
        share=spent / total if total else 0.0,
        shapes=None if by.inputs is None else [list(tensor.shape) for tensor in by.inputs],
        dtypes=None if by.inputs is None else [tensor.dtype for tensor in by.inputs],
        bytes_per_launch=None if moved is None else round(moved / launches),
        bytes_source=moved_source,
        bytes_per_second=None if moved is None or not spent else moved / (spent / _NANOS_PER_SECOND),
        source=None if by.source is None else Source(*by.source),
    )
    return RankedOp(op, row.events, by.inputs)


def _launched_by(trace: Trace, links: Links, row: _Row, mapping: Mapping | None) -> tuple[MappedOp, int]:
    """What launched a row's events, by this trace or by the mapping, and how many calls those were."""
    if mapping is not None and row.mapped != MISSING:
        return mapping.ops[row.mapped], len(np.unique(mapping.call[row.events]))
    source = links.sources[row.source] if row.source != MISSING else None
    if row.op == MISSING:
        return MappedOp(None, None, source), len(row.events)
    return mapped_op(trace, row.op, source), len(np.unique(links.op[row.events]))


def _bytes(
    trace: Trace, row: _Row, by: MappedOp, calls: int, kernels: list[KernelUse], steps: int
) -> tuple[int | None, str | None]:
    """What a row's events moved together: a copy's own size is exact, shapes come next, geometry last."""
    moved = _bytes_of_copies(trace, row.events)
    if moved is not None:
        return moved, "memcpy"
    if by.op is not None and by.inputs:
        per_call = bytes_from_shapes(by.op, by.inputs, kernels[0].kernel)
        if per_call is not None:
            return per_call * calls, "shapes"
    return _bytes_from_geometry(kernels, steps) if row.op == MISSING else (None, None)


def _kernels(trace: Trace, events: Ints, steps: int) -> list[KernelUse]:
    table = trace.device_events
    keys = np.stack([column[events].astype(np.int64) for column in (table.name, table.grid, table.block)])
    distinct, group, count = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    spent = np.bincount(group, table.duration[events])
    return [
        KernelUse(
            kernel=trace.names[distinct[0, number]],
            launches_per_step=int(count[number]) / steps,
            ms_per_step=float(spent[number]) / steps / NANOS_PER_MS,
            grid=extents(trace.values[distinct[1, number]]),
            block=extents(trace.values[distinct[2, number]]),
        )
        for number in np.argsort(-spent, kind="stable").tolist()
    ]


def _bytes_of_copies(trace: Trace, events: Ints) -> int | None:
    """What memcpys and memsets moved, if the row is nothing else and all of them say."""
    table = trace.device_events
    sizes = table.bytes[events]
    if (table.kind[events] == DeviceKind.KERNEL).any() or (sizes < 0).any():
        return None
    names = table.name[events].tolist()
    return sum(bytes_of_memcpy(trace.names[name], size) for name, size in zip(names, sizes.tolist(), strict=True))


def _bytes_from_geometry(kernels: list[KernelUse], steps: int) -> tuple[int | None, str | None]:
    """What kernels moved by their names and launches, if all of them tell."""
    parts = [(use, bytes_moved(use.kernel, use.grid, use.block)) for use in kernels]
    moved = [(use.launches_per_step * steps * part.total, part.least) for use, part in parts if part is not None]
    if not moved or len(moved) < len(parts):
        return None, None
    return round(sum(total for total, _ in moved)), "geometry-least" if any(least for _, least in moved) else "geometry"
