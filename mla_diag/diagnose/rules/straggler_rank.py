"""straggler-rank: one rank's own work takes longer than the others', who wait for it in their collectives.

A rule over all ranks of a stage. A rank's own work is its device time without collectives, because in those the time of
the fast ranks is the slow one's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from mla_diag.diagnose.case import severity
from mla_diag.diagnose.communication import is_communication
from mla_diag.diagnose.diagnosis import Finding, StageReport
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.diagnose.thresholds import STRAGGLER_EXCESS

KIND = "straggler-rank"


class _Rank(NamedTuple):
    """One rank's part of a stage.

    Attributes:
        report: All of it.
        kernels: Milliseconds a step of each kernel that is no collective, by its short name.
        communication: Milliseconds a step of those that are.
    """

    report: StageReport
    kernels: dict[str, float]
    communication: float

    @property
    def own(self) -> float:
        """Milliseconds a step of the rank's own work."""
        return sum(self.kernels.values())


def find(reports: Sequence[StageReport]) -> Iterator[Finding]:
    """One finding for each stage of which one rank's own work is the longest by far.

    Ranks are of one job if no two have the same number; traces of several jobs are not compared.
    """
    groups: dict[tuple[Stage, StepSource], list[StageReport]] = {}
    for report in reports:
        if report.rank is not None:
            groups.setdefault((report.stage, report.step_source), []).append(report)
    for group in groups.values():
        if len(group) < 2 or len({report.rank for report in group}) < len(group):
            continue
        ranks = sorted(map(_rank, group), key=lambda rank: rank.own)
        *others, slowest = ranks
        usual = median(rank.own for rank in others)
        waited = median(rank.communication for rank in others) - slowest.communication
        if usual > 0 and slowest.own >= (1 + STRAGGLER_EXCESS) * usual and waited > 0:
            yield _finding(slowest, others, usual, waited)


def _rank(report: StageReport) -> _Rank:
    kernels: defaultdict[str, float] = defaultdict(float)
    communication = 0.0
    for op in report.ops:
        for use in op.kernels:
            if is_communication(use.kernel):
                communication += use.ms_per_step
            else:
                kernels[short_kernel_name(use.kernel)] += use.ms_per_step
    return _Rank(report, kernels, communication)


def _finding(slowest: _Rank, others: list[_Rank], usual: float, waited: float) -> Finding:
    report, excess = slowest.report, slowest.own - usual
    differences = {
        kernel: spent - median(other.kernels.get(kernel, 0.0) for other in others)
        for kernel, spent in slowest.kernels.items()
    }
    kernel = max(differences, key=lambda name: differences[name])
    same_steps = all(other.report.step_names == report.step_names for other in others)
    cost = min(excess, waited)
    share = cost / report.device_ms_per_step
    return Finding(
        kind=KIND,
        severity=severity(share),
        title=(
            f"rank {report.rank} works {excess:.2f} ms a step longer than {_others(others)} "
            f"({slowest.own:.2f} against {usual:.2f} ms), most of it in {kernel}"
        ),
        detail=f"in collectives it spends {waited:.2f} ms less than they do: that long they wait for it",
        stage=report.stage,
        trace=report.trace,
        rank=report.rank,
        cost_ms_per_step=cost,
        share=share,
        evidence={
            "ranks": len(others) + 1,
            "own_ms_per_step": slowest.own,
            "own_ms_per_step_of_others": usual,
            "excess_ms_per_step": excess,
            "excess_share": excess / usual,
            "communication_ms_per_step": slowest.communication,
            "communication_ms_per_step_of_others": slowest.communication + waited,
            "kernel": kernel,
            "kernel_excess_ms_per_step": differences[kernel],
            "same_steps": same_steps,
        },
        cause=None,
        remedy=(
            "compare its kernels with another rank's: as many but slower is the card (clocks, power, other work), "
            "more of them is placement (experts, data-parallel load)"
        ),
        confidence=_confidence(same_steps, waited >= excess / 2),
    )


def _others(others: list[_Rank]) -> str:
    return f"rank {others[0].report.rank}" if len(others) == 1 else f"the other {len(others)} ranks usually do"


def _confidence(same_steps: bool, waits_match: bool) -> str:
    """Sure if the ranks did the same steps and the others waited for about as long as this one worked longer."""
    if same_steps and waits_match:
        return "high"
    return "medium" if waits_match else "low"
