"""What the kernel benchmark measured, as data: to be written, read again and shown where there is no GPU and no torch.

docs/report-schema.md documents the fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Tool
from mla_diag.errors import UnreadableInputError

LATENT, ROPE, WIDTH = 512, 64, 576


@dataclass(frozen=True)
class Shape:
    """One decode step: query heads on this rank, requests, and tokens a request."""

    heads: int
    batch: int
    context: int


@dataclass(frozen=True)
class Ceilings:
    """What the card does at best: bytes a second, read and written, in copies; FLOP a second in BF16 products."""

    bandwidth: float
    matmul: float

    def roofline_us(self, shape: Shape) -> float:
        """Return the time under which no kernel can come: each referenced FP8 row read once, or the two products."""
        tokens = shape.batch * shape.context
        flops = 2.0 * shape.heads * tokens * (LATENT + ROPE + LATENT)
        return 1e6 * max(tokens * WIDTH / self.bandwidth, flops / self.matmul)


@dataclass(frozen=True)
class Row:
    """One alternative at one shape.

    Attributes:
        shape: the decode step.
        alternative: a key of `ALTERNATIVES`.
        us: median time of a graph replay in microseconds; None where the alternative does not run here.
        error: norm(out - ref) / norm(ref) against float64 on the dequantised pool; NaN, which is None once it has been
            JSON, where some output is not finite.
        roofline_us: the floor at this shape.
        reason: why it does not run.
    """

    shape: Shape
    alternative: str
    us: float | None
    error: float | None
    roofline_us: float
    reason: str = ""


class Record(msgspec.Struct, frozen=True):
    """One run of the benchmark.

    Attributes:
        device: the card.
        ceilings: what it does at best.
        rows: what was measured, in the order of measuring.
    """

    device: str
    ceilings: Ceilings
    rows: list[Row]
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()


def read_record(path: Path) -> Record:
    """Read what `mla-diag bench kernel --json` wrote.

    Raises:
        UnreadableInputError: the file cannot be read or is no such thing.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise UnreadableInputError(f"{path}: cannot be read: {error.strerror}; check --from") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableInputError(f"{path}: not what `mla-diag bench kernel --json` writes ({error})") from error
