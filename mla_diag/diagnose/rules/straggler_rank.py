"""straggler-rank: one rank's own work takes longer than the others', who wait for it in their collectives.

A rule over all ranks of a stage. A rank's own work is its device time without collectives, because in those the time of
the fast ranks is the slow one's. Compared are ranks that have the same work and wait for each other: those of one
pipeline stage (others have other layers) and one data-parallel group. Replicas of the model share no collective.
Groups of data-parallel attention do, in the layers after it, but each has its own batch: only those with the same are
compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from mla_diag.diagnose.case import severity
from mla_diag.diagnose.communication import is_communication
from mla_diag.diagnose.diagnosis import Finding, StageReport, TraceReport
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.pool import batch_sizes
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.diagnose.thresholds import STRAGGLER_EXCESS

KIND = "straggler-rank"


class _Rank(NamedTuple):
    """One rank's part of a stage.

    Attributes:
        report: All of it.
        trace: Its trace.
        kernels: Milliseconds a step of each kernel that is no collective, by its short name.
        communication: Milliseconds a step of those that are.
    """

    report: StageReport
    trace: TraceReport
    kernels: dict[str, float]
    communication: float

    @property
    def own(self) -> float:
        """Milliseconds a step of the rank's own work."""
        return sum(self.kernels.values())

    @property
    def place(self) -> tuple[int | None, int, int]:
        """TP rank, data-parallel group and pipeline stage; of a trace that gives none of them, its number."""
        coordinates = self.trace.coordinates
        return (self.trace.rank, 0, 0) if coordinates is None else coordinates.place


def find(reports: Sequence[StageReport], traces: Sequence[TraceReport]) -> Iterator[Finding]:
    """One finding for each group of comparable ranks of which one's own work is the longest by far.

    Ranks are of one job if no two are the same; traces of several jobs are not compared.
    """
    stages: defaultdict[tuple[Stage, StepSource, int], list[_Rank]] = defaultdict(list)
    for report in reports:
        rank = _rank(report, traces[report.trace])
        if rank.trace.rank_name is not None:
            stages[report.stage, report.step_source, rank.place[2]].append(rank)
    for ranks in stages.values():
        if len({rank.trace.rank_name for rank in ranks}) == len(ranks):
            for group in _comparable(ranks):
                yield from _straggler(group)


def _comparable(ranks: list[_Rank]) -> Iterator[list[_Rank]]:
    """The ranks of one stage by data-parallel group; groups of one model whose batches are the same are together."""
    groups: defaultdict[int, list[_Rank]] = defaultdict(list)
    for rank in ranks:
        groups[rank.place[1]].append(rank)
    # With data-parallel attention TP ranks go through all groups; replicas have each their own, and the same ones.
    replicas = len({rank.place[0] for rank in ranks}) < len(ranks)
    alike: defaultdict[object, list[_Rank]] = defaultdict(list)
    for number, group in groups.items():
        steps = frozenset(name for rank in group for name in rank.report.step_names)
        same_work = not replicas and all(map(batch_sizes, steps))
        alike[steps if same_work else number] += group
    yield from alike.values()


def _straggler(group: list[_Rank]) -> Iterator[Finding]:
    if len(group) < 2:
        return
    *others, slowest = sorted(group, key=lambda rank: rank.own)
    usual = median(rank.own for rank in others)
    waited = median(rank.communication for rank in others) - slowest.communication
    if usual > 0 and slowest.own >= (1 + STRAGGLER_EXCESS) * usual and waited > 0:
        yield _finding(slowest, others, usual, waited)


def _rank(report: StageReport, trace: TraceReport) -> _Rank:
    kernels: defaultdict[str, float] = defaultdict(float)
    communication = 0.0
    for op in report.ops:
        for use in op.kernels:
            if is_communication(use.kernel):
                communication += use.ms_per_step
            else:
                kernels[short_kernel_name(use.kernel)] += use.ms_per_step
    return _Rank(report, trace, kernels, communication)


def _finding(slowest: _Rank, others: list[_Rank], usual: float, waited: float) -> Finding:
    report, excess = slowest.report, slowest.own - usual
    differences = {
        kernel: spent - median(other.kernels.get(kernel, 0.0) for other in others)
        for kernel, spent in slowest.kernels.items()
    }
    kernel = max(differences, key=lambda name: differences[name])
    groups = len({rank.place[1] for rank in (slowest, *others)})
    same_steps = all(other.report.step_names == report.step_names for other in others)
    cost = min(excess, waited)
    share = cost / report.device_ms_per_step
    return Finding(
        kind=KIND,
        severity=severity(share),
        title=(
            f"rank {slowest.trace.rank_name} works {excess:.2f} ms a step longer than {_others(others)} "
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
            "data_parallel_groups": groups,
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
        confidence=_confidence(same_steps and groups == 1, waited >= excess / 2),
    )


def _others(others: list[_Rank]) -> str:
    return f"rank {others[0].trace.rank_name}" if len(others) == 1 else f"the other {len(others)} ranks usually do"


def _confidence(same_work: bool, waits_match: bool) -> str:
    """Sure if the ranks had the same work and the others waited for about as long as this one worked longer.

    Ranks of several data-parallel groups do not: their contexts may differ where their batches do not.
    """
    if same_work and waits_match:
        return "high"
    return "medium" if waits_match else "low"
