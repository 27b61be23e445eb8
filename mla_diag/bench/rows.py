"""What a kernel benchmark measures and finds; apart from it, so that reading its results needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LATENT", "ROPE", "WIDTH", "Ceilings", "Row", "Shape"]

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
        alternative: what was measured.
        us: median time of a graph replay in microseconds; None where the alternative does not run here.
        error: norm(out - ref) / norm(ref) against float64 on the dequantised pool; None like `us`.
        roofline_us: the floor at this shape.
        reason: why it does not run.
    """

    shape: Shape
    alternative: str
    us: float | None
    error: float | None
    roofline_us: float
    reason: str = ""
