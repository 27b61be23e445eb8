"""The gap between what a decode step takes and the least that it can take on its card, with what both rest on."""

from __future__ import annotations

import msgspec


class Floor(msgspec.Struct, frozen=True):
    """The least that a decode step can take on one rank.

    Attributes:
        ms: Milliseconds: the bytes over the bandwidth.
        weight_bytes: Bytes of the weights that a step of this batch reads.
        kv_bytes: Bytes of the KV rows that its contexts need.
        bandwidth: Bytes a second, the card's by its datasheet.
        bandwidth_source: The datasheet.
        batch: Requests on this rank's attention.
        context: Tokens of each.
        experts_read: Distinct experts a layer that the batch is expected to touch, if it routes evenly; None without.
        weight_bits: Bits a weight, scales included.
        quantization: The method behind that.
    """

    ms: float
    weight_bytes: int
    kv_bytes: int
    bandwidth: float
    bandwidth_source: str
    batch: int
    context: int
    experts_read: float | None
    weight_bits: float
    quantization: str | None


class Gap(msgspec.Struct, frozen=True):
    """A decode step beside its floor; milliseconds.

    Attributes:
        step_ms: Device time of a step that was measured; or predicted, the least that one takes with its copy.
        measured: Which of the two.
        wall_ms: Wall time of the measured step; None for a prediction.
        gap_ms: The step less the floor. Below 0 if the floor's inputs are not the step's.
        copy_ms: Of the step, the copy of the whole KV pool.
        trace: Index of the trace that was measured; None for a prediction.
        copy_by_flags_ms: What that copy takes of an unfixed server with these flags, by arithmetic.
            None where such a server copies nothing, or its cost is unknown.
    """

    step_ms: float
    measured: bool
    wall_ms: float | None
    gap_ms: float
    copy_ms: float
    trace: int | None
    copy_by_flags_ms: float | None = None
