"""slow-copy: an op that only moves data, far slower than the card moves data.

Strided reads, a few elements a thread, or too few blocks: the copy is limited by how it is written, not by memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mla_diag.diagnose.attention import is_copy
from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.diagnosis import Finding, Op
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
    """One finding for each row of the ranking that is a slow copy; none on a card whose bandwidth is not known."""
    peak = case.gpu.bandwidth
    if peak is None:
        return
    for row in case.ranked:
        op = row.op
        # A lower bound of the bytes would make a lower bound of the rate, which may be slow only by name.
        if op.bytes_per_launch is None or op.bytes_source == "geometry-least" or not op.ms_per_step:
            continue
        if op.bytes_per_launch < peak * SLOW_COPY_MICROSECONDS / 1e6:
            continue
        if not _moves_only(op) or _moves_pool(op, case.pool):
            continue
        moved = op.bytes_per_launch * op.launches_per_step
        rate = moved / (op.ms_per_step / 1e3)
        cost = op.ms_per_step - moved / (COPY_RATE * peak) * 1e3
        share = cost / case.report.device_ms_per_step
        if rate < SLOW_COPY_RATE * peak and share >= SLOW_COPY_SHARE:
            yield _finding(case, op, moved, rate, peak, cost, share)


def _moves_only(op: Op) -> bool:
    if op.kernel.startswith("Memcpy"):
        return "DtoD" in op.kernel or "Device -> Device" in op.kernel  # the others are limited by the host's link
    if op.op is None:
        return is_copy(op.kernel)
    return op.op.rpartition("::")[2] in _MOVES


def _moves_pool(op: Op, pool: Pool | None) -> bool:
    """Whether this is whole-pool-copy's to blame, or may be."""
    if pool is None:
        return False
    if op.shapes is not None:
        return any(pool.held_by(shape) for shape in op.shapes)
    sizes = [elements(use.kernel, use.grid, use.block) for use in op.kernels]
    return any(size is not None and size.most >= WHOLE_POOL * pool.elements for size in sizes)


def _finding(case: StageCase, op: Op, moved: float, rate: float, peak: float, cost: float, share: float) -> Finding:
    name = op.op or short_kernel_name(op.kernel)
    biggest = max(op.shapes or [[]], key=math.prod)
    of_shape = f" of {biggest}" if biggest else ""
    return case.finding(
        KIND,
        f"{name}{of_shape} moves {moved / 1e9:.3g} GB a step at {rate / 1e12:.2f} TB/s, {rate / peak:.0%} of what the "
        f"card does: {op.ms_per_step:.2f} of {case.report.device_ms_per_step:.1f} ms",
        detail=f"{op.launches_per_step:,.6g} launches a step, which at the rate of a good copy "
        f"would take {op.ms_per_step - cost:.2f} ms",
        cost_ms=cost,
        share=share,
        evidence={
            "op": op.op,
            "kernel": op.kernel,
            "shapes": op.shapes,
            "dtypes": op.dtypes,
            "launches_per_step": op.launches_per_step,
            "ms_per_step": op.ms_per_step,
            "bytes_per_launch": op.bytes_per_launch,
            "bytes_source": op.bytes_source,
            "bytes_per_second": round(rate),
            "peak_bytes_per_second": peak,
            "bandwidth_share": rate / peak,
            "ms_per_step_at_full_rate": op.ms_per_step - cost,
        },
        cause=cause_of(op),
        remedy=(
            "avoid the copy: let the op that reads it take the strided tensor, or write it in place from the start; "
            "else copy in the order of the memory, so that neighbouring threads touch neighbouring bytes"
        ),
        confidence="medium" if op.bytes_source == "geometry" else "high",
    )
