"""How fast cards convert an FP8 pool to BF16: bytes read and written a second, measured.

The conversion is not limited by memory: PyTorch's unrolled copy kernel converts one element at a time, and reaches a
fifth of the bandwidth of the card it was measured on. So for a card that is not in the table a fifth is the estimate.
"""

from __future__ import annotations

from typing import NamedTuple

from mla_diag.diagnose.gpu import Gpu

READ_AND_WRITTEN = 3
"""Bytes that the conversion of one FP8 element moves: one read, two written."""

_SHARE_OF_BANDWIDTH = 0.2
# Card, bytes a second, how it was measured. sglang#35291 has the same on 131,072 rows: 225.79 us a copy.
_MEASURED = (("H200", 1.0e12, "mla-diag explain traces/base-graph-decode.trace.json.gz --format json"),)
_ASSUMED = "H200"


class CopyRate(NamedTuple):
    """Bytes a second at which a card converts a pool, and where the figure comes from."""

    bytes_per_second: float
    source: str
    measured: bool


def copy_rate(gpu: Gpu) -> CopyRate:
    """The rate of a card; of the one that was measured where the card is unknown."""
    for card, rate, command in _MEASURED:
        if gpu.name is not None and card in gpu.name.replace("GH200", ""):
            return CopyRate(rate, f"measured on an {card}: {command}", True)
    if gpu.bandwidth is not None:
        return CopyRate(
            gpu.bandwidth * _SHARE_OF_BANDWIDTH,
            f"not measured on a {gpu.name}: a fifth of its {gpu.bandwidth / 1e12:.2f} TB/s ({gpu.bandwidth_source})",
            False,
        )
    card, rate, _ = next(entry for entry in _MEASURED if entry[0] == _ASSUMED)
    named = f"the {gpu.name} is not in mla-diag's table" if gpu.name else "the card is unknown; name it with --gpu"
    return CopyRate(rate, f"that of an {card}, because {named}", False)
