"""The KV pool: how many rows it has and how wide they are, from whatever gives it away.

SGLang's pools are one buffer a layer, `[rows, heads, width]`: MLA's `[rows, 1, latent + rope]` (MLATokenToKVPool in
sglang/srt/mem_cache/memory_pool.py), with a page of padding past `max_total_num_tokens`. vLLM's are
`[blocks, block size, heads, width]`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mla_diag.diagnose.diagnosis import Op
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.thresholds import FLAT_POOL_ROWS, POOL_ROWS

# Latent 512 + rope 64: every MLA model so far (DeepSeek-V2 to V3.2, Kimi-K2, GLM-5).
MLA_WIDTH = 576
MLA_HEADS = 128
# The pool is copied alike in every layer; a model may have a few of another kind.
_SAME_SIZE = 0.8

_MATRIX_PRODUCT = re.compile(r"(?:^|::)_?(?:mm|bmm|addmm|baddbmm|linear|matmul|scaled_mm)$|gemm", re.IGNORECASE)
_BATCH = re.compile(r"\b(?:bs|toks|raw_bs)=(\d+)")


@dataclass(frozen=True)
class Pool:
    """One layer's buffer of a KV pool.

    Attributes:
        rows: Tokens it holds, padding included.
        width: Elements a row.
        source: `server-info`, `recurrence` (a first dimension that recurs over layers and steps and is no batch's), or
            `geometry` (launches before each layer's attention that do not follow the batch).
        confidence: `high`, `medium` or `low`.
    """

    rows: int
    width: int
    source: str
    confidence: str

    @property
    def elements(self) -> int:
        """Elements of one layer's buffer."""
        return self.rows * self.width

    def held_by(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape spans every row of the pool: its first dimension, or blocks by block size."""
        return any(rows == self.rows and width >= 1 for rows, width in _as_rows(shape))


def batch_sizes(step_name: str) -> list[int]:
    """The requests, and for a prefill the tokens, that a step's name gives: `step[EXTEND bs=2 toks=128]`."""
    return [int(number) for number in _BATCH.findall(step_name)]


def find_pool(ops: Iterable[Op], step_names: Iterable[str], server: ServerInfo | None) -> Pool | None:
    """The pool that ops of some steps work on, from the shapes of their inputs.

    Args:
        ops: Ops of every stage of one trace.
        step_names: The names of their steps, which tell the batch.
        server: What the server says, if it was asked.
    """
    ops = list(ops)
    names = list(step_names)
    batch = {number for name in names for number in batch_sizes(name)}
    return _by_server(ops, server, batch) or _by_recurrence(ops, batch, len(names)) or _said_by_server(server)


def _by_server(ops: Sequence[Op], server: ServerInfo | None, batch: set[int]) -> Pool | None:
    """The width of the rows of the server's pool, by the tensors of that many rows; None where there are none."""
    if server is None or server.pool_rows is None:
        return None
    rows = {server.pool_rows, server.pool_tokens} - batch
    widths: Counter[tuple[int, int]] = Counter()
    for op in ops:
        for shape in op.shapes or []:
            for count, width in _as_rows(shape):
                if count in rows and width >= 1 and len(shape) > 1:
                    widths[count, width] += round(op.launches_per_step * 1000)
    if not widths:
        return None
    count, width = widths.most_common(1)[0][0]
    return Pool(count, width, "server-info", "high")


def _said_by_server(server: ServerInfo | None) -> Pool | None:
    """The server's pool where no tensor shows it, as under CUDA graphs; with the width that every MLA model has."""
    if server is None or server.pool_rows is None:
        return None
    return Pool(server.pool_rows, MLA_WIDTH, "server-info", "medium")


def _by_recurrence(ops: Sequence[Op], batch: set[int], steps: int) -> Pool | None:
    """The pool is what recurs in every step, is no batch's size, and is never multiplied with a matrix.

    Activations have as many rows as the batch has tokens, and are multiplied with weights; weights are multiplied too.
    What is left with three dimensions or more is the pool; of two it is one only with MLA's width and more rows than
    any weight has.
    """
    multiplied = {
        extent for op in ops if _MATRIX_PRODUCT.search(op.op or "") for shape in op.shapes or [] for extent in shape
    }
    seen: dict[tuple[int, int], float] = defaultdict(float)
    deep: Counter[tuple[int, int]] = Counter()
    for op in ops:
        for rows, width, dimensions in set(_candidates(op)):
            if rows in batch or rows in multiplied or width < 1:
                continue
            seen[rows, width] += op.launches_per_step
            deep[rows, width] += dimensions >= 3 or (width == MLA_WIDTH and rows >= FLAT_POOL_ROWS)
    recurring = {key: count for key, count in seen.items() if count >= 1 and count * steps >= 2 and deep[key]}
    if not recurring:
        return None
    rows, width = max(recurring, key=lambda key: (recurring[key] * key[0] * key[1], key))
    return Pool(rows, width, "recurrence", "high" if batch else "medium")


def pool_from_geometry(copies: Sequence[int], step_names: Iterable[str]) -> Pool | None:
    """The pool that copies of so many elements each are of, if they cannot be of the batch.

    Args:
        copies: Elements of the copy before each attention kernel, rounded up to a block, which is less than a row.
        step_names: The names of the steps, which tell the batch; without one nothing can be told from geometry alone.
    """
    batch = [number for name in step_names for number in batch_sizes(name)]
    if not batch or len(copies) < 2:
        return None
    size, count = Counter(copies).most_common(1)[0]
    largest_query = max(batch) * MLA_HEADS * MLA_WIDTH
    if count < _SAME_SIZE * len(copies) or size < POOL_ROWS * MLA_WIDTH or size <= largest_query:
        return None
    return Pool(size // MLA_WIDTH, MLA_WIDTH, "geometry", "medium")


def _candidates(op: Op) -> Iterator[tuple[int, int, int]]:
    for shape in op.shapes or []:
        for rows, width in _as_rows(shape):
            if rows >= POOL_ROWS:
                yield rows, width, len(shape)


def _as_rows(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A tensor as rows and their width; one of four dimensions or more may be blocks of rows."""
    if len(shape) >= 2:
        yield shape[0], math.prod(shape[1:])
    if len(shape) >= 4:
        yield shape[0] * shape[1], math.prod(shape[2:])
