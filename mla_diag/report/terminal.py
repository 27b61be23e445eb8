"""The diagnosis for a person at a terminal: one line an op where it is wide or piped, a few where it is narrow."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from mla_diag.diagnose.diagnosis import Cause, Diagnosis, Finding, Op, StageReport, TraceReport
from mla_diag.diagnose.kernel_names import short_kernel_name

WIDE = 120
_FIGURES = "{:>9} {:>6} {:>8}  "
_INDENT = len(_FIGURES.format("", "", ""))
_GAP = 2
# On a wide terminal the three text columns share what the figures leave; what an op is needs the most.
_COLUMN_SHARES = (0.38, 0.30, 0.32)
_STRIPPED_DIRECTORIES = ("sglang/srt/layers/", "sglang/srt/", "sglang/")
_SEVERITY_STYLES = {"high": "bold red", "medium": "bold yellow", "low": "bold"}
_HEADINGS = ("op and kernel", "shapes and types", "launched from")


def print_report(diagnosis: Diagnosis, console: Console, top: int) -> None:
    """Print every trace with its stages.

    Args:
        diagnosis: What to print.
        console: Where to. Its width decides the layout; where it is no terminal nothing is wrapped or cut, because what
            reads it then is another tool.
        top: Ops a stage.
    """
    for index, trace in enumerate(diagnosis.traces):
        findings = [finding for finding in diagnosis.findings if finding.trace == index]
        lines = list(_trace_header(trace))
        for finding in findings:
            if finding.stage is None:
                lines += [Text(), *_finding(finding, console)]
        for stage in diagnosis.stages:
            if stage.trace == index:
                lines += [Text(), *_stage_header(stage)]
                for finding in findings:
                    if finding.stage is stage.stage:
                        lines += [Text(), *_finding(finding, console)]
                lines += [Text(), *_ranking(stage, top, console)]
        if index:
            lines.insert(0, Text())
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=not console.is_terminal)


def _trace_header(trace: TraceReport) -> Iterator[Text]:
    facts = [trace.device or "device unknown", "rank unknown" if trace.rank is None else f"rank {trace.rank}"]
    if trace.label is not None:
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
        f"  {stage.steps} step{'' if stage.steps == 1 else 's'}{left_out}",
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


def _finding(finding: Finding, console: Console) -> Iterator[Text]:
    """What is wrong, what it rests on, where it comes from, what to do."""
    cost = "" if finding.share is None else f" ({finding.share:.1%})"
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


def _ranking(stage: StageReport, top: int, console: Console) -> Iterator[Text]:
    shown, rest = stage.ops[:top], stage.ops[top:]
    cells = [(_what(op), _inputs(op), _where(op)) for op in shown]
    wide = not console.is_terminal or console.width >= WIDE
    if wide:
        widths = _column_widths(cells, console.width - _INDENT if console.is_terminal else None)
        yield Text(_FIGURES.format("ms/step", "share", "launches") + _columns(_HEADINGS, widths), "dim")
        for op, row in zip(shown, cells, strict=True):
            yield Text(_figures(op) + _columns(row, widths), _emphasis(op))
    else:
        yield Text(_FIGURES.format("ms/step", "share", "launches") + ", ".join(_HEADINGS), "dim")
        for op, (what, *details) in zip(shown, cells, strict=True):
            room = console.width - _INDENT
            yield Text(_figures(op) + _cut(what, room), _emphasis(op))
            inputs, where = details
            for detail in filter(None, (_cut(inputs, room), _cut_head(where, room))):
                yield Text(" " * _INDENT + detail, "dim")
    if rest:
        spent, share = sum(op.ms_per_step for op in rest), sum(op.share for op in rest)
        launches = sum(op.launches_per_step for op in rest)
        figures = _FIGURES.format(milliseconds(spent), f"{share:.1%}", f"{launches:,.6g}")
        yield Text(f"{figures}in {len(rest)} more ops: --top {len(stage.ops)} shows them", "dim")


def _column_widths(cells: Sequence[Sequence[str]], room: int | None) -> list[int]:
    """As wide as the widest cell; where there is too little room, columns that want more than their part share it."""
    wanted = [max(map(len, column)) for column in zip(_HEADINGS, *cells, strict=True)]
    if room is None or sum(wanted) + 2 * _GAP <= room:
        return wanted
    room -= 2 * _GAP
    part = [int(room * share) for share in _COLUMN_SHARES]
    modest = [min(want, have) for want, have in zip(wanted, part, strict=True)]
    spare = room - sum(modest)
    for column, want in enumerate(wanted):
        more = min(spare, want - modest[column])
        modest[column] += more
        spare -= more
    return modest


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    what, inputs, where = (
        cut(cell, width).ljust(width) for cut, cell, width in zip((_cut, _cut, _cut_head), row, widths, strict=True)
    )
    return (" " * _GAP).join((what, inputs, where))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _cut_head(text: str, width: int) -> str:
    """Of a path with a function the end tells more."""
    return text if len(text) <= width else "…" + text[len(text) - max(width - 1, 0) :]


def _figures(op: Op) -> str:
    return _FIGURES.format(milliseconds(op.ms_per_step), f"{op.share:.1%}", f"{op.launches_per_step:,.6g}")


def _emphasis(op: Op) -> str:
    return "bold red" if op.share >= 0.5 else "bold" if op.share >= 0.1 else ""


def _what(op: Op) -> str:
    kernel = short_kernel_name(op.kernel) + (f" +{len(op.kernels) - 1}" if len(op.kernels) > 1 else "")
    return f"{op.op or f'({op.launched_by})'}  {kernel}"


def _inputs(op: Op) -> str:
    """Shapes and types, or where no op has recorded them, the launch geometry that stands for them."""
    moved = "" if op.bytes_per_launch is None else f"{size(op.bytes_per_launch)} "
    if not op.shapes or not op.dtypes:
        use = op.kernels[0]
        geometry = f"grid {_extents(use.grid)} block {_extents(use.block)}" if use.grid and use.block else ""
        return moved + geometry
    if len(set(op.dtypes)) == 1:
        kinds = op.dtypes[0] or "?"
    else:
        kinds = (" from " if op.op == "aten::copy_" else " ").join(kind or "?" for kind in op.dtypes[:4])
    shapes = [f"[{','.join(map(str, shape))}]" for shape in op.shapes]
    if len(set(shapes)) == 1:
        shapes = shapes[:1]
    return f"{moved}{' '.join(shapes[:4])}{' …' if len(shapes) > 4 else ''} {kinds}"


def _where(op: Op) -> str:
    if op.source is None:
        return ""
    path = op.source.file
    for directory in _STRIPPED_DIRECTORIES:
        if path.startswith(directory):
            path = path.removeprefix(directory)
            break
    return f"{path}:{op.source.line} {op.source.function}"


def _extents(extents: list[int]) -> str:
    """A grid or block without the dimensions of one that it ends with."""
    used = max((place for place, extent in enumerate(extents, 1) if extent != 1), default=1)
    return "x".join(map(str, extents[:used]))


def milliseconds(value: float) -> str:
    """Four or more significant digits, so that figures of one column can be compared."""
    return f"{value:,.2f}" if value >= 10 else f"{value:.3f}"


def size(count: int) -> str:
    """Bytes in decimal units, as bandwidths are given."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:,.4g} {unit}"
    return f"{count} B"
