"""small-op-storm: hundreds of tiny launches a step of one elementwise op, which belong inside the kernels around them.

SGLang with an FP8 pool quantises K and V in about five launches where a BF16 pool needs one, and casts the query in
every layer (sglang#30815). Each takes a microsecond or two of the device, and more than that of an eager host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mla_diag.diagnose.case import StageCase, cause_of
from mla_diag.diagnose.diagnosis import Finding, Op, Source
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.thresholds import STORM_LAUNCHES, STORM_MICROSECONDS, STORM_SHARE

KIND = "small-op-storm"

# Kernels that do one thing to each element: PyTorch's, and casts and quantisations of anyone's. Norms and activations
# are none: they are what others fuse into.
_ELEMENTWISE = re.compile(
    r"elementwise_kernel|CatArray|\bcopy_kernel|cast_kernel|\bfill_kernel|per_tensor_quant|static_quant"
)
_FUNCTOR = re.compile(r"<(\w+)>$")
_CAST = re.compile(r"copy|cast|quant", re.IGNORECASE)


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for each op and function that launches a storm."""
    groups: dict[tuple[str, Source | None], list[Op]] = {}
    for row in case.ranked:
        op = row.op
        if _ELEMENTWISE.search(op.kernel) and _mean_microseconds([op]) <= STORM_MICROSECONDS:
            groups.setdefault((_what(op), op.source), []).append(op)
    for (what, _), ops in groups.items():
        launches = sum(op.launches_per_step for op in ops)
        share = sum(op.share for op in ops)
        if launches >= STORM_LAUNCHES and share >= STORM_SHARE:
            yield _finding(case, what, ops, launches, share)


def _what(op: Op) -> str:
    """The op, or for a graph's kernel what it does to each element."""
    if op.op is not None:
        return op.op
    name = short_kernel_name(op.kernel)
    functor = _FUNCTOR.search(name)
    return functor[1] if functor else name


def _mean_microseconds(ops: list[Op]) -> float:
    return 1e3 * sum(op.ms_per_step for op in ops) / sum(op.launches_per_step for op in ops)


def _finding(case: StageCase, what: str, ops: list[Op], launches: float, share: float) -> Finding:
    cost, mean = sum(op.ms_per_step for op in ops), _mean_microseconds(ops)
    source = cause_of(ops[0])
    place = "" if source is None else f" from {source.function}"
    return case.finding(
        KIND,
        f"{what}{place} is launched {launches:,.6g} times a step for {mean:.1f} us each: "
        f"{cost:.2f} of {case.report.device_ms_per_step:.1f} ms",
        cost_ms=cost,
        share=share,
        evidence={
            "op": ops[0].op,
            "kernel": ops[0].kernel,
            "shapes": ops[0].shapes,
            "dtypes": ops[0].dtypes,
            "distinct_shapes": len(ops),
            "launches_per_step": launches,
            "microseconds_per_launch": mean,
            "launched_by": ops[0].launched_by,
        },
        cause=source,
        remedy=_remedy(what, ops),
        confidence="high" if source is not None else "medium",
    )


def _remedy(what: str, ops: list[Op]) -> str:
    if _CAST.search(f"{what} {short_kernel_name(ops[0].kernel)}"):
        remedy = "convert inside the kernel that writes these values, or the one that reads them"
    else:
        remedy = "fuse these into one kernel, or into those around them"
    if ops[0].launched_by == "graph":
        return f"{remedy}; a launch this short is mostly the launch itself"
    return f"{remedy}; without CUDA graphs each launch also costs the host several times its device time"
