"""Tensors read as rows of a KV pool: how many rows one spans, and how wide the whole rows are that it is a part of.

Attention ops are given views as often as whole rows. FlashAttention-3 and FlashInfer's MLA take an MLA row apart, into
the latent `[rows, 1, 512]` and the rope `[rows, 1, 64]`; Triton's values are the latent of its keys; vLLM's keys and
values are halves of one buffer `[blocks, 2, block size, heads, width]`. Such a view's first stride is that of whole
rows. Where no strides were recorded, latent and rope are known by their widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mla_diag.diagnose.ranking import RankedOp

# Latent 512 + rope 64: every MLA model so far (DeepSeek-V2 to V3.2, Kimi-K2, GLM-5).
MLA_WIDTH = 576
_LATENTS_A_ROPE = 8  # the latent is as wide as eight ropes
_ROPE = 64


class Rows(NamedTuple):
    """A tensor as rows.

    Attributes:
        number: Its rows.
        width: Elements that it has of each.
        whole: Elements of the whole row, more than `width` where the tensor is a view of columns.
        row_axes: Its first dimensions, those that number the rows.
    """

    number: int
    width: int
    whole: int
    row_axes: int


@dataclass
class Buffer:
    """Tensors that are of one buffer, by their rows and the width of the whole ones.

    Attributes:
        launches: Launches a step of the ops that were given them.
        deep: Whether one has three dimensions or more.
        columns: The widths of the views among them.
    """

    launches: float = 0.0
    deep: bool = False
    columns: set[int] = field(default_factory=set)

    def take(self, other: Buffer) -> None:
        """Count another's tensors among these."""
        self.launches += other.launches
        self.deep |= other.deep
        self.columns |= other.columns


Buffers = dict[tuple[int, int], Buffer]


def as_rows(shape: Sequence[int], strides: Sequence[int] | None = None) -> Iterator[Rows]:
    """Every way to read a tensor as rows; which one is right, its extents alone do not tell.

    Rows come first, numbered by one dimension, or by pages and the place in a page, in this order, or with the heads in
    between where a page keeps them apart.
    """
    if len(shape) == 5 and 2 in shape[:2]:  # keys and values in one buffer
        yield Rows(math.prod(shape[:3]) // 2, 2 * math.prod(shape[3:]), 2 * math.prod(shape[3:]), 3)
        return
    for axes in range(1, len(shape)):
        count, width = math.prod(shape[:axes]), math.prod(shape[axes:])
        yield Rows(count, width, _whole(shape, strides, axes, width), axes)
    if len(shape) == 4:  # [pages, heads, page size, width]
        yield Rows(shape[0] * shape[2], shape[1] * shape[3], shape[1] * shape[3], 4)


def _whole(shape: Sequence[int], strides: Sequence[int] | None, axes: int, width: int) -> int:
    """Elements from one row to the next, on average over a page."""
    if not strides or len(strides) != len(shape) or not math.prod(shape[1:axes]):
        return width
    return max(width, strides[0] // math.prod(shape[1:axes]))


def buffers(ops: Iterable[RankedOp], is_row: Callable[[Rows, Sequence[int]], bool]) -> Buffers:
    """The buffers that ops were given, whole or in part, by rows and width.

    Args:
        ops: The ops.
        is_row: Whether a tensor of this shape may be read so.
    """
    found: Buffers = {}
    for row in ops:
        seen: Buffers = {}
        for tensor in row.inputs or ():
            for rows in as_rows(tensor.shape, tensor.strides):
                if is_row(rows, tensor.shape):
                    buffer = seen.setdefault((rows.number, rows.whole), Buffer(row.op.launches_per_step))
                    buffer.deep |= len(tensor.shape) > 2
                    buffer.columns |= {rows.width} - {rows.whole}
        for key, buffer in seen.items():
            found.setdefault(key, Buffer()).take(buffer)
    return _joined(found)


def _joined(found: Buffers) -> Buffers:
    """The same with the columns of a row counted for the whole row."""
    joined: Buffers = {}
    for (count, width), buffer in found.items():
        target = _whole_row(count, width, found)
        into = joined.setdefault(target, Buffer())
        into.take(buffer)
        if target[1] != width:
            # Pages of the latent only are as many columns of each row as a page has of them.
            into.columns.add(width * count // target[0])
    return joined


def _whole_row(count: int, width: int, found: Buffers) -> tuple[int, int]:
    """Rows and width of the buffer that tensors of some width are columns of: themselves where they are none."""
    for (rows, other), buffer in found.items():
        if rows == count and other > width and width in buffer.columns:
            return rows, other
    for rope in (width, width // _LATENTS_A_ROPE):
        both = {(count, rope), (count, rope * _LATENTS_A_ROPE)}
        if rope and rope % _ROPE == 0 and both <= found.keys():
            return count * (rope // _ROPE), MLA_WIDTH
    # Triton's values are the latent; its keys are whole.
    if width in (_ROPE, _ROPE * _LATENTS_A_ROPE) and (count, MLA_WIDTH) in found:
        return count, MLA_WIDTH
    return count, width
