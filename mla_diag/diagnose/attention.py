"""Attention kernels, and the copies that are launched for each: what tells a pool apart where no shapes are recorded.

Under CUDA graphs the copy of a pool is a kernel of many blocks, as a weight's conversion would be. What gives it away
is its place: once a layer, right before the attention that reads it, and as large whatever the batch is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mla_diag.diagnose.geometry import Elements, elements, extents
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.trace.columns import Ints
from mla_diag.trace.model import DeviceKind, Trace

_ATTENTION = re.compile(
    r"attention|attn|flash_?fwd|fmha|flash_?mla|mla_?decode|_fwd_grouped_kernel|_fwd_kernel|BatchMLA|PrefillWithKVCache"
    r"|BatchDecodeWithPaged|batch_prefill|batch_decode",
    re.IGNORECASE,
)
# Writes into the pool and preparations, which have attention in their names and are not it.
_NOT_ATTENTION = re.compile(
    r"set_mla|kv_buffer|reshape_and_cache|store_k|indices|prepare|combine|merge_state|rope|norm|reduce_kernel",
    re.IGNORECASE,
)
_COPY = re.compile(r"copy_kernel|CatArray|dequant|convert|index_elementwise|\bgather", re.IGNORECASE)
# Between a copy and its attention the library plans its work.
_KERNELS_BETWEEN = 3


@dataclass(frozen=True)
class AttentionCopy:
    """The copies launched right before one attention kernel.

    Attributes:
        attention: Row of the attention kernel among the trace's device events.
        events: Rows of the copies: several where one copy is split into kernels.
        elements: What they handle together, right to within a block each.
    """

    attention: int
    events: list[int]
    elements: Elements


@lru_cache(maxsize=65536)
def is_attention(kernel: str) -> bool:
    """Whether a kernel computes attention, by its name."""
    name = short_kernel_name(kernel)
    return bool(_ATTENTION.search(name)) and not _NOT_ATTENTION.search(name)


@lru_cache(maxsize=65536)
def is_copy(kernel: str) -> bool:
    """Whether a kernel only moves or converts what it reads, by its name."""
    return bool(_COPY.search(short_kernel_name(kernel)))


def copies_before_attention(trace: Trace, events: Ints) -> list[AttentionCopy]:
    """For each attention kernel among some device events the copies right before it on its stream.

    Only kernels of PyTorch's whose geometry tells how much they handle are found.
    """
    table = trace.device_events
    attention = np.array([is_attention(name) for name in trace.names] or [False])
    copy = np.array([is_copy(name) for name in trace.names] or [False])
    cache: dict[tuple[int, ...], Elements | None] = {}
    found = []
    for stream in np.unique(table.stream[events]).tolist():
        on_stream = events[table.stream[events] == stream]
        ordered = on_stream[np.argsort(table.start[on_stream], kind="stable")]
        names = table.name[ordered]
        kernels = table.kind[ordered] == DeviceKind.KERNEL
        is_copied = (copy[names] & kernels).tolist()
        for place in np.flatnonzero(attention[names] & kernels).tolist():
            rows = _run_before(place, is_copied)
            sizes = [_handled(trace, row, cache) for row in ordered[rows].tolist()]
            known = [size for size in sizes if size is not None]
            if known and len(known) == len(sizes):
                together = Elements(sum(size.most for size in known), sum(size.block for size in known))
                found.append(AttentionCopy(int(ordered[place]), ordered[rows].tolist(), together))
    return found


def _handled(trace: Trace, event: int, cache: dict[tuple[int, ...], Elements | None]) -> Elements | None:
    """The elements of one launch; the same kernel is launched alike in every layer and step."""
    table = trace.device_events
    key = tuple(int(column[event]) for column in (table.name, table.grid, table.block))
    if key not in cache:
        grid, block = extents(trace.values[key[1]]), extents(trace.values[key[2]])
        cache[key] = elements(trace.names[key[0]], grid, block)
    return cache[key]


def _run_before(place: int, copy: Sequence[bool]) -> list[int]:
    """The unbroken run of copies that ends at most a few kernels before a place."""
    last = next((at for at in range(place - 1, max(place - 2 - _KERNELS_BETWEEN, -1), -1) if copy[at]), None)
    if last is None:
        return []
    first = last
    while first > 0 and copy[first - 1]:
        first -= 1
    return list(range(first, last + 1))
