"""slow-copy: an op that only moves data, far slower than the card moves data.

Strided reads, a few elements a thread, or too few blocks: the copy is limited by how it is written, not by memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mla_diag.diagnose.attention import is_copy
from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.diagnosis import Finding, Op, Source
from mla_diag.diagnose.geometry import elements
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.pool import Pool
from mla_diag.diagnose.thresholds import (
    COPY_RATE,
    SLOW_COPY_MICROSECONDS,
    SLOW_COPY_RATE,
    SLOW_COPY_SHARE,
    WHOLE_POOL,
)

KIND = "slow-copy"

_MOVES = {"copy_", "clone", "contiguous", "_to_copy", "to", "cat", "_cat", "stack", "repeat"}


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for each op and function that copies slowly; none on a card whose bandwidth is not known."""
    peak = case.gpu.bandwidth
    if peak is None:
        return
    groups: dict[tuple[str, Source | None], list[Op]] = {}
    for row in case.ranked:
        op = row.op
        if _is_slow(op, peak) and _moves_only(op) and not _moves_pool(op, case.pools):
            groups.setdefault((op.op or op.kernel, op.source), []).append(op)
    for ops in groups.values():
        cost = sum(op.ms_per_step - _moved(op) / (COPY_RATE * peak) * 1e3 for op in ops)
        if cost >= SLOW_COPY_SHARE * case.report.device_ms_per_step:
            yield _finding(case, ops, peak, cost)


def _moved(op: Op) -> float:
    """Bytes a step."""
    return (op.bytes_per_launch or 0) * op.launches_per_step


def _is_slow(op: Op, peak: float) -> bool:
    # A lower bound of the bytes would make a lower bound of the rate, which may be slow only by name.
    if op.bytes_per_launch is None or op.bytes_source == "geometry-least" or not op.ms_per_step:
        return False
    if op.bytes_per_launch < peak * SLOW_COPY_MICROSECONDS / 1e6:
        return False
    return _moved(op) / (op.ms_per_step / 1e3) < SLOW_COPY_RATE * peak


def _moves_only(op: Op) -> bool:
    if op.kernel.startswith("Memcpy"):
        return "DtoD" in op.kernel or "Device -> Device" in op.kernel  # the others are limited by the host's link
    if op.op is None:
        return is_copy(op.kernel)
    return op.op.rpartition("::")[2] in _MOVES


def _moves_pool(op: Op, pools: list[Pool]) -> bool:
    """Whether this is whole-pool-copy's to blame, or may be."""
    if op.shapes is not None:
        return any(pool.spanned_by(shape) for pool in pools for shape in op.shapes)
    sizes = [elements(use.kernel, use.grid, use.block) for use in op.kernels]
    least = min((WHOLE_POOL * pool.elements for pool in pools), default=math.inf)
    return any(size is not None and size.most >= least for size in sizes)


def _finding(case: StageCase, ops: list[Op], peak: float, cost: float) -> Finding:
    first = ops[0]
    name = first.op or short_kernel_name(first.kernel)
    biggest = max(first.shapes or [[]], key=math.prod)
    moved, spent = sum(map(_moved, ops)), sum(op.ms_per_step for op in ops)
    launches, rate = sum(op.launches_per_step for op in ops), moved / (spent / 1e3)
    return case.finding(
        KIND,
        f"{name}{f' of {biggest}' if biggest else ''} moves {moved / 1e9:.3g} GB a step at {rate / 1e12:.2f} TB/s, "
        f"{rate / peak:.0%} of what the card does: {spent:.2f} of {case.report.device_ms_per_step:.1f} ms",
        detail=f"{launches:,.6g} launches a step, which at the rate of a good copy would take {spent - cost:.2f} ms",
        cost_ms=cost,
        share=cost / case.report.device_ms_per_step,
        evidence={
            "op": first.op,
            "kernel": first.kernel,
            "shapes": first.shapes,
            "dtypes": first.dtypes,
            "distinct_shapes": len(ops),
            "launches_per_step": launches,
            "ms_per_step": spent,
            "ms_per_step_at_full_rate": spent - cost,
            "bytes_per_launch": round(moved / launches),
            "bytes_source": first.bytes_source,
            "bytes_per_second": round(rate),
            "peak_bytes_per_second": peak,
            "bandwidth_share": rate / peak,
        },
        cause=cause_of(first),
        remedy=(
            "avoid the copy: let the op that reads it take the strided tensor, or write it in place from the start; "
            "else copy in the order of the memory, so that neighbouring threads touch neighbouring bytes"
        ),
        confidence="medium" if first.bytes_source == "geometry" else "high",
    )
