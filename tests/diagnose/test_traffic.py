"""Bytes by shapes and types: what an op reads plus what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import mla_diag
from mla_diag.diagnose.gpu import gpu_of
from mla_diag.diagnose.traffic import Tensor, bytes_from_shapes, bytes_of_memcpy
from mla_diag.trace.decode import read_trace

BF16, FP8, F32, I64 = "c10::BFloat16", "c10::Float8_e4m3fn", "float", "long int"


def tensor(*shape: int, kind: str | None = BF16, strides: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, strides, kind)


@pytest.mark.parametrize(
    ("op", "inputs", "moved"),
    [
        ("aten::copy_", [tensor(495553, 1, 576), tensor(495553, 1, 576, kind=FP8)], 856_315_584),
        ("aten::copy_", [tensor(10, 8, kind=F32), tensor(10, 8, kind=F32, strides=(0, 1))], 10 * 8 * 4 + 8 * 4),
        ("aten::mm", [tensor(4, 8), tensor(8, 16)], 2 * (4 * 8 + 8 * 16 + 4 * 16)),
        ("aten::bmm", [tensor(3, 4, 8), tensor(3, 8, 16)], 2 * 3 * (4 * 8 + 8 * 16 + 4 * 16)),
        ("aten::addmm", [tensor(16), tensor(4, 8), tensor(8, 16)], 2 * (4 * 8 + 8 * 16 + 4 * 16)),
        ("aten::add", [tensor(4, 8), tensor(8)], 2 * (32 + 8 + 32)),
        ("aten::add_", [tensor(4, 8), tensor(4, 8)], 2 * (32 + 32 + 32)),
        ("aten::mul", [tensor(4, 8), tensor(4, 8), tensor(4, 8)], 2 * 3 * 32),  # the third is `out`
        ("aten::gt", [tensor(4, 8, kind=F32), tensor(4, 8, kind=F32)], 32 * (4 + 4 + 1)),
        ("aten::silu", [tensor(4, 8)], 2 * 2 * 32),
        ("aten::fill_", [tensor(4, 8, kind=F32)], 4 * 32),
        ("aten::sum", [tensor(4, 8)], 2 * 32),
        ("aten::index_select", [tensor(4096, 2048), tensor(3, kind=I64)], 2 * 2 * 3 * 2048 + 3 * 8),
        ("aten::_index_put_impl_", [tensor(495553, 1, 576, kind=FP8), tensor(7, 1, 576, kind=FP8)], 2 * 7 * 576),
        ("aten::gather", [tensor(100, 8), tensor(5, 8, kind=I64)], 5 * 8 * 2 * 2 + 5 * 8 * 8),
        ("aten::copy_", [tensor(4), tensor(4, kind="c10::SomethingNew")], None),
        ("aten::add", [tensor(4, 8), tensor(3, 3)], None),
        ("aten::mm", [tensor(4, 8)], None),
        ("aten::copy_", [], None),
        ("aiter::mha_batch_prefill", [tensor(15360, 32, 128), tensor(835874, 8, 128)], None),
    ],
)
def test_bytes_from_shapes(op: str, inputs: list[Tensor], moved: int | None):
    assert bytes_from_shapes(op, inputs) == moved


def test_a_concatenation_has_its_item_size_in_the_kernels_name():
    inputs = [tensor(4, 8, kind=None), tensor(4, 16, kind=None)]
    kernel = (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 2>()"
    )
    assert bytes_from_shapes("aten::cat", inputs, kernel) == 2 * 2 * 4 * 24
    assert bytes_from_shapes("aten::cat", inputs, "other") is None


@pytest.mark.parametrize(
    ("name", "moved"),
    [("Memcpy DtoD (Device -> Device)", 20), ("Memcpy HtoD (Pinned -> Device)", 10), ("Memset (Device)", 10)],
)
def test_bytes_of_memcpy(name: str, moved: int):
    assert bytes_of_memcpy(name, 10) == moved


def test_no_op_moves_more_than_its_card_can(shared_traces: Path):
    """A rule that counts too much would show ops faster than the memory they run on. Small ops live in the cache."""
    checked = 0
    for path in sorted(shared_traces.glob("*/*.json.gz")):
        if path.name in ("hta-cpu-only.json.gz", "hta-rank-not-found.json.gz"):
            continue
        bandwidth = gpu_of(read_trace(path, frames=False)).bandwidth
        for stage in mla_diag.explain(path, sources=False).stages:
            for op in stage.ops:
                if bandwidth is None or op.bytes_per_launch is None or op.bytes_per_launch < 20_000_000:
                    continue
                rate = op.bytes_per_launch * op.launches_per_step / (op.ms_per_step / 1e3)
                assert rate <= bandwidth, (path.name, op.op, op.shapes, rate / bandwidth)
                checked += 1
    assert checked >= 30
