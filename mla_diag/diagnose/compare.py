"""Two diagnoses of the same work, before and after a change: what went, what came, what it saved.

Ops are matched by what they are and not by their kernel's name alone, because a change of type or library renames
kernels: first those that are the same, then those of the same op, place and shape, then kernels of the same name, then
the attention on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum

import msgspec

from mla_diag.diagnose.attention import is_attention
from mla_diag.diagnose.diagnosis import (
    SCHEMA_VERSION,
    Diagnosis,
    Finding,
    Op,
    Source,
    StageReport,
    Tool,
    what_a_step_takes,
)
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.rules import dropped_events
from mla_diag.diagnose.step_spans import Stage

# A change under this part of the shorter step is not told from noise: an op of two recordings of one server differs so.
SAME = 0.002


class Change(str, Enum):
    """What became of an op."""

    WENT = "went"
    CAME = "came"
    GREW = "grew"
    SHRANK = "shrank"
    SAME = "same"


class Side(msgspec.Struct, frozen=True):
    """An op on one side: its time a step, and by its launches."""

    kernel: str
    launches_per_step: float
    ms_per_step: float
    us_per_launch: float


class OpChange(msgspec.Struct, frozen=True):
    """An op before and after; None on the side where it is not."""

    change: Change
    op: str | None
    shapes: list[list[int]] | None
    source: Source | None
    before: Side | None
    after: Side | None
    delta_ms_per_step: float


class StageChange(msgspec.Struct, frozen=True):
    """A stage before and after; times in milliseconds a step, of the slowest rank on each side.

    Attributes:
        stage: The stage.
        before_steps: Steps that the figures before rest on.
        after_steps: Steps that those after rest on.
        before_device_ms: Device time before.
        after_device_ms: Device time after.
        before_busy_ms: Time in which the device did anything before: what overlaps counts once.
        after_busy_ms: The same after.
        before_wall_ms: Wall time before.
        after_wall_ms: Wall time after.
        overlap: Whether kernels overlap on a side by more than 5 % of their time. Launched early (programmatic
            dependent launch), they hold what they wait for the one ahead; on several streams, they run side by side.
            What a step takes is then its busy time, else its device time.
        speedup: What a step takes before over after: above 1 is faster. 0 where that cannot be told: a side has no
            device time, or lost so much that its figures are too low (`Comparison.doubts`).
        ops: What changed, the largest change first, then what did not.
        fixed: Kinds of finding that were there before and are not after; none where the speedup cannot be told.
        new: Kinds of finding that are there after and were not before; the same.
    """

    stage: Stage
    before_steps: int
    after_steps: int
    before_device_ms: float
    after_device_ms: float
    before_busy_ms: float
    after_busy_ms: float
    before_wall_ms: float
    after_wall_ms: float
    overlap: bool
    speedup: float
    ops: list[OpChange]
    fixed: list[str]
    new: list[str]


class Comparison(msgspec.Struct, frozen=True):
    """Two diagnoses, stage by stage.

    Attributes:
        stages: Those that both have.
        only_before: Stages that only the first has.
        only_after: Stages that only the second has.
        doubts: A line for each trace that lost something, so that figures of its side may be wrong.
    """

    stages: list[StageChange]
    only_before: list[Stage]
    only_after: list[Stage]
    doubts: list[str]
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()

    @property
    def slowdown(self) -> float:
        """By how much the stage that lost most takes longer, as a part of what it took; 0 if none does."""
        ratios = [1 / stage.speedup for stage in self.stages if stage.speedup]
        return max(max(ratios, default=1.0) - 1.0, 0.0)


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Compare two diagnoses stage by stage."""
    old, new = _by_stage(before), _by_stage(after)
    too_low = any(finding.evidence.get("too_low") for finding in (*_dropped(before), *_dropped(after)))
    return Comparison(
        stages=[
            _compare_stage(old[stage], new[stage], before.findings, after.findings, too_low=too_low)
            for stage in Stage
            if stage in old and stage in new
        ],
        only_before=[stage for stage in old if stage not in new],
        only_after=[stage for stage in new if stage not in old],
        doubts=[*_doubts("before", before), *_doubts("after", after)],
    )


def _doubts(side: str, diagnosis: Diagnosis) -> Iterator[str]:
    for finding in _dropped(diagnosis):
        which = f", {diagnosis.traces[finding.trace].path}" if len(diagnosis.traces) > 1 else ""
        yield f"{side}{which}: {finding.title}"


def _dropped(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.kind == dropped_events.KIND]


def _by_stage(diagnosis: Diagnosis) -> dict[Stage, list[StageReport]]:
    """The ranks of each stage."""
    found: dict[Stage, list[StageReport]] = defaultdict(list)
    for report in diagnosis.stages:
        found[report.stage].append(report)
    return dict(found)


def _compare_stage(
    ranks_before: Sequence[StageReport],
    ranks_after: Sequence[StageReport],
    findings_before: Sequence[Finding],
    findings_after: Sequence[Finding],
    *,
    too_low: bool,
) -> StageChange:
    taken, overlap = what_a_step_takes((*ranks_before, *ranks_after))
    before, after = max(ranks_before, key=taken), max(ranks_after, key=taken)
    told = taken(before) > 0 and taken(after) > 0 and not too_low
    kinds_before = {finding.kind for finding in findings_before if finding.stage is before.stage}
    kinds_after = {finding.kind for finding in findings_after if finding.stage is after.stage}
    noise = SAME * min(before.device_ms_per_step, after.device_ms_per_step)
    changes = [_change(old, new, noise) for old, new in _match(before.ops, after.ops)]
    return StageChange(
        stage=before.stage,
        before_steps=before.steps,
        after_steps=after.steps,
        before_device_ms=before.device_ms_per_step,
        after_device_ms=after.device_ms_per_step,
        before_busy_ms=before.busy_ms_per_step,
        after_busy_ms=after.busy_ms_per_step,
        before_wall_ms=before.wall_ms_per_step,
        after_wall_ms=after.wall_ms_per_step,
        overlap=overlap,
        speedup=taken(before) / taken(after) if told else 0.0,
        ops=sorted(changes, key=lambda change: (change.change is Change.SAME, -abs(change.delta_ms_per_step))),
        fixed=sorted(kinds_before - kinds_after) if told else [],
        new=sorted(kinds_after - kinds_before) if told else [],
    )


def _match(before: Sequence[Op], after: Sequence[Op]) -> list[tuple[list[Op], list[Op]]]:
    """Groups of ops that are each other's like, each op in one; one side of a group may be empty."""
    groups: list[tuple[list[Op], list[Op]]] = []
    left_before, left_after = list(before), list(after)
    for key in (_identity, _place, _kernel_and_launch, _kernel_name, _role):
        left_before, left_after = _match_by(key, left_before, left_after, groups)
    groups += [([op], []) for op in left_before]
    groups += [([], [op]) for op in left_after]
    return groups


def _match_by(
    key: Callable[[Op], Hashable], before: list[Op], after: list[Op], groups: list[tuple[list[Op], list[Op]]]
) -> tuple[list[Op], list[Op]]:
    """Put ops of equal keys into one group each; return those that are left. A key of None matches nothing."""
    old, new = _by_key(key, before), _by_key(key, after)
    common = [value for value in old if value is not None and value in new]
    groups += [(old[value], new[value]) for value in common]
    return (
        [op for value, ops in old.items() if value not in common for op in ops],
        [op for value, ops in new.items() if value not in common for op in ops],
    )


def _by_key(key: Callable[[Op], Hashable], ops: Sequence[Op]) -> dict[Hashable, list[Op]]:
    found: dict[Hashable, list[Op]] = defaultdict(list)
    for op in ops:
        found[key(op)].append(op)
    return found


def _identity(op: Op) -> Hashable:
    use = op.kernels[0]
    return op.op, op.kernel, _function(op), repr((op.shapes, op.dtypes, use.grid, use.block))


def _place(op: Op) -> Hashable:
    """The op, the function and the shapes; None where there is no op to go by."""
    return None if op.op is None else (op.op, _function(op), repr(op.shapes))


def _kernel_and_launch(op: Op) -> Hashable:
    use = op.kernels[0]
    return short_kernel_name(op.kernel), repr((use.grid, use.block))


def _kernel_name(op: Op) -> Hashable:
    return short_kernel_name(op.kernel)


def _role(op: Op) -> Hashable:
    return "attention" if is_attention(op.kernel) else None


def _function(op: Op) -> tuple[str, str] | None:
    """Where an op is launched from, without the line, which moves with every edit above it."""
    return None if op.source is None else (op.source.file, op.source.function)


def _change(before: list[Op], after: list[Op], noise: float) -> OpChange:
    old, new = _side(before), _side(after)
    delta = (new.ms_per_step if new else 0.0) - (old.ms_per_step if old else 0.0)
    if abs(delta) <= noise:
        change = Change.SAME
    elif old is None or new is None:
        change = Change.CAME if old is None else Change.WENT
    else:
        change = Change.GREW if delta > 0 else Change.SHRANK
    shown = (after or before)[0]
    return OpChange(change, shown.op, shown.shapes, shown.source, old, new, delta)


def _side(ops: list[Op]) -> Side | None:
    if not ops:
        return None
    launches, spent = sum(op.launches_per_step for op in ops), sum(op.ms_per_step for op in ops)
    longest = max(ops, key=lambda op: op.ms_per_step)
    return Side(longest.kernel, launches, spent, 1e3 * spent / launches)
