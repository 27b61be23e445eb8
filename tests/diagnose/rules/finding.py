"""Findings of one kind, and steps that hold whatever a test puts into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.explain import explain
from tests.trace_builder import TraceBuilder

STEP_US = 10_000
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
    "::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)>(int)"
)
CAST = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >(int)"
)
GEMM = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def found(path: Path, kind: str, **options: Any) -> list[Finding]:
    """The findings of one kind."""
    return [finding for finding in explain(path, **options).findings if finding.kind == kind]


def steps(
    fill: Callable[[TraceBuilder, float], None],
    *,
    count: int = 2,
    name: str = "step[DECODE bs=1]",
    builder: TraceBuilder | None = None,
) -> TraceBuilder:
    """A trace of steps of 10 ms, each filled by a function that is told when it begins."""
    builder = builder or TraceBuilder()
    for number in range(count):
        start = STEP_US * number
        builder.span(name, start, STEP_US - 100)
        fill(builder, start)
    return builder
