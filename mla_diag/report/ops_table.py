"""The ranking of a stage's ops as text: one line an op where it is wide or piped, a few where it is narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from mla_diag.diagnose.diagnosis import Op, StageReport
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.report.units import milliseconds, size

WIDE = 120
_FIGURES = "{:>9} {:>6} {:>8}  "
_INDENT = len(_FIGURES.format("", "", ""))
_GAP = 2
# On a wide terminal the three text columns share what the figures leave; what an op is needs the most.
_COLUMN_SHARES = (0.38, 0.30, 0.32)
_STRIPPED_DIRECTORIES = ("sglang/srt/layers/", "sglang/srt/", "sglang/")
# Below this an op is over before its rate says anything of the memory.
_RATED_BYTES = 1_000_000
_HEADINGS = ("op and kernel", "shapes and types", "launched from")


def ops_table(stage: StageReport, top: int, console: Console) -> Iterator[Text]:
    """The ops of a stage that take the most time.

    Args:
        stage: The stage.
        top: How many.
        console: Where they will be printed: its width decides how many lines an op has.
    """
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
    """Shapes and types, or where no op has recorded them, the launch geometry that stands for them; then the bytes."""
    if not op.shapes or not op.dtypes:
        use = op.kernels[0]
        what = f"grid {_extents(use.grid)} block {_extents(use.block)}" if use.grid and use.block else ""
    else:
        what = f"{_shapes(op.shapes)} {_types(op)}"
    return ", ".join(filter(None, (what, _traffic(op))))


def _shapes(shapes: list[list[int]]) -> str:
    texts = [f"[{','.join(map(str, shape))}]" for shape in shapes]
    if len(set(texts)) == 1:
        texts = texts[:1]
    return " ".join(texts[:4]) + (" …" if len(texts) > 4 else "")


def _types(op: Op) -> str:
    kinds = op.dtypes or []
    if len(set(kinds)) == 1:
        return kinds[0] or "?"
    return (" from " if op.op == "aten::copy_" else " ").join(kind or "?" for kind in kinds[:4])


def _traffic(op: Op) -> str:
    if op.bytes_per_launch is None:
        return ""
    rated = op.bytes_per_second is not None and op.bytes_per_launch >= _RATED_BYTES
    return size(op.bytes_per_launch) + (f" at {(op.bytes_per_second or 0) / 1e9:,.0f} GB/s" if rated else "")


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
