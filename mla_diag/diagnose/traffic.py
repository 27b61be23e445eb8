"""The bytes that an op or a copy moves through device memory: what it reads plus what it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_COPIES = {"aten::copy_"}


class Tensor(NamedTuple):
    """One tensor among an op's inputs."""

    shape: list[int]
    strides: list[int] | None
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
            found += [Tensor(part, None, None) for part in shape if _is_shape(part)]
        elif _is_shape(shape):
            found.append(Tensor(shape, step if isinstance(step, list) else None, kind))
    return found


def bytes_from_shapes(op: str, inputs: Sequence[Tensor]) -> int | None:
    """Bytes read and written by one call of an op, where its inputs alone tell them."""
    if op not in _COPIES or len(inputs) < 2:
        return None
    written, read = inputs[0].bytes, inputs[1].bytes
    return None if written is None or read is None else written + read


def bytes_of_memcpy(name: str, size: int) -> int:
    """Bytes of device memory that a memcpy or memset of some size touches: a copy within the device touches two."""
    return 2 * size if "DtoD" in name or "Device -> Device" in name else size


def _list(text: bytes) -> list[Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, list) else None


def _is_shape(value: list[Any]) -> bool:
    return all(isinstance(extent, int) for extent in value)
