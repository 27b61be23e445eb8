"""Launch geometry tells the elements of PyTorch's elementwise kernels to within a block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import mla_diag
from mla_diag.diagnose.diagnosis import Op
from mla_diag.diagnose.geometry import Elements, bytes_moved, elements, extents

NATIVE = "void at::native::"
FILL = NATIVE + "vectorized_elementwise_kernel<8, at::native::FillFunctor<TYPE>, "
LAMBDA = "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(TYPE)#1}"
UNROLLED = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda" + LAMBDA
VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, at::native::FUNCTOR" + LAMBDA


@pytest.mark.parametrize(
    ("kernel", "work"),
    [
        (UNROLLED.replace("TYPE", "c10::BFloat16") + ", std::array<char*, 2ul>, 4, Trivial>(int)", 4),
        (UNROLLED.replace("TYPE", "float") + ", at::detail::Array<char*, 2>, Trivial>(int)", 4),  # torch until 2.5
        (
            VECTORIZED.replace("FUNCTOR", "float8_copy_kernel_cuda").replace("TYPE", "c10::BFloat16")
            + ", std::array<char*, 2ul> >()",
            8,
        ),
        (
            VECTORIZED.replace("FUNCTOR", "bfloat16_copy_kernel_cuda").replace("TYPE", "float")
            + ", std::array<char*, 2ul> >()",
            4,
        ),
        (
            VECTORIZED.replace("FUNCTOR", "neg_kernel_cuda").replace("TYPE", "c10::Half")
            + ", std::array<char*, 2ul> >()",
            4,
        ),
        (
            FILL.replace("TYPE", "c10::BFloat16") + "std::array<char*, 1ul> >()",
            8,
        ),
        (
            FILL.replace("TYPE", "bool") + "std::array<char*, 1ul> >()",
            16,
        ),
        (
            FILL.replace("TYPE", "bool") + "at::detail::Array<char*, 1> >()",
            4,
        ),
        (
            NATIVE + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl<Add<float> >(at::TensorIteratorBase&)>()",
            2,
        ),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<int>()>()", 4),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", None),
        ("set_mla_kv_buffer_kernel", None),
        ("", None),
    ],
)
def test_elements_a_thread(kernel: str, work: int | None):
    handled = elements(kernel, [10, 1, 1], [128, 1, 1])
    assert (handled and handled.most) == (work and 10 * 128 * work)


def test_rocm_vectorised_kernels_tell_nothing():
    """Their threads do 16 elements where CUDA's do 4 (seen on an MI300X)."""
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >()"
    )
    assert elements(kernel, [10, 1, 1], [256, 1, 1]) is None


def test_the_true_count_is_within_a_block():
    handled = elements(
        UNROLLED.replace("TYPE", "c10::BFloat16") + ", std::array<char*, 2ul>, 4, X>(int)", [557498], [128]
    )
    assert handled == Elements(285_438_976, 512)
    assert handled.may_be(495_553 * 576)
    assert not handled.may_be(495_552 * 576)
    assert not handled.may_be(495_554 * 576)


def test_a_cast_moves_at_least_one_byte_of_what_it_reads():
    kernel = UNROLLED.replace("TYPE", "c10::BFloat16") + ", std::array<char*, 2ul>, 4, LoadWithCast<1> >(int)"
    moved = bytes_moved(kernel, [1000], [128])
    assert moved is not None
    assert (moved.total, moved.least) == (1000 * 512 * 3, True)


@pytest.mark.parametrize(
    ("text", "value"), [(b"[4, 8, 1]", [4, 8, 1]), (b'"[4,8,1]"', [4, 8, 1]), (b"", None), (b'"x"', None)]
)
def test_extents_come_as_lists_and_as_text(text: bytes, value: list[int] | None):
    assert extents(text) == value


def elementwise_ops(directories: list[Path]) -> Iterator[tuple[str, Op, int]]:
    """Ops of one elementwise kernel whose inputs go together, with the elements of their output."""
    for directory in directories:
        for path in sorted(directory.glob("*.json.gz")):
            if path.name in ("hta-cpu-only.json.gz", "hta-rank-not-found.json.gz"):
                continue
            for stage in mla_diag.explain(path, sources=False).stages:
                for op in stage.ops:
                    one = len(op.kernels) == 1 and op.launches_per_step == op.calls_per_step
                    if one and op.shapes and "elementwise_kernel<" in op.kernel and "index" not in op.kernel:
                        count = broadcast(op.shapes)
                        if count is not None:
                            yield path.name, op, count


def broadcast(shapes: list[list[int]]) -> int | None:
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + shape for shape in shapes]
    extents_by_axis = [set(axis) - {1} for axis in zip(*padded, strict=True)]
    if any(len(axis) > 1 for axis in extents_by_axis):
        return None
    return math.prod(next(iter(axis), 1) for axis in extents_by_axis)


def test_geometry_agrees_with_shapes_wherever_a_recording_has_both(recordings: Path):
    checked = 0
    for name, op, count in elementwise_ops([recordings]):
        use = op.kernels[0]
        handled = elements(use.kernel, use.grid, use.block)
        assert handled is not None, (name, op.kernel)
        assert handled.may_be(count), (name, op.kernel, op.shapes, use.grid)
        checked += 1
    assert checked >= 40


def test_geometry_agrees_with_shapes_on_other_cards_and_torch_versions(shared_traces: Path):
    checked = 0
    for name, op, count in elementwise_ops([shared_traces / "public"]):
        use = op.kernels[0]
        handled = elements(use.kernel, use.grid, use.block)
        if handled is not None:
            assert handled.may_be(count), (name, op.kernel, op.shapes, use.grid)
            checked += 1
    assert checked >= 300


def test_bytes_by_geometry_agree_with_bytes_by_shapes(shared_traces: Path):
    """Or are the lower bound that they are said to be. Large ops only: a block more or less is nothing there."""
    checked = 0
    for directory in ("h200", "public"):
        for name, op, _ in elementwise_ops([shared_traces / directory]):
            use = op.kernels[0]
            moved = bytes_moved(use.kernel, use.grid, use.block)
            if moved is None or op.bytes_source != "shapes" or (op.bytes_per_launch or 0) < 10_000_000:
                continue
            assert op.bytes_per_launch is not None
            if moved.least:
                assert moved.total <= op.bytes_per_launch * 1.001, (name, op.kernel, op.shapes)
            else:
                assert moved.total == pytest.approx(op.bytes_per_launch, rel=0.01), (name, op.kernel, op.shapes)
            checked += 1
    assert checked >= 30
