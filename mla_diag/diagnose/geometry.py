"""What a kernel of PyTorch's handled, from its name and launch geometry: all that is left of it under CUDA graphs.

PyTorch's elementwise kernels give each thread a fixed number of elements, so blocks x threads x that number is the
count of elements, rounded up to a whole block (aten/src/ATen/native/cuda/CUDALoops.cuh, Loops.cuh, thread_constants.h).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

# Sizes of the C++ types in kernel names.
_TYPE_BYTES = {
    "double": 8,
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
}
# Conversions, by a part of their name: what they write, whatever their lambda takes.
_CONVERSIONS = {"float8_copy": 1, "bfloat16_copy": 2, "float16_copy": 2, "tofloat32_copy": 4}

# The array of pointers that follows the functor: at::detail::Array until torch 2.5, std::array since.
_POINTERS = r"(?P<array>std::array|at::detail::Array)<char ?\*, (?P<tensors>\d+)(?:ul)?>"
_VECTORIZED = re.compile(rf"\bvectorized_elementwise_kernel<\d+, (?P<functor>.*?), {_POINTERS}")
_UNROLLED = re.compile(rf"\bunrolled_elementwise_kernel<(?P<functor>.*?), {_POINTERS}(?:, (?P<work>\d+))?,")
_STRIDED = re.compile(
    r"\belementwise_kernel(?:_manual_unroll)?<\d+, (?P<work>\d+), "
    r"at::native::gpu_kernel_impl(?P<nocast>_nocast)?<(?P<functor>.*?)>\(at::TensorIterator"
)
# A thread for each element that an index names, whatever the tensor's size.
_INDEXED = re.compile(r"\bindex_elementwise_kernel<\d+, (?P<work>\d+),")
_LAMBDA = re.compile(r"\{lambda\(([^(){}]+)\)#\d+\}")
_TEMPLATE = re.compile(rf"\w<({'|'.join(map(re.escape, _TYPE_BYTES))})\b")

_THREAD_WORK = 4  # thread_work_size(), of every elementwise kernel that does not say otherwise
_ROCM_THREADS = 256  # num_threads() there; what a thread of a vectorised kernel does there differs


class Elements(NamedTuple):
    """A count of elements that is right to within one block.

    Attributes:
        most: Elements, rounded up to a whole block.
        block: Elements that one block handles: the true count is more than `most - block` and at most `most`.
    """

    most: int
    block: int

    def may_be(self, true_count: int) -> bool:
        """Whether this many elements would have been launched like this."""
        return self.most - self.block < true_count <= self.most


class Bytes(NamedTuple):
    """Bytes that a launch read and wrote.

    Attributes:
        total: Right to within one block's elements.
        least: Whether it is a lower bound: a kernel that converts whatever it loads does not name that, and the least
            it can be is one byte an element.
    """

    total: int
    least: bool


@lru_cache(maxsize=4096)
def extents(text: bytes) -> list[int] | None:
    """A launch's grid or block from its raw JSON, which is a list in most traces and text in some."""
    try:
        value = msgspec.json.decode(text)
        return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, list[int])
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def elements(kernel: str, grid: Sequence[int] | None, block: Sequence[int] | None) -> Elements | None:
    """The elements that a launch handled, or None where the kernel's name does not tell the work per thread."""
    if grid is None or block is None:
        return None
    work = _work_per_thread(kernel, math.prod(block))
    if work is None:
        return None
    per_block = math.prod(block) * work
    return Elements(math.prod(grid) * per_block, per_block)


def bytes_moved(kernel: str, grid: Sequence[int] | None, block: Sequence[int] | None) -> Bytes | None:
    """The bytes that a copy, a fill or a kernel of one input moved, or None where its name does not tell.

    With two inputs one may be broadcast, which the geometry does not show.
    """
    handled, functor = elements(kernel, grid, block), _functor(kernel)
    if handled is None or functor is None or _tensors(functor) > 2:
        return None
    if not converts(kernel):
        each = _bytes_per_element(functor)
        return None if each is None else Bytes(handled.most * each, least=False)
    written = _item(functor)
    if "copy_kernel" not in functor or written is None:
        return None
    return Bytes(handled.most * (written + 1), least=True)


def converts(kernel: str) -> bool:
    """Whether an elementwise kernel converts what it loads or stores, from types that its name does not give."""
    strided = _STRIDED.search(kernel)
    return "LoadWithCast" in kernel or (strided is not None and strided["nocast"] is None)


def _work_per_thread(kernel: str, threads: int) -> int | None:
    """Elements that a thread of one of PyTorch's elementwise kernels handles."""
    if match := _VECTORIZED.search(kernel):
        if match["array"] == "at::detail::Array":
            return _THREAD_WORK
        moved = _bytes_per_element(match["functor"])
        if moved is None or threads == _ROCM_THREADS:
            return None
        # elems_per_thread: the smaller the elements, the more. The template's number is the width of a load.
        return 16 if moved == 1 else 8 if moved < 4 else 4
    if match := _UNROLLED.search(kernel):
        return int(match["work"] or _THREAD_WORK)
    match = _STRIDED.search(kernel) or _INDEXED.search(kernel)
    return int(match["work"]) if match else None


def _functor(kernel: str) -> str | None:
    for pattern in (_VECTORIZED, _UNROLLED, _STRIDED):
        if match := pattern.search(kernel):
            return match["functor"]
    return None


def _bytes_per_element(functor: str) -> int | None:
    """What a functor reads and writes for one element of its output, by the types in its name."""
    arguments = _lambda_types(functor)
    if arguments:
        for conversion, written in _CONVERSIONS.items():
            if conversion in functor:
                return arguments[-1] + written
        return sum(arguments) + arguments[-1]
    item = _item(functor)
    return None if item is None else item * _tensors(functor)


def _item(functor: str) -> int | None:
    """The size of what a functor works in."""
    arguments = _lambda_types(functor)
    if arguments:
        return arguments[-1]
    template = _TEMPLATE.search(functor)
    return None if template is None else _TYPE_BYTES[template[1]]


def _lambda_types(functor: str) -> list[int] | None:
    """The sizes of the arguments of the lambda that a functor ends in, or None if one is of another type."""
    lambdas = _LAMBDA.findall(functor)
    if not lambdas or not functor.rstrip().endswith("}"):
        return None
    sizes = [_TYPE_BYTES.get(argument.strip()) for argument in lambdas[-1].split(",")]
    return [size for size in sizes if size is not None] if None not in sizes else None


def _tensors(functor: str) -> int:
    """Tensors that a functor works on, its output included."""
    if arguments := _lambda_types(functor):
        return len(arguments) + 1
    if "FillFunctor" in functor:
        return 1
    return 2 if "UnaryFunctor" in functor or "OnSelf" in functor or "OnOther" in functor else 3
