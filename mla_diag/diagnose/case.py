"""What a rule looks at: one stage of one rank's trace, with everything known about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mla_diag.diagnose.attention import AttentionCopy, copies_before_attention
from mla_diag.diagnose.diagnosis import Cause, Finding, Op, StageReport
from mla_diag.diagnose.gpu import Gpu
from mla_diag.diagnose.pool import Pool
from mla_diag.diagnose.ranking import RankedOp
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.steps import Steps
from mla_diag.diagnose.thresholds import HIGH_SHARE, MEDIUM_SHARE
from mla_diag.trace.columns import Ints
from mla_diag.trace.link import Links
from mla_diag.trace.model import Trace


@dataclass(frozen=True)
class StageCase:
    """One stage of one rank's trace.

    Attributes:
        trace: The trace.
        links: What launched each device event.
        steps: The step of each device event.
        report: The stage's figures; its ops are those of `ranked`, in the same order.
        ranked: The ops with the device events behind each.
        gpu: The card.
        pools: The KV pools that the trace or the server gives away, first the one that is most of the work.
        server: What the server says of itself, if it was given.
    """

    trace: Trace
    links: Links
    steps: Steps
    report: StageReport
    ranked: list[RankedOp]
    gpu: Gpu
    pools: list[Pool]
    server: ServerInfo | None = field(default=None)

    @cached_property
    def chosen(self) -> Ints:
        """The steps that count."""
        return self.steps.of(self.report.stage)

    @cached_property
    def events(self) -> Ints:
        """The device events of those steps."""
        return np.flatnonzero(np.isin(self.steps.inside, self.chosen))

    @cached_property
    def attention_copies(self) -> dict[int, AttentionCopy]:
        """For each of those device events that is part of a copy right before an attention kernel, that copy."""
        return {event: copy for copy in copies_before_attention(self.trace, self.events) for event in copy.events}

    def finding(
        self,
        kind: str,
        title: str,
        *,
        cost_ms: float | None,
        share: float | None,
        evidence: dict[str, Any],
        remedy: str,
        confidence: str,
        cause: Cause | None = None,
        detail: str = "",
    ) -> Finding:
        """A finding about this stage, its severity by the share."""
        return Finding(
            kind=kind,
            severity=severity(share),
            title=title,
            detail=detail,
            stage=self.report.stage,
            trace=self.report.trace,
            rank=self.report.rank,
            cost_ms_per_step=cost_ms,
            share=share,
            evidence=evidence,
            cause=cause,
            remedy=remedy,
            confidence=confidence,
        )


def severity(share: float | None) -> str:
    """How much a finding matters by the part of the step that it costs."""
    if share is None or share < MEDIUM_SHARE:
        return "low"
    return "high" if share >= HIGH_SHARE else "medium"


def cause_of(op: Op) -> Cause | None:
    """The function that the trace names for an op."""
    return None if op.source is None else Cause(op.source.file, op.source.line, op.source.function, inferred=False)
