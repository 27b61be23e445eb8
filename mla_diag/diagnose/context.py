"""How long the contexts of a trace's requests are: what part of the pool any of them can need.

SGLang keeps a row of KV slots for each request, `req_to_token[requests, longest context]`, and its scheduler cuts a row
to the request's length when it puts the request into the radix cache (sglang/srt/mem_cache/radix_cache.py). With shapes
recorded the trace has those slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mla_diag.diagnose.pool import batch_sizes
from mla_diag.trace.model import SCALARS_OF, Trace

_LONGEST = 1024  # a page table's row is as long as the longest context that the model takes; no other table is so wide


def longest_context(trace: Trace) -> int | None:
    """The longest context of any request that the scheduler cached while the trace was recorded, in tokens."""
    ops = trace.ops
    slices = [number for number, name in enumerate(trace.names) if name in SCALARS_OF]
    rows = {shape[1] for shape in _tables(trace)}
    longest = None
    seen = set(zip(ops.name.tolist(), ops.dims.tolist(), ops.scalars.tolist(), strict=True)) if slices else set()
    for name, dims, scalars in seen:
        if name in slices and (length := _length(trace.values[dims], trace.values[scalars], rows)) is not None:
            longest = max(longest or 0, length)
    return longest


def rows_needed(trace: Trace, step_names: Iterable[str]) -> int | None:
    """The rows of the pool that a step's requests refer to, at most; requests may share some."""
    longest = longest_context(trace)
    sizes = [batch_sizes(name)[0] for name in step_names if batch_sizes(name)]
    if longest is None or not sizes:
        return None
    return round(longest * sum(sizes) / len(sizes))


def _tables(trace: Trace) -> set[tuple[int, int]]:
    """The tables of two dimensions that a row was selected from."""
    selects = [number for number, name in enumerate(trace.names) if name == "aten::select"]
    found = set()
    for name, dims in set(zip(trace.ops.name.tolist(), trace.ops.dims.tolist(), strict=True)):
        shape = _first(trace.values[dims]) if name in selects else None
        if shape is not None and len(shape) == 2 and shape[1] >= _LONGEST:
            found.add((shape[0], shape[1]))
    return found


def _length(dims: bytes, scalars: bytes, rows: set[int]) -> int | None:
    """The end of a slice from 0 of a row of a page table."""
    shape = _first(dims)
    if shape is None or len(shape) != 1 or shape[0] not in rows:
        return None
    try:
        _, _, begin, end, *_ = map(str, msgspec.json.decode(scalars))
        return int(end) if begin == "0" and 1 < int(end) <= shape[0] else None
    except (msgspec.DecodeError, ValueError, TypeError):
        return None


def _first(dims: bytes) -> list[int] | None:
    try:
        return msgspec.convert(msgspec.json.decode(dims)[0], list[int])
    except (msgspec.MsgspecError, IndexError, KeyError, TypeError):
        return None
