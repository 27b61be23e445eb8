"""What mla-diag says of traces: the one schema behind every output, as types.

docs/report-schema.md documents the fields for readers of the JSON; `SCHEMA_VERSION` changes when they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mla_diag._version import __version__
from mla_diag.diagnose.gap import Floor, Gap
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.trace.rank import Coordinates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

SCHEMA_VERSION = 1
_OVERLAP = 0.05  # of device time: less is not worth another measure


class Tool(msgspec.Struct, frozen=True):
    """Who made the report."""

    name: str = "mla-diag"
    version: str = __version__


class Source(msgspec.Struct, frozen=True):
    """The innermost serving function around a launch; `line` is where the function begins."""

    file: str
    line: int
    function: str


class KernelUse(msgspec.Struct, frozen=True):
    """One kernel of an op; times in milliseconds, geometry in blocks and threads."""

    kernel: str
    launches_per_step: float
    ms_per_step: float
    grid: list[int] | None
    block: list[int] | None


class Op(msgspec.Struct, frozen=True):
    """One row of the ranking: an op on inputs of one shape, launched from one place.

    Attributes:
        op: The CPU op that launched it, or None where no op did (graph replays, Triton and other direct launches).
        kernel: Its kernel, or of several the one that takes the most time.
        kernels: All of them, by time.
        launched_by: `op`, `graph` (replayed from a CUDA or HIP graph), `direct` (no op around the launch) or `unknown`
            (the launch is not in the trace).
        mapped: Whether op, shapes and source are those of its like in another trace (`--mapping`).
        launches_per_step: Device events a step.
        calls_per_step: Calls of the op a step; equal to the launches where there is no op.
        ms_per_step: Device time a step, overlaps in full.
        share: Of the stage's device time a step, 0 to 1.
        shapes: Of the tensors among the op's inputs; None where none were recorded.
        dtypes: Of the same tensors.
        bytes_per_launch: Device memory read and written by one launch, on average; None where it is not known.
        bytes_source: Where the bytes come from: `shapes`, `memcpy` (its own size), `geometry` (the launch, right to
            within a block) or `geometry-least` (the same, where the kernel does not name the type that it reads).
        bytes_per_second: The rate at which it moved them.
        source: Where it was launched from; None without Python stacks.
    """

    op: str | None
    kernel: str
    kernels: list[KernelUse]
    launched_by: str
    mapped: bool
    launches_per_step: float
    calls_per_step: float
    ms_per_step: float
    share: float
    shapes: list[list[int]] | None
    dtypes: list[str | None] | None
    bytes_per_launch: int | None
    bytes_source: str | None
    bytes_per_second: float | None
    source: Source | None


class Cause(msgspec.Struct, frozen=True):
    """Where a finding comes from: a function that the trace names, or one that is inferred.

    Attributes:
        file: From the package on.
        line: Where the function begins, or, inferred, where the release has the expression; None where unknown.
        function: Its name.
        inferred: Whether the trace itself does not show it: from the kernels around it, and the server's release.
    """

    file: str
    line: int | None
    function: str
    inferred: bool


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a step wastes, or a reason not to trust the figures.

    Attributes:
        kind: The rule's id, as `--fail-on` and `--ignore` take it; docs/findings/ has a page for each.
        severity: `high` from a tenth of the step on, `medium` from a thirtieth, else `low`.
        title: One sentence with the figures that matter most.
        detail: The rest of what an engineer would ask, in words.
        stage: The stage it is of; None if it is of the whole trace.
        trace: Index into the report's traces.
        rank: That trace's rank.
        cost_ms_per_step: What it costs a step; None where the trace does not tell.
        share: The same as a part of the step's device time, or for what the device does not do, of its wall time.
        evidence: What it rests on, by name; the kind's page says what each is.
        cause: Where it comes from; None where unknown.
        remedy: What to do, one sentence or two.
        confidence: `high`, `medium` or `low`.
    """

    kind: str
    severity: str
    title: str
    detail: str
    stage: Stage | None
    trace: int
    rank: int | None
    cost_ms_per_step: float | None
    share: float | None
    evidence: dict[str, Any]
    cause: Cause | None
    remedy: str
    confidence: str


_OP_COLUMNS = [name for name in Op.__struct_fields__ if name not in ("kernels", "source")]


class StageReport(msgspec.Struct, frozen=True):
    """What one stage of one rank does in a step; times in milliseconds.

    Attributes:
        stage: decode, prefill, mixed or other.
        trace: Index into the report's traces.
        rank: That trace's rank.
        steps: Complete steps that the figures rest on.
        steps_left_out: Steps that are incomplete or have no device work, and warm-up steps where asked for.
        step_source: What told the steps apart.
        step_names: The distinct names of the steps and how many there are of each.
        device_ms_per_step: The sum over device events; with overlaps on a stream this is more than `busy`.
        device_ms_min: Of the step that took the least.
        device_ms_max: Of the step that took the most.
        busy_ms_per_step: Time in which at least one device event ran.
        wall_ms_per_step: From a step's first device event to the next step's first, the median; for the only step of a
            trace, to its last.
        between_steps_ms_per_step: Device time of what was launched after a step and before the next: sampling, copies.
        ops: By time.
    """

    stage: Stage
    trace: int
    rank: int | None
    steps: int
    steps_left_out: int
    step_source: StepSource
    step_names: dict[str, int]
    device_ms_per_step: float
    device_ms_min: float
    device_ms_max: float
    busy_ms_per_step: float
    wall_ms_per_step: float
    between_steps_ms_per_step: float
    ops: list[Op]


def what_a_step_takes(stages: Sequence[StageReport]) -> tuple[Callable[[StageReport], float], bool]:
    """The measure by which steps of a stage are slower or faster, on whatever rank or side.

    That is device time; where kernels overlap on any of them by more than 5 % of their time, it is busy time, because
    kernels that are launched early hold what they wait, and those on several streams run side by side.

    Returns:
        What gives a report's milliseconds a step, and whether it is busy time.
    """
    overlap = any(stage.busy_ms_per_step < (1 - _OVERLAP) * stage.device_ms_per_step for stage in stages)
    return (lambda stage: stage.busy_ms_per_step if overlap else stage.device_ms_per_step), overlap


class TraceReport(msgspec.Struct, frozen=True):
    """One trace, or one rank's part of a merged one.

    Attributes:
        path: As given.
        rank: The number of the rank in its replica, or None where neither the trace nor its name says.
        label: The rank's label in a merged trace.
        device: The GPU's name.
        peak_bytes_per_second: What its memory moves by the maker's datasheet; None for a card that is not known here.
        peak_source: That datasheet.
        events: Events in the file.
        device_ms: Device time in the whole trace.
        before_first_step_ms: Device time of what was launched before the first step.
        left_out_ms: Device time in steps that do not count.
        unattributed_ms: Device time whose launch is not in the trace and that no device span covers.
        notes: What the trace could not tell, and what to do about it.
        coordinates: TP, DP, PP and EP rank, as far as the file's name or the label gives them; None if they give none.
    """

    path: str
    rank: int | None
    label: str | None
    device: str | None
    peak_bytes_per_second: float | None
    peak_source: str | None
    events: int
    device_ms: float
    before_first_step_ms: float
    left_out_ms: float
    unattributed_ms: float
    notes: list[str]
    coordinates: Coordinates | None = None

    @property
    def rank_name(self) -> str | None:
        """What tells the rank from the others of a run: its number, or its coordinates where those are more than TP."""
        if self.coordinates is not None and self.coordinates != Coordinates(tp=self.coordinates.tp):
            return str(self.coordinates)
        return None if self.rank is None else str(self.rank)


class Diagnosis(msgspec.Struct, frozen=True):
    """All that mla-diag says of some traces.

    Attributes:
        traces: What was read.
        stages: One for each stage of each trace.
        findings: What is wrong, worst first.
        unreadable: A line for each path that gave no report.
        floor: The least that a decode step can take, where the model and the card are known (`profile`).
        gap: A measured decode step beside it.
    """

    traces: list[TraceReport]
    stages: list[StageReport]
    findings: list[Finding] = []
    unreadable: list[str] = []
    floor: Floor | None = None
    gap: Gap | None = None
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()

    @property
    def ops(self) -> pd.DataFrame:
        """Every op of every stage, a row each: its trace, rank and stage, its fields, its source in three columns."""
        import pandas as pd  # noqa: PLC0415 - half a second that only users of the library pay

        rows = []
        for stage in self.stages:
            for op in stage.ops:
                row = {"trace": stage.trace, "rank": stage.rank, "stage": stage.stage.value}
                row |= {name: getattr(op, name) for name in _OP_COLUMNS}
                row |= {name: getattr(op.source, name, None) for name in Source.__struct_fields__}
                rows.append(row)
        return pd.DataFrame(rows, columns=["trace", "rank", "stage", *_OP_COLUMNS, *Source.__struct_fields__])

    @property
    def steps(self) -> pd.DataFrame:
        """Every stage of every trace, a row each, without its ops."""
        import pandas as pd  # noqa: PLC0415 - see `ops`

        columns = [name for name in StageReport.__struct_fields__ if name != "ops"]
        plain = [msgspec.to_builtins(stage) for stage in self.stages]
        return pd.DataFrame([[stage[name] for name in columns] for stage in plain], columns=columns)
