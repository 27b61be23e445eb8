"""Ops, shapes and lines for kernels of a graph replay, carried over from a trace that has them.

A replay records no op, shapes or stack. Two traces of the same server do: one without CUDA graphs, whose steps launch
the same kernels, and one of the graph's capture (`--enable-profile-cuda-graph`, sglang#24370), whose launches become
the graph's kernels in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mla_diag.diagnose.geometry import extents
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.steps import find_steps
from mla_diag.diagnose.traffic import Tensor, tensors
from mla_diag.errors import UnreadableInputError
from mla_diag.trace.columns import MISSING, Ids, Ints, rows_by
from mla_diag.trace.link import Links, Source, enclosing, innermost_sources, kernel_launches, link
from mla_diag.trace.model import Trace
from mla_diag.trace.remote import TraceFile


class MappedOp(NamedTuple):
    """What launched a kernel in the reference; equal for kernels that belong together."""

    op: str | None
    inputs: tuple[Tensor, ...] | None
    source: Source | None


class Kernel(NamedTuple):
    """A kernel by its name and launch geometry."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]


class _Launched(NamedTuple):
    """One kernel of the reference: which it is, what launched it, and which call that was."""

    kernel: Kernel | None
    by: MappedOp
    call: int


@dataclass(frozen=True)
class Reference:
    """What one step of each stage launches, in order, in a trace that has ops; or what a graph's capture launched.

    Attributes:
        path: The trace.
        steps: The kernels of a step, by stage.
        capture: The launches of a capture, which have no kernel's name; empty where the trace is none.
    """

    path: TraceFile
    steps: dict[Stage, list[_Launched]]
    capture: list[_Launched]


@dataclass(frozen=True)
class Mapping:
    """For each device event of a trace what launched its like in the reference.

    Attributes:
        ops: What did.
        op: The number in `ops`, or -1.
        call: Equal for kernels of one call of an op, or -1.
    """

    ops: list[MappedOp]
    op: Ids
    call: Ints


def read_reference(trace: Trace) -> Reference:
    """Take from a trace what it says of launches.

    Raises:
        UnreadableInputError: It has no ops, so there is nothing to carry over.
    """
    if not len(trace.ops) or not len(trace.launches):
        raise UnreadableInputError(
            f"{trace.path}: no CPU ops to map kernels to; give a trace without CUDA graphs or of their capture"
        )
    links = link(trace)
    steps = find_steps(trace, links)
    by_stage = {}
    for stage in Stage:
        chosen = steps.of(stage)
        counts = [int((steps.inside == step).sum()) for step in chosen.tolist()]
        if not counts or not max(counts):
            continue
        typical = chosen[int(np.argsort(counts)[len(counts) // 2])]
        events = np.flatnonzero((steps.inside == typical) & ~links.graph & (links.launch != MISSING))
        events = events[np.argsort(trace.launches.start[links.launch[events]], kind="stable")]
        by_stage[stage] = _launched(trace, links, events)
    return Reference(trace.path, by_stage, _captured(trace, links))


def map_kernels(trace: Trace, links: Links, inside: Ints, stages: Sequence[Stage], reference: Reference) -> Mapping:
    """Find for each kernel of a replay its like in the reference.

    Args:
        trace: The trace with replays.
        links: Its links.
        inside: The step of each device event, or -1.
        stages: The stage of each step.
        reference: What the same server launches without graphs.
    """
    ops: dict[MappedOp, int] = {}
    op = np.full(len(trace.device_events), MISSING, np.int32)
    call = np.full(len(trace.device_events), MISSING, np.int64)
    graph_events = np.flatnonzero(links.graph & (inside != MISSING))
    for number, rows in enumerate(rows_by(links.launch[graph_events]).values()):
        events = graph_events[rows]
        events = events[np.argsort(trace.device_events.start[events], kind="stable")]
        kernels = [_kernel(trace, event) for event in events.tolist()]
        for event, found in zip(events.tolist(), _alike(kernels, stages[inside[events[0]]], reference), strict=True):
            if found is not None:
                op[event] = ops.setdefault(found.by, len(ops))
                call[event] = (number << 32) + found.call
    return Mapping(list(ops), op, call)


def _alike(kernels: list[Kernel], stage: Stage, reference: Reference) -> list[_Launched | None]:
    if len(reference.capture) == len(kernels):
        return list(reference.capture)
    launched = reference.steps.get(stage, [])
    exact = _in_order(kernels, launched, lambda kernel: kernel)
    by_name = _in_order(kernels, launched, lambda kernel: kernel.name)
    # A kernel of the same name on another grid ran on other shapes, but was launched from the same place.
    return [
        found if found is not None else None if similar is None else _without_inputs(similar)
        for found, similar in zip(exact, by_name, strict=True)
    ]


def _in_order(
    kernels: list[Kernel], launched: list[_Launched], key: Callable[[Kernel], Hashable]
) -> list[_Launched | None]:
    """The n-th kernel of a kind is the n-th of its kind in the reference, if there are as many.

    Else it is any of them, if all were launched alike.
    """
    of_kind: dict[Hashable, list[_Launched]] = defaultdict(list)
    for entry in launched:
        if entry.kernel is not None:
            of_kind[key(entry.kernel)].append(entry)
    total: dict[Hashable, int] = defaultdict(int)
    for kernel in kernels:
        total[key(kernel)] += 1
    seen: dict[Hashable, int] = defaultdict(int)
    found: list[_Launched | None] = []
    for kernel in kernels:
        kind = key(kernel)
        alike = of_kind.get(kind, [])
        if len(alike) == total[kind]:
            found.append(alike[seen[kind]])
        else:
            found.append(alike[0] if len({entry.by for entry in alike}) == 1 else None)
        seen[kind] += 1
    return found


def _at(sources: list[Source], number: int) -> Source | None:
    return sources[number] if number != MISSING else None


def _without_inputs(entry: _Launched) -> _Launched:
    return entry._replace(by=entry.by._replace(inputs=None))


def _kernel(trace: Trace, event: int) -> Kernel:
    table = trace.device_events
    grid, block = (extents(trace.values[column[event]]) or [] for column in (table.grid, table.block))
    return Kernel(trace.names[table.name[event]], tuple(grid), tuple(block))


def _launched(trace: Trace, links: Links, events: Ints) -> list[_Launched]:
    return [
        _Launched(
            _kernel(trace, event),
            mapped_op(trace, int(links.op[event]), _at(links.sources, int(links.source[event]))),
            int(links.op[event]) if links.op[event] != MISSING else -2 - event,
        )
        for event in events.tolist()
    ]


def _captured(trace: Trace, links: Links) -> list[_Launched]:
    """The launches of a capture in order: those that led to no device event."""
    calls = np.flatnonzero(kernel_launches(trace))
    calls = calls[~np.isin(calls, links.launch)]
    calls = calls[np.argsort(trace.launches.start[calls], kind="stable")]
    op = enclosing(trace.ops, trace.launches.thread[calls], trace.launches.start[calls])
    source, sources = innermost_sources(trace, calls)
    return [
        _Launched(None, mapped_op(trace, op_row, _at(sources, number)), op_row if op_row != MISSING else -2 - place)
        for place, (op_row, number) in enumerate(zip(op.tolist(), source.tolist(), strict=True))
    ]


def mapped_op(trace: Trace, op: int, source: Source | None) -> MappedOp:
    """What a trace records of one op, by its row (-1 for none), and of the function around it."""
    name, inputs = None, None
    if op != MISSING:
        name = trace.names[trace.ops.name[op]]
        recorded = tensors(*(trace.values[c[op]] for c in (trace.ops.dims, trace.ops.types, trace.ops.strides)))
        inputs = None if recorded is None else tuple(recorded)
    return MappedOp(name, inputs, source)
