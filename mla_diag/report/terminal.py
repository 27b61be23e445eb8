"""The diagnosis for a person at a terminal.

Traces of several ranks of one run are one report: how the ranks differ, what is wrong on which, the ops of the slowest.
Traces that are not ranks of one run are reported one after the other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from mla_diag.diagnose.diagnosis import Cause, Diagnosis, Finding, StageReport, TraceReport, what_a_step_takes
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.words import count
from mla_diag.report.ops_table import ops_table
from mla_diag.report.units import milliseconds
from mla_diag.report.visible import visible

_SEVERITY_STYLES = {"high": "bold red", "medium": "bold yellow", "low": "bold"}
_RANKS = "{:>{}} {:>6} {:>12} {:>12} {:>12}"


def print_report(diagnosis: Diagnosis, console: Console, top: int) -> None:
    """Print a diagnosis.

    Args:
        diagnosis: What to print.
        console: Where to. Its width decides the layout; where it is no terminal nothing is wrapped or cut, because what
            reads it then is another tool.
        top: Ops a stage.
    """
    diagnosis = visible(diagnosis)
    lines = _run(diagnosis, console, top) if _is_one_run(diagnosis) else _one_by_one(diagnosis, console, top)
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=not console.is_terminal)


def _is_one_run(diagnosis: Diagnosis) -> bool:
    """Whether the traces are ranks of one run: no stage has two of the same rank, or of an unknown one."""
    traces = [diagnosis.traces[stage.trace] for stage in diagnosis.stages]
    seen = {(stage.stage, trace.rank_name) for stage, trace in zip(diagnosis.stages, traces, strict=True)}
    several = len(diagnosis.traces) > 1
    return several and len(seen) == len(traces) and all(trace.rank_name is not None for trace in traces)


def _one_by_one(diagnosis: Diagnosis, console: Console, top: int) -> Iterator[Text]:
    for index, trace in enumerate(diagnosis.traces):
        findings = [finding for finding in diagnosis.findings if finding.trace == index]
        if index:
            yield Text()
        yield from _trace_header(trace)
        for finding in findings:
            if finding.stage is None:
                yield Text()
                yield from _finding(finding, console)
        for stage in diagnosis.stages:
            if stage.trace == index:
                yield from (Text(), *_stage_header(stage))
                for finding in findings:
                    if finding.stage is stage.stage:
                        yield from (Text(), *_finding(finding, console))
                yield from (Text(), *ops_table(stage, top, console))


def _run(diagnosis: Diagnosis, console: Console, top: int) -> Iterator[Text]:
    """All ranks of a run, stage by stage; a finding that several ranks have is printed once, with them."""
    for trace in diagnosis.traces:
        yield from _trace_header(trace)
    for finding, ranks in _merged(diagnosis, None):
        yield from (Text(), *_finding(finding, console, ranks))
    for kind in dict.fromkeys(stage.stage for stage in diagnosis.stages):
        stages = [stage for stage in diagnosis.stages if stage.stage is kind]
        taken, _ = what_a_step_takes(stages)
        slowest = max(stages, key=taken)
        yield from (Text(), *_stage_header(slowest))
        if len(stages) > 1:
            name = diagnosis.traces[slowest.trace].rank_name
            yield Text(f"above and below: rank {name}, the slowest; --rank shows another", "dim")
            yield from (Text(), *_ranks(stages, diagnosis))
        for finding, ranks in _merged(diagnosis, kind):
            yield from (Text(), *_finding(finding, console, ranks if len(stages) > 1 else ()))
        yield from (Text(), *ops_table(slowest, top, console))


def _ranks(stages: Sequence[StageReport], diagnosis: Diagnosis) -> Iterator[Text]:
    """How the ranks of a stage differ."""
    named = {str(diagnosis.traces[stage.trace].rank_name): stage for stage in sorted(stages, key=_by_rank(diagnosis))}
    width = max(6, *map(len, named))
    yield Text(_RANKS.format("rank", width, "steps", "device ms", "busy ms", "wall ms"), "dim")
    for name, stage in named.items():
        figures = (stage.device_ms_per_step, stage.busy_ms_per_step, stage.wall_ms_per_step)
        yield Text(_RANKS.format(name, width, stage.steps, *map(milliseconds, figures)))


def _merged(diagnosis: Diagnosis, stage: Stage | None) -> Iterator[tuple[Finding, Sequence[str]]]:
    """A stage's findings of one kind and cause are one: the costliest, with the ranks that have it."""
    alike: dict[tuple[str, Cause | None], list[Finding]] = {}
    for finding in diagnosis.findings:
        if finding.stage is stage:
            alike.setdefault((finding.kind, finding.cause), []).append(finding)
    for group in alike.values():
        worst = max(group, key=lambda finding: finding.cost_ms_per_step or 0.0)
        ordered = sorted(group, key=_by_rank(diagnosis))
        yield worst, list(dict.fromkeys(str(diagnosis.traces[finding.trace].rank_name) for finding in ordered))


def _by_rank(diagnosis: Diagnosis) -> Callable[[StageReport | Finding], tuple[int, ...]]:
    """The order of ranks: by data-parallel group, pipeline stage and TP where traces give them, else by number."""

    def order(part: StageReport | Finding) -> tuple[int, ...]:
        trace = diagnosis.traces[part.trace]
        tensor, data, pipeline = (0, 0, 0) if trace.coordinates is None else trace.coordinates.place
        return data, pipeline, tensor, trace.rank or 0

    return order


def _trace_header(trace: TraceReport) -> Iterator[Text]:
    facts = [trace.device or "device unknown", f"rank {trace.rank_name or 'unknown'}"]
    if trace.label is not None and trace.coordinates is None:
        facts.append(trace.label)
    facts.append(f"{trace.events:,} events")
    if trace.unattributed_ms:
        facts.append(f"{milliseconds(trace.unattributed_ms)} of {milliseconds(trace.device_ms)} ms unattributed")
    yield Text.assemble((trace.path, "bold"), "  ", (" · ".join(facts), "dim"))
    for note in trace.notes:
        yield Text.assemble(("note: ", "yellow"), note)


def _stage_header(stage: StageReport) -> Iterator[Text]:
    names = [f"{count} x {name}" for name, count in stage.step_names.items()]
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} other kinds"]
    left_out = f", {stage.steps_left_out} left out" if stage.steps_left_out else ""
    yield Text.assemble(
        (stage.stage.value.upper(), "bold cyan"),
        f"  {count(stage.steps, 'step')}{left_out}",
        (f"  ({', '.join(names)})", "dim"),
    )
    busy = stage.busy_ms_per_step / stage.wall_ms_per_step if stage.wall_ms_per_step else 0.0
    spread = f" ({milliseconds(stage.device_ms_min)} to {milliseconds(stage.device_ms_max)})" if stage.steps > 1 else ""
    yield Text.assemble(
        "a step: ",
        (f"{milliseconds(stage.device_ms_per_step)} ms", "bold"),
        f" of device time{spread}; the device is busy {milliseconds(stage.busy_ms_per_step)} of "
        f"{milliseconds(stage.wall_ms_per_step)} ms ({busy:.0%})",
    )
    yield Text(f"between steps: {milliseconds(stage.between_steps_ms_per_step)} ms of device time a step", "dim")


def _finding(finding: Finding, console: Console, ranks: Sequence[str] = ()) -> Iterator[Text]:
    """What is wrong, what it rests on, where it comes from, what to do."""
    cost = "" if finding.share is None else f" ({finding.share:.1%})"
    if ranks:
        cost += f" on rank{'' if len(ranks) == 1 else 's'} {', '.join(ranks)}"
    label = f"{finding.severity.upper()} {finding.kind}"
    yield Text.assemble((label, _SEVERITY_STYLES[finding.severity]), f"{cost}: ", (finding.title, "bold"))
    cause = finding.cause
    details = {
        "detail": finding.detail,
        "cause": "" if cause is None else _cause(cause),
        "remedy": finding.remedy,
        "confidence": "" if finding.confidence == "high" else finding.confidence,
    }
    for name, text in details.items():
        if text:
            yield from _hanging(f"  {name:<11}", text, console)


def _cause(cause: Cause) -> str:
    line = "" if cause.line is None else f":{cause.line}"
    return f"{cause.file}{line} {cause.function}" + (" (inferred: the trace has no stack)" if cause.inferred else "")


def _hanging(label: str, text: str, console: Console) -> Iterator[Text]:
    """A label and a text that is wrapped beside it; in a pipe it stays one line."""
    room = console.width - len(label) if console.is_terminal else len(text) + 1
    for number, line in enumerate(textwrap.wrap(text, max(room, 20), break_long_words=False, break_on_hyphens=False)):
        yield Text.assemble((label if number == 0 else " " * len(label), "dim"), line)
