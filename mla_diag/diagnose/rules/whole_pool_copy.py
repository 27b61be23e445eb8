"""whole-pool-copy: an op that reads and writes every row of the KV pool, whatever rows the requests need.

SGLang's MLA backends cast the FP8 pool to the query's type before attention, in every layer of every step
(sglang#35291); others make it contiguous (sglang#34525), slice and concatenate it (tt-xla#4197), or convert it beside
attention (vllm#35695). The type need not change, and the copy need not be fast: the first runs at a fifth of
the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mla_diag.diagnose.attention import AttentionCopy
from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.cause import infer_pool_copy_cause
from mla_diag.diagnose.context import rows_needed
from mla_diag.diagnose.diagnosis import Cause, Finding, Op
from mla_diag.diagnose.geometry import Elements, converts, elements
from mla_diag.diagnose.pool import Pool
from mla_diag.diagnose.ranking import RankedOp
from mla_diag.diagnose.thresholds import NARROWEST_ROW, WHOLE_POOL

KIND = "whole-pool-copy"

# Ops that move every element of the tensors they are given.
_WHOLE = {"copy_", "clone", "contiguous", "_to_copy", "to", "flip", "roll", "repeat", "index_fill"}
# Ops that move the rows that their index names, and those that move the elements.
_BY_ROW = {"index_select", "embedding"}
_BY_ELEMENT = {"gather", "take_along_dim"}


@dataclass(frozen=True)
class _Copy:
    """One row of the ranking that copies the pool.

    Attributes:
        row: The row.
        pool: The pool.
        width: Elements that it copies of each row.
        elements: Elements that one call copies.
        calls: Calls a step.
        from_geometry: Whether those are by the launch's geometry, right to within a block.
        cause: The function that does it.
        confidence: How sure it is that this is the pool.
    """

    row: RankedOp
    pool: Pool
    width: int
    elements: int
    calls: float
    from_geometry: bool
    cause: Cause | None
    confidence: str


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for each function and pool that it copies in this stage."""
    copies: dict[tuple[Cause | None, Pool], list[_Copy]] = {}
    for copy in [*_by_shape(case), *_by_place(case)]:
        copies.setdefault((copy.cause, copy.pool), []).append(copy)
    for alike in copies.values():
        yield _finding(case, alike)


def _by_shape(case: StageCase) -> Iterator[_Copy]:
    """Rows whose op was given a pool and copies half of its rows or more."""
    for row in case.ranked:
        of_pools = ((pool, _held(row.op, pool)) for pool in case.pools)
        pool, held = next((pair for pair in of_pools if pair[1]), (None, []))
        if pool is None:
            continue
        width = _width(row.op, pool, held)
        copied = _copied_elements(row.op, pool, held)
        if copied is None or copied < WHOLE_POOL * pool.rows * width:
            continue
        cause = cause_of(row.op)
        if cause is None:
            before = case.attention_copies
            cause = next((_infer(case, before[event]) for event in row.events.tolist() if event in before), None)
        yield _Copy(row, pool, width, copied, row.op.calls_per_step, False, cause, pool.confidence)


def _held(op: Op, pool: Pool) -> list[tuple[int, int]]:
    """The tensors of an op that may be the pool or views of it: their places, and the elements of a row of each."""
    widths = [(place, pool.held_by(shape)) for place, shape in enumerate(op.shapes or [])]
    return [(place, width) for place, width in widths if width is not None]


def _width(op: Op, pool: Pool, held: list[tuple[int, int]]) -> int:
    """The elements of each row of the pool that an op was given: of two tensors they are the same, except to join."""
    widths = [width for _, width in held]
    return min(sum(widths), pool.width) if _name(op) == "cat" else max(widths)


def _name(op: Op) -> str:
    return (op.op or "").rpartition("::")[2]


def _copied_elements(op: Op, pool: Pool, held_at: list[tuple[int, int]]) -> int | None:
    """Elements of the pool that a call of the op copies, or None if it copies none of it."""
    name = _name(op)
    shapes = op.shapes or []
    held = [shapes[place] for place, _ in held_at]
    if name == "cat":
        return sum(map(math.prod, held))
    if name in _WHOLE:
        return max(map(math.prod, held))
    return _indexed_elements(op, name, pool, held[0])


def _indexed_elements(op: Op, name: str, pool: Pool, table: list[int]) -> int | None:
    """Elements of the pool that an op's index names, or None if it has none."""
    row = math.prod(table[1:])
    shapes = op.shapes or []
    if name in _BY_ROW | _BY_ELEMENT and len(shapes) > 1:
        named = math.prod(shapes[1]) * (row if name in _BY_ROW else 1)
        return named if pool.held_by(shapes[0]) else None
    if name != "index":
        return None
    # The indices of this one are not recorded; it launches a thread for each element, or a block for each row.
    use = op.kernels[0]
    handled = elements(use.kernel, use.grid, use.block)
    if handled is not None:
        return handled.most
    return use.grid[0] * row if use.grid and "gather" in use.kernel else None


def _by_place(case: StageCase) -> Iterator[_Copy]:
    """Rows without shapes: copies as large as a pool right before the attention of each layer."""
    if not case.pools:
        return
    least = WHOLE_POOL * case.pools[0].elements
    large = {
        event: copy
        for event, copy in case.attention_copies.items()
        if copy.elements.most >= least or _pool_of(case.pools, copy.elements) is not None
    }
    for row in case.ranked:
        if row.op.shapes is not None:
            continue
        placed = [large[event] for event in row.events.tolist() if event in large]
        if 2 * len(placed) > len(row.events):
            copied, kernels = _one_call(case, row, placed[0])
            pool = _pool_of(case.pools, copied) or _like(case.pools[0], copied)
            cause = cause_of(row.op) or _infer(case, placed[0])
            calls = row.op.launches_per_step / kernels
            yield _Copy(row, pool, pool.width, copied.most, calls, True, cause, pool.confidence)


def _one_call(case: StageCase, row: RankedOp, copy: AttentionCopy) -> tuple[Elements, int]:
    """What one call of a copy handles, and in how many kernels.

    Kernels that handle a pool each copy one each, as of keys and of values; others are parts of one copy.
    """
    use = row.op.kernels[0]
    own = elements(use.kernel, use.grid, use.block)
    if own is not None and _pool_of(case.pools, own) is not None:
        return own, 1
    return copy.elements, len(copy.events)


def _pool_of(pools: list[Pool], copied: Elements) -> Pool | None:
    """The pool that has so many elements."""
    return next((pool for pool in pools if copied.may_be(pool.elements)), None)


def _like(pool: Pool, copied: Elements) -> Pool:
    """A pool of as many rows as another that has so many elements; the other, and hardly sure, if none has."""
    width = copied.most // pool.rows
    if width >= NARROWEST_ROW and copied.may_be(width * pool.rows):
        return Pool(pool.rows, width, "geometry", "medium")
    return replace(pool, confidence="low")


def _infer(case: StageCase, copy: AttentionCopy) -> Cause | None:
    kernel = case.trace.names[case.trace.device_events.name[copy.attention]]
    return infer_pool_copy_cause(kernel, case.report.stage, case.server)


def _finding(case: StageCase, copies: list[_Copy]) -> Finding:
    ops = [copy.row.op for copy in copies]
    cost = sum(op.ms_per_step for op in ops)
    share = sum(op.share for op in ops)
    calls = sum(copy.calls for copy in copies)
    known = [op for op in ops if op.bytes_per_launch is not None]
    moved = sum((op.bytes_per_launch or 0) * op.launches_per_step for op in known) if len(known) == len(ops) else None
    rate = None if moved is None or not cost else moved / (cost / 1e3)
    first = copies[0]
    pool = first.pool
    needed = rows_needed(case.trace, _names_of_steps(case))
    dtypes = first.row.op.dtypes
    # Only this op is given both: the other tensor of a selection is its index.
    if _name(first.row.op) == "copy_" and dtypes and len(set(dtypes)) == 2:
        change = f"converted from {dtypes[1]} to {dtypes[0]}"
    else:
        change = "converted" if converts(first.row.op.kernel) else "copied"
    return case.finding(
        KIND,
        f"{_what(pool, copies)}, is {change} {calls:,.6g} times a step: "
        f"{cost:.1f} of {case.report.device_ms_per_step:.1f} ms",
        cost_ms=cost,
        share=share,
        evidence={
            "op": first.row.op.op,
            "kernel": first.row.op.kernel,
            "shapes": first.row.op.shapes,
            "dtypes": dtypes,
            "pool_rows": pool.rows,
            "pool_width": pool.width,
            "pool_source": pool.source,
            "elements_per_call": first.elements,
            "elements_source": "geometry" if first.from_geometry else "shapes",
            "calls_per_step": calls,
            "launches_per_step": sum(op.launches_per_step for op in ops),
            "bytes_per_launch": first.row.op.bytes_per_launch,
            "bytes_per_step": None if moved is None else round(moved),
            "bytes_source": first.row.op.bytes_source,
            "bytes_per_second": None if rate is None else round(rate),
            "peak_bytes_per_second": case.gpu.bandwidth,
            "bandwidth_share": None if rate is None or not case.gpu.bandwidth else rate / case.gpu.bandwidth,
            "rows_needed": needed,
            "rows_needed_share": None if needed is None else min(needed / pool.rows, 1.0),
            "saves_ms_per_step": cost,
        },
        detail=_detail(case, pool, first, moved, rate, needed),
        cause=first.cause,
        remedy=_remedy(change),
        confidence=min((copy.confidence for copy in copies), key=("low", "medium", "high").index),
    )


def _what(pool: Pool, copies: list[_Copy]) -> str:
    """What is copied: latent and rope one by one are the whole row, as they are together."""
    whole = f"the whole KV pool, {pool.rows:,} rows of {pool.width}"
    width = sum({copy.width for copy in copies})
    return whole if width >= pool.width else f"a slice of {width} of {whole}"


def _names_of_steps(case: StageCase) -> list[str]:
    return [name for name, count in case.report.step_names.items() for _ in range(count)]


def _detail(
    case: StageCase, pool: Pool, first: _Copy, moved: float | None, rate: float | None, needed: int | None
) -> str:
    parts = []
    if moved is not None and rate is not None:
        least = "at least " if first.row.op.bytes_source == "geometry-least" else ""
        parts.append(f"{least}{moved / 1e9:.1f} GB a step at {rate / 1e9:,.0f} GB/s")
        if case.gpu.bandwidth:
            parts[-1] += f", {rate / case.gpu.bandwidth:.0%} of the bandwidth of this {case.gpu.name}"
    if needed is not None:
        parts.append(f"the requests need {needed:,} of the {pool.rows:,} rows at most ({needed / pool.rows:.1%})")
    return "; ".join(parts)


def _remedy(change: str) -> str:
    if change == "copied":
        return "read the pool where it lies, or copy only the rows that the requests refer to"
    return (
        "`mla-diag fix --apply` makes attention read the pool as it is; without it, "
        "`--attention-backend flashmla --page-size 64` does not copy, nor does a BF16 pool, which holds half as much"
    )
