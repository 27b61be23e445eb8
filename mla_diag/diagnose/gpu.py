"""What a card can do: how fast it moves bytes, how many multiprocessors there are to fill."""

from __future__ import annotations

import re
from typing import NamedTuple

from mla_diag.trace.model import Trace


class Gpu(NamedTuple):
    """A card, as far as it is known.

    Attributes:
        name: As the trace has it.
        multiprocessors: SMs or compute units; None where the trace does not say.
        bandwidth: Peak memory bandwidth in bytes a second by the maker's datasheet; None for a card not in the table.
        bandwidth_source: The datasheet.
    """

    name: str | None
    multiprocessors: int | None
    bandwidth: float | None
    bandwidth_source: str | None


# The name as the driver gives it, TB/s, the datasheet. The first that matches counts, so longer names come first.
_BANDWIDTHS: tuple[tuple[str, float, str], ...] = (
    (r"GB300|B300", 8.0, "NVIDIA Blackwell Ultra datasheet"),
    (r"GB200|B200", 8.0, "NVIDIA Blackwell datasheet"),
    (r"B100", 8.0, "NVIDIA Blackwell datasheet"),
    (r"GH200 .*144|GH200 144", 4.9, "NVIDIA GH200 datasheet (HBM3e)"),
    (r"GH200", 4.0, "NVIDIA GH200 datasheet (HBM3)"),
    (r"H200", 4.8, "NVIDIA H200 datasheet"),
    (r"H100 NVL", 3.9, "NVIDIA H100 datasheet (NVL)"),
    (r"H100 PCIe", 2.0, "NVIDIA H100 datasheet (PCIe)"),
    (r"H100", 3.35, "NVIDIA H100 datasheet (SXM)"),
    (r"H800 PCIe", 2.0, "NVIDIA H100 datasheet (PCIe)"),
    (r"H800", 3.35, "NVIDIA H100 datasheet (SXM)"),
    (r"H20\b", 4.0, "NVIDIA H20 datasheet"),
    (r"A100.*80GB|A800.*80GB", 2.04, "NVIDIA A100 datasheet (80 GB SXM)"),
    (r"A100|A800", 1.555, "NVIDIA A100 datasheet (40 GB)"),
    (r"L40S", 0.864, "NVIDIA L40S datasheet"),
    (r"L40\b", 0.864, "NVIDIA L40 datasheet"),
    (r"L4\b", 0.3, "NVIDIA L4 datasheet"),
    (r"RTX PRO 6000", 1.792, "NVIDIA RTX PRO 6000 Blackwell datasheet"),
    (r"RTX 6000 Ada", 0.96, "NVIDIA RTX 6000 Ada datasheet"),
    (r"RTX 5090", 1.792, "NVIDIA GeForce RTX 5090 specifications"),
    (r"RTX 4090", 1.008, "NVIDIA GeForce RTX 4090 specifications"),
    (r"A10G", 0.6, "NVIDIA A10 datasheet"),
    (r"V100", 0.9, "NVIDIA V100 datasheet"),
    (r"MI355X", 8.0, "AMD Instinct MI355X datasheet"),
    (r"MI350X", 8.0, "AMD Instinct MI350X datasheet"),
    (r"MI325X", 6.0, "AMD Instinct MI325X datasheet"),
    (r"MI300X", 5.3, "AMD Instinct MI300X datasheet"),
    (r"MI300A", 5.3, "AMD Instinct MI300A datasheet"),
    (r"MI250X|MI250\b", 1.6, "AMD Instinct MI250 datasheet (one of its two dies)"),
    (r"MI210", 1.6, "AMD Instinct MI210 datasheet"),
)


def gpu_of(trace: Trace) -> Gpu:
    """The card that a trace was recorded on."""
    properties = trace.device_properties or {}
    count = properties.get("numSms")
    return gpu_named(trace.device, count if isinstance(count, int) else None)


def gpu_named(name: str | None, multiprocessors: int | None = None) -> Gpu:
    """The card of that name, as a driver or a trace has it."""
    for pattern, terabytes, source in _BANDWIDTHS:
        if name is not None and re.search(pattern, name):
            return Gpu(name, multiprocessors, terabytes * 1e12, source)
    return Gpu(name, multiprocessors, None, None)
