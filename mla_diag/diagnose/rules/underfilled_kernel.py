"""underfilled-kernel: a kernel with fewer blocks than the card has multiprocessors, and time that matters.

The second stage of SGLang's Triton decode has one block a request and head group, and a matrix product of one token
has as many as its output has tiles, unless it is split over the inner dimension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from mla_diag.diagnose.attention import is_attention
from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.communication import is_communication
from mla_diag.diagnose.diagnosis import Finding, KernelUse, Op, Source
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.ranking import RankedOp
from mla_diag.diagnose.thresholds import UNDERFILLED_MICROSECONDS, UNDERFILLED_MS, UNDERFILLED_SHARE
from mla_diag.trace.columns import MISSING

KIND = "underfilled-kernel"

# These take the grid in threads, all others in blocks (HIP's hip_ext.h: globalWorkSizeX).
_GRID_IN_THREADS = {"hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel"}
_MATRIX_PRODUCT = re.compile(r"gemm|nvjet|Cijk_|cutlass|matmul|splitK", re.IGNORECASE)


class _Use(NamedTuple):
    """One kernel of one row of the ranking, and the blocks that it runs in."""

    op: Op
    use: KernelUse
    blocks: int


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for each kernel and function; none where geometry or the multiprocessors are unknown."""
    available = case.gpu.multiprocessors
    if not available:
        return
    groups: dict[tuple[str, Source | None], list[_Use]] = {}
    for row in case.ranked:
        for use in row.op.kernels:
            blocks = _blocks(case, row, use)
            long_enough = use.ms_per_step * 1e3 >= UNDERFILLED_MICROSECONDS * use.launches_per_step
            if blocks is not None and blocks < available and long_enough and not is_communication(use.kernel):
                groups.setdefault((use.kernel, row.op.source), []).append(_Use(row.op, use, blocks))
    for uses in groups.values():
        unused = sum(entry.use.ms_per_step * (1 - entry.blocks / available) for entry in uses)
        if unused >= max(UNDERFILLED_MS, UNDERFILLED_SHARE * case.report.device_ms_per_step):
            yield _finding(case, uses, unused, available)


def _blocks(case: StageCase, row: RankedOp, use: KernelUse) -> int | None:
    if not use.grid or not use.block or len(use.grid) != len(use.block) or min(use.grid + use.block) < 1:
        return None
    launch = case.links.launch[row.events[0]]
    call = "" if launch == MISSING else case.trace.names[case.trace.launches.name[launch]]
    if call in _GRID_IN_THREADS:
        return math.prod(-(-threads // size) for threads, size in zip(use.grid, use.block, strict=True))
    return math.prod(use.grid)


def _finding(case: StageCase, uses: list[_Use], unused: float, available: int) -> Finding:
    kernel, op = uses[0].use.kernel, uses[0].op
    name = short_kernel_name(kernel)
    spent = sum(entry.use.ms_per_step for entry in uses)
    launches = sum(entry.use.launches_per_step for entry in uses)
    fewest, most = min(entry.blocks for entry in uses), max(entry.blocks for entry in uses)
    blocks = f"{fewest} to {most} blocks" if fewest != most else "1 block" if most == 1 else f"{most} blocks"
    return case.finding(
        KIND,
        f"{name} runs in {blocks} on {available} multiprocessors: "
        f"{spent:.2f} of {case.report.device_ms_per_step:.1f} ms",
        detail=f"{launches:,.6g} launches a step of {spent * 1e3 / launches:.1f} us, "
        f"with {unused / spent:.0%} of the card unused",
        cost_ms=unused,
        share=unused / case.report.device_ms_per_step,
        evidence={
            "op": op.op,
            "kernel": kernel,
            "blocks_least": fewest,
            "blocks_most": most,
            "threads_per_block": math.prod(uses[0].use.block or []),
            "multiprocessors": available,
            "launches_per_step": launches,
            "ms_per_step": spent,
            "microseconds_per_launch": spent * 1e3 / launches,
        },
        cause=cause_of(op),
        remedy=_remedy(name, kernel),
        confidence="medium",
    )


def _remedy(name: str, kernel: str) -> str:
    if is_attention(kernel):
        return (
            "split attention over the KV length: raise `--triton-attention-num-kv-splits`, "
            "or take an attention backend that splits by itself"
        )
    if _MATRIX_PRODUCT.search(name):
        return "use a split-K kernel, or fuse the products of one input into one; a larger batch has more tiles"
    return "give it more blocks: split what each of them loops over, or let a larger batch fill the card"
