"""What copying a pool costs a step, by how fast cards convert FP8 to BF16: bytes read and written a second, measured.

The conversion is not limited by memory: PyTorch's unrolled copy kernel converts one element at a time, and reaches a
fifth of the bandwidth of the card it was measured on. So for a card that is not in the table a fifth is the estimate.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from mla_diag.diagnose.gpu import Gpu
from mla_diag.diagnose.server_info import ServerInfo

# Bytes that the conversion of one FP8 element moves: one read, two written.
_READ_AND_WRITTEN = 3
_SHARE_OF_BANDWIDTH = 0.2
# Card, bytes a second, how it was measured. sglang#35291 has the same on 131,072 rows: 225.79 us a copy.
_MEASURED = (("H200", 1.0e12, "mla-diag explain traces/base-graph-decode.trace.json.gz --format json"),)
_ASSUMED = "H200"


class CopyCost(msgspec.Struct, frozen=True):
    """What copying costs a step on each rank, by arithmetic; milliseconds and bytes.

    Attributes:
        rows: Rows of one layer's pool.
        width: Elements a row.
        layers: Layers; None where nothing says how many.
        bytes_per_layer: Read and written.
        ms_per_layer: The same over the rate.
        bytes_per_step: For all layers.
        ms_per_step: The same over the rate.
        bytes_per_second: The rate.
        rate_source: Where it comes from.
    """

    rows: int
    width: int
    layers: int | None
    bytes_per_layer: int
    ms_per_layer: float
    bytes_per_step: int | None
    ms_per_step: float | None
    bytes_per_second: float
    rate_source: str


class _Rate(NamedTuple):
    """Bytes a second at which a card converts a pool, and where the figure comes from."""

    bytes_per_second: float
    source: str


def copy_cost(server: ServerInfo, width: int, layers: int | None, gpu: Gpu) -> CopyCost | None:
    """The cost for a server's pool; None where its size is not known.

    Args:
        server: Its pool.
        width: Elements a row.
        layers: Layers of the model; None where nothing says how many.
        gpu: Its card.
    """
    rows = server.pool_rows
    if rows is None:
        return None
    rate = _rate_of(gpu)
    of_layer = rows * width * _READ_AND_WRITTEN
    of_step = None if layers is None else of_layer * layers
    return CopyCost(
        rows=rows,
        width=width,
        layers=layers,
        bytes_per_layer=of_layer,
        ms_per_layer=of_layer / rate.bytes_per_second * 1e3,
        bytes_per_step=of_step,
        ms_per_step=None if of_step is None else of_step / rate.bytes_per_second * 1e3,
        bytes_per_second=rate.bytes_per_second,
        rate_source=rate.source,
    )


def _rate_of(gpu: Gpu) -> _Rate:
    """The rate of a card; of the one that was measured where the card is unknown."""
    for card, rate, command in _MEASURED:
        if gpu.name is not None and card in gpu.name.replace("GH200", ""):
            return _Rate(rate, f"measured on an {card}: {command}")
    if gpu.bandwidth is not None:
        return _Rate(
            gpu.bandwidth * _SHARE_OF_BANDWIDTH,
            f"not measured on a {gpu.name}: a fifth of its {gpu.bandwidth / 1e12:.2f} TB/s ({gpu.bandwidth_source})",
        )
    card, rate, _ = next(entry for entry in _MEASURED if entry[0] == _ASSUMED)
    named = f"the {gpu.name} is not in mla-diag's table" if gpu.name else "the card is unknown; name it with --gpu"
    return _Rate(rate, f"that of an {card}, because {named}")
