"""The bytes that an op or a copy moves through device memory: what it reads plus what it writes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

# As Kineto spells them: scalarTypeToTypeMeta's names of C++ types.
_ITEM_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "long": 8,
    "long long": 8,
    "int": 4,
    "short": 2,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "unsigned short": 2,
    "unsigned int": 4,
    "unsigned long": 8,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
# What stands in "Input type" for an argument that is no tensor.
_NO_TENSOR = {"", "Scalar", "ScalarList", "GenericList", "None", "Device", "Layout"}


class Tensor(NamedTuple):
    """One tensor among an op's inputs."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    type: str | None

    @property
    def dtype(self) -> str | None:
        """The type as PyTorch's users know it, such as `Float8_e4m3fn`."""
        return None if self.type is None else self.type.removeprefix("c10::")

    @property
    def bytes(self) -> int | None:
        """The memory behind it: elements that a zero stride repeats are there once. None for an unknown type."""
        size = _ITEM_BYTES.get(self.type or "")
        if size is None:
            return None
        strides = self.strides if self.strides and len(self.strides) == len(self.shape) else [1] * len(self.shape)
        return size * math.prod(
            extent for extent, stride in zip(self.shape, strides, strict=True) if stride or not extent
        )


def tensors(dims: bytes, types: bytes, strides: bytes) -> list[Tensor] | None:
    """The tensors among an op's inputs, from the raw lists of its event, or None where they were not recorded.

    The tensors of a list are given one by one, without a type, because none is recorded for them.
    """
    shapes, kinds, steps = _list(dims), _list(types), _list(strides)
    if shapes is None or kinds is None or len(shapes) != len(kinds):
        return None
    steps = steps if steps is not None and len(steps) == len(shapes) else [None] * len(shapes)
    found = []
    for shape, kind, step in zip(shapes, kinds, steps, strict=True):
        if not isinstance(shape, list) or kind in _NO_TENSOR:
            continue
        if shape and all(isinstance(part, list) for part in shape):
            found += [Tensor(tuple(part), None, None) for part in shape if _is_shape(part)]
        elif _is_shape(shape):
            found.append(
                Tensor(tuple(shape), tuple(step) if isinstance(step, list) and _is_shape(step) else None, kind)
            )
    return found


def bytes_from_shapes(op: str, inputs: Sequence[Tensor], kernel: str = "") -> int | None:
    """Bytes read and written by one call of an op, where its inputs alone tell them.

    An op that is not known here gives None, even if all its inputs are: a write of a few rows into a pool has the whole
    pool among its inputs and touches next to none of it.

    Args:
        op: The op, such as `aten::mm`.
        inputs: Its tensors, from `tensors`.
        kernel: The kernel it launched; concatenations record no types, and their kernel's name has the item's size.
    """
    name = op.removeprefix("aten::")
    if name in ("cat", "_cat"):
        return _concatenation(inputs, kernel)
    if any(tensor.bytes is None for tensor in inputs) or not inputs:
        return None
    if name in _MATRIX_PRODUCTS:
        return _matrix_product(inputs[_MATRIX_PRODUCTS[name] :])
    if (pointwise := name.removesuffix("_")) in _ARITY:
        return _elementwise(pointwise, inputs)
    for names, rule in _RULES:
        if name in names:
            return rule(list(inputs))
    return None


def bytes_of_memcpy(name: str, size: int) -> int:
    """Bytes of device memory that a memcpy or memset of some size touches: a copy within the device touches two."""
    return 2 * size if "DtoD" in name or "Device -> Device" in name else size


def _copy(inputs: list[Tensor]) -> int | None:
    """The destination, then the source."""
    return None if len(inputs) < 2 else _size(inputs[0]) + _size(inputs[1])


def _fill(inputs: list[Tensor]) -> int:
    return _size(inputs[0])


def _elementwise(name: str, inputs: Sequence[Tensor]) -> int | None:
    """Every input once and the output: given as an `out` after the inputs, else of the inputs' common shape."""
    taken, out = list(inputs[: _ARITY[name]]), list(inputs[_ARITY[name] :])
    shape = _broadcast([tensor.shape for tensor in taken])
    if shape is None:
        return None
    largest = max(taken, key=lambda tensor: math.prod(tensor.shape))
    written = _size(out[-1]) if out else math.prod(shape) * (1 if name in _COMPARISONS else _item(largest))
    return sum(map(_size, taken)) + written


def _reduction(inputs: list[Tensor]) -> int:
    """The input; what comes out is small beside it."""
    return _size(inputs[0])


def _same_shape(inputs: list[Tensor]) -> int:
    return 2 * _size(inputs[0])


def _rows_by_index(inputs: list[Tensor]) -> int | None:
    """The rows that an index of one dimension selects, read and written, and the index."""
    if len(inputs) < 2 or not inputs[0].shape or not inputs[0].shape[0]:
        return None
    table, index = inputs[0], inputs[1]
    selected = math.prod(index.shape) * math.prod(table.shape[1:]) * _item(table)
    return 2 * selected + _size(index)


def _elements_by_index(inputs: list[Tensor]) -> int | None:
    """One element read and one written for each of an index's."""
    if len(inputs) < 2:
        return None
    return math.prod(inputs[1].shape) * 2 * _item(inputs[0]) + _size(inputs[1])


def _values_put(inputs: list[Tensor]) -> int | None:
    """The values, read and written; a scalar broadcasts over an index that is not recorded."""
    values = inputs[-1]
    return 2 * _size(values) if len(inputs) >= 2 and math.prod(values.shape) > 1 else None


def _matrix_product(inputs: Sequence[Tensor]) -> int | None:
    if len(inputs) < 2 or len(inputs[0].shape) < 2 or len(inputs[1].shape) < 2:
        return None
    left, right = inputs[:2]
    product = math.prod(left.shape[:-1]) * right.shape[-1] * _item(left)
    return _size(left) + _size(right) + product


def _concatenation(inputs: Sequence[Tensor], kernel: str) -> int | None:
    item = _OPAQUE.search(kernel)
    if item is None:
        return None
    return 2 * int(item[1]) * sum(math.prod(tensor.shape) for tensor in inputs)


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """The common shape of several, or None if they do not go together."""
    rank = max(map(len, shapes))
    result = []
    for axis in range(rank):
        extents = {shape[axis - rank + len(shape)] for shape in shapes if axis - rank + len(shape) >= 0} - {1}
        if len(extents) > 1:
            return None
        result.append(extents.pop() if extents else 1)
    return result


def _size(tensor: Tensor) -> int:
    return tensor.bytes or 0


def _item(tensor: Tensor) -> int:
    return _ITEM_BYTES[tensor.type or ""]


_OPAQUE = re.compile(r"OpaqueType<(\d+)")
# Where the two matrices are among an op's tensors.
_MATRIX_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf"}
# fmt: off
_UNARY = (
    "abs", "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "silu", "gelu",
    "relu", "erf", "clamp", "clamp_min", "clamp_max", "floor", "ceil", "round", "nan_to_num", "reciprocal", "sign",
    "logical_not", "bitwise_not", "isnan", "isinf",
)
_BINARY = (
    "add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "bitwise_and", "bitwise_or", "remainder", "floor_divide", "masked_fill",
)
# fmt: on
_ARITY = dict.fromkeys(_UNARY, 1) | dict.fromkeys(_BINARY, 2) | {"where": 3, "addcmul": 3}
_RULES: tuple[tuple[frozenset[str], Callable[[list[Tensor]], int | None]], ...] = (
    (frozenset({"copy_"}), _copy),
    (frozenset({"fill_", "zero_", "zeros", "ones", "full"}), _fill),
    (
        frozenset({"sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "all", "any", "norm", "prod"}),
        _reduction,
    ),
    (
        frozenset({"cumsum", "softmax", "_softmax", "_log_softmax", "sort", "clone", "contiguous", "flip", "roll"}),
        _same_shape,
    ),
    (frozenset({"index_select", "embedding"}), _rows_by_index),
    (frozenset({"gather", "take"}), _elements_by_index),
    (frozenset({"index_put_", "_index_put_impl_", "index_copy_", "scatter_"}), _values_put),
)


def _list(text: bytes) -> list[Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, list) else None


def _is_shape(value: list[Any]) -> bool:
    return all(isinstance(extent, int) for extent in value)
