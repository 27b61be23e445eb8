"""A comparison for a person at a terminal: the step before and after, then what changed it, the largest first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from mla_diag.diagnose.compare import Change, Comparison, OpChange, Side, StageChange
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.words import count
from mla_diag.report.units import milliseconds
from mla_diag.report.visible import visible

_ROW = "{:>9} {:>9} {:>10}  {:>17}  {:<7} "
_STYLES = {Change.WENT: "green", Change.SHRANK: "green", Change.CAME: "red", Change.GREW: "red", Change.SAME: "dim"}


def print_comparison(comparison: Comparison, console: Console, top: int) -> None:
    """Print a comparison.

    Args:
        comparison: What to print.
        console: Where to.
        top: Ops a stage.
    """
    for doubt in visible(comparison.doubts):
        console.print(Text(f"dropped-events {doubt}", "yellow"), soft_wrap=True)
    for number, stage in enumerate(visible(comparison.stages)):
        for line in [*([Text()] if number else []), *_header(stage), Text(), *_ops(stage, top, console)]:
            line.rstrip()
            console.print(line, soft_wrap=not console.is_terminal)
    for names, which in ((comparison.only_before, "before"), (comparison.only_after, "after")):
        if names:
            console.print(Text(f"only {which}: {', '.join(stage.value for stage in names)}", "yellow"))


def _header(stage: StageChange) -> Iterator[Text]:
    yield Text.assemble(
        (stage.stage.value.upper(), "bold cyan"),
        (f"  {count(stage.before_steps, 'step')} before, {stage.after_steps} after", "dim"),
    )
    device = f"{milliseconds(stage.before_device_ms)} to {milliseconds(stage.after_device_ms)} ms of device time"
    busy = f"busy {milliseconds(stage.before_busy_ms)} to {milliseconds(stage.after_busy_ms)} ms"
    yield Text.assemble(
        "a step: ",
        (busy if stage.overlap else device, "bold"),
        ", ",
        _ratio(stage.speedup),
        f"; {device}" if stage.overlap else "",
        f"; wall time {milliseconds(stage.before_wall_ms)} to {milliseconds(stage.after_wall_ms)} ms",
    )
    if stage.fixed:
        yield Text.assemble(("fixed: ", "green"), ", ".join(stage.fixed))
    if stage.new:
        yield Text.assemble(("found now: ", "yellow"), ", ".join(stage.new))
    if stage.overlap:
        yield Text("kernels overlap: one that is launched early holds in its row what it waited", "dim")


def _ratio(speedup: float) -> tuple[str, str]:
    """How many times as fast or slow, and the style of that; a speedup of 0 stands for one that cannot be told."""
    if not speedup:
        return "not to be compared", "bold yellow"
    ratio = max(speedup, 1 / speedup)
    times = f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"
    if times == "1":
        return "as fast", "bold"
    return (f"{times} times as fast", "bold green") if speedup > 1 else (f"{times} times as slow", "bold red")


def _ops(stage: StageChange, top: int, console: Console) -> Iterator[Text]:
    yield Text(_ROW.format("ms before", "ms after", "change", "us a launch", "") + "op and kernel", "dim")
    shown, rest = stage.ops[:top], stage.ops[top:]
    for op in shown:
        row = _ROW.format(
            _milliseconds(op.before), _milliseconds(op.after), _signed(op), _a_launch(op), op.change.value
        )
        text = row + _what(op)
        room = console.width if console.is_terminal else len(text)
        yield Text(text if len(text) <= room else text[: room - 1] + "…", _STYLES[op.change])
    if rest:
        before = sum(op.before.ms_per_step for op in rest if op.before)
        after = sum(op.after.ms_per_step for op in rest if op.after)
        row = _ROW.format(milliseconds(before), milliseconds(after), f"{after - before:+.3f}", "", "")
        yield Text(f"{row}{len(rest)} more ops: --top {len(stage.ops)} shows them", "dim")


def _what(op: OpChange) -> str:
    side = op.after or op.before
    kernel = short_kernel_name(side.kernel) if side else ""
    old = op.before and op.after and short_kernel_name(op.before.kernel)
    renamed = f" (was {old})" if old and old != kernel else ""
    place = f"  {op.source.file.rpartition('/')[2]} {op.source.function}" if op.source else ""
    return f"{op.op}  {kernel}{renamed}{place}" if op.op else f"{kernel}{renamed}{place}"


def _milliseconds(side: Side | None) -> str:
    return "-" if side is None else milliseconds(side.ms_per_step)


def _signed(op: OpChange) -> str:
    return f"{'+' if op.delta_ms_per_step >= 0 else '-'}{milliseconds(abs(op.delta_ms_per_step))}"


def _a_launch(op: OpChange) -> str:
    before, after = ("-" if side is None else f"{side.us_per_launch:,.1f}" for side in (op.before, op.after))
    return f"{before} to {after}"
