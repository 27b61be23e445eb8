"""The KV pool: how many rows it has and how wide they are, from whatever gives it away.

SGLang's pools are one buffer a layer, `[rows, heads, width]`: MLA's `[rows, 1, latent + rope]` (MLATokenToKVPool in
sglang/srt/mem_cache/memory_pool.py), with a page of padding past `max_total_num_tokens`. vLLM's are
`[blocks, block size, heads, width]`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mla_diag.diagnose.geometry import Elements
from mla_diag.diagnose.pool_shapes import MLA_WIDTH, Buffers, Rows, as_rows, buffers
from mla_diag.diagnose.ranking import RankedOp
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.thresholds import FLAT_POOL_ROWS, NARROWEST_ROW, POOL_ROWS

MLA_HEADS = 128
# The pool is copied alike in every layer; a model may have a few of another kind.
_SAME_SIZE = 0.8

_MATRIX_PRODUCT = re.compile(r"(?:^|::)_?(?:mm|bmm|addmm|baddbmm|linear|matmul)$|gemm|scaled_mm|_matmul", re.IGNORECASE)
_BATCH = re.compile(r"\b(?:bs|toks|raw_bs)=(\d+)")


@dataclass(frozen=True)
class Pool:
    """One layer's buffer of a KV pool.

    Attributes:
        rows: Tokens it holds, padding included.
        width: Elements of a whole row.
        source: `server-info`, `recurrence` (a first dimension that recurs over layers and steps and is no batch's), or
            `geometry` (launches before each layer's attention that do not follow the batch).
        confidence: `high`, `medium` or `low`.
        columns: Widths of the views of it that ops were given, such as an MLA row's latent and rope.
    """

    rows: int
    width: int
    source: str
    confidence: str
    columns: frozenset[int] = frozenset()

    @property
    def elements(self) -> int:
        """Elements of one layer's buffer."""
        return self.rows * self.width

    def spanned_by(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has as many rows, of whatever width, or is the pool in another order."""
        return self.held_by(shape) is not None or any(rows.number == self.rows for rows in as_rows(shape))

    def held_by(self, shape: Sequence[int]) -> int | None:
        """The elements of each row that a tensor of this shape has, if it may be the pool or a view of all its rows.

        As many elements as the pool has are the pool flattened or transposed.
        """
        if math.prod(shape) == self.elements:
            return self.width
        widths = [rows.width for rows in as_rows(shape) if rows.number == self.rows]
        return next((width for width in widths if width == self.width or width in self.columns), None)


def batch_sizes(step_name: str) -> list[int]:
    """The requests, and for a prefill the tokens, that a step's name gives: `step[EXTEND bs=2 toks=128]`."""
    return [int(number) for number in _BATCH.findall(step_name)]


def find_pools(ops: Iterable[RankedOp], step_names: Iterable[str], server: ServerInfo | None) -> list[Pool]:
    """The pools that ops of some steps work on, from the shapes of their inputs, that of most of the work first.

    The others have as many rows, or those that the server says without the padding: a draft model's, values beside
    wider keys, an index beside the latents. SGLang gives all of them the slots of one allocator.

    Args:
        ops: Ops of every stage of one trace.
        step_names: The names of their steps, which tell the batch.
        server: What the server says, if it was asked.
    """
    ops = list(ops)
    names = list(step_names)
    batch = {number for name in names for number in batch_sizes(name)}
    return _by_server(ops, server, batch) or _by_recurrence(ops, batch, len(names)) or _said_by_server(server, batch)


def _by_server(ops: Sequence[RankedOp], server: ServerInfo | None, batch: set[int]) -> list[Pool]:
    """The server's pool as wide as the tensors of that many rows; none where there are none."""
    if server is None or server.pool_rows is None:
        return []
    rows = {server.pool_rows, server.pool_tokens} - batch
    found = buffers(ops, lambda found, shape: found.number in rows and found.width >= NARROWEST_ROW)
    return _pools(found, "server-info", "high")


def _said_by_server(server: ServerInfo | None, batch: set[int]) -> list[Pool]:
    """The server's pool where no tensor shows it, as under CUDA graphs; with the width that every MLA model has."""
    if server is None or server.pool_rows is None or server.pool_rows in batch:
        return []
    return [Pool(server.pool_rows, MLA_WIDTH, "server-info", "medium")]


def _by_recurrence(ops: Sequence[RankedOp], batch: set[int], steps: int) -> list[Pool]:
    """The pool is what recurs in every step, is no batch's size, and is never multiplied with a matrix.

    Activations have as many rows as the batch has tokens, and are multiplied with weights; weights are multiplied too.
    What is left with three dimensions or more is the pool; of two it is one only with MLA's width and more rows than
    any weight has.
    """
    multiplied = {
        extent
        for row in ops
        if _MATRIX_PRODUCT.search(row.op.op or "")
        for tensor in row.inputs or ()
        for extent in tensor.shape
    }
    none = batch | multiplied

    def is_row(rows: Rows, shape: Sequence[int]) -> bool:
        if rows.row_axes == len(shape) - 1 > 1:
            # The last dimension alone is a row only of MLA's pages: others have their heads before it.
            pages = math.prod(shape[:-2])
            if rows.whole != MLA_WIDTH or pages in none or pages < POOL_ROWS:
                return False
        return rows.row_axes < len(shape) and rows.number >= POOL_ROWS and rows.number not in none and rows.width > 0

    found = {
        (rows, width): buffer
        for (rows, width), buffer in buffers(ops, is_row).items()
        if buffer.launches >= 1 and buffer.launches * steps >= 2
    }
    # What is flat is a pool where it has as many rows as one that is deep.
    sure = {
        rows
        for (rows, width), buffer in found.items()
        if buffer.deep or (width == MLA_WIDTH and rows >= FLAT_POOL_ROWS)
    }
    wide = {
        (rows, width): buffer
        for (rows, width), buffer in found.items()
        if rows in sure and (buffer.deep or width >= NARROWEST_ROW)
    }
    pools = _pools(wide, "recurrence", "high" if batch else "medium")
    return [pool for pool in pools if pool.rows == pools[0].rows]


def _pools(found: Buffers, source: str, confidence: str) -> list[Pool]:
    """Buffers as pools: first those of most rows, and of these what the launches on them would move most of.

    The keys of a cached prefix have fewer rows than the pool that they come from, and in many heads more elements.
    """
    ordered = sorted(found, key=lambda key: (key[0], found[key].launches * key[1], key[1]), reverse=True)
    return [Pool(*key, source, confidence, frozenset(found[key].columns)) for key in ordered]


def pool_from_geometry(copies: Sequence[Elements], step_names: Iterable[str], server: ServerInfo | None) -> Pool | None:
    """The pool that copies of so many elements each are of, if they cannot be of the batch.

    Args:
        copies: The copy before each attention kernel.
        step_names: The names of the steps, which tell the batch; without one nothing can be told from geometry alone.
        server: What the server says, whose rows tell the width.
    """
    batch = [number for name in step_names for number in batch_sizes(name)]
    if not batch or len(copies) < 2:
        return None
    copied, count = Counter(copies).most_common(1)[0]
    largest_query = max(batch) * MLA_HEADS * MLA_WIDTH
    if count < _SAME_SIZE * len(copies) or copied.most < POOL_ROWS * MLA_WIDTH or copied.most <= largest_query:
        return None
    rows = None if server is None else server.pool_rows
    if rows is not None and copied.most >= NARROWEST_ROW * rows and copied.may_be(copied.most // rows * rows):
        return Pool(rows, copied.most // rows, "geometry", "medium")
    return Pool(copied.most // MLA_WIDTH, MLA_WIDTH, "geometry", "medium")
