"""A kernel benchmark as a picture: microseconds of each alternative at each shape, above the roofline."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

from mla_diag.bench.kernel_record import Record
from mla_diag.bench.rows import Row, Shape
from mla_diag.errors import UsageError

# Colours that people with any colour vision tell apart (Okabe and Ito), the strong ones for mla-diag's own kernels.
_STYLES = {
    "cast + bf16": ("#999999", "v"),
    "gather + bf16": ("#cc79a7", "s"),
    "bf16 pool": ("#56b4e9", "D"),
    "native fp8": ("#e69f00", "^"),
    "mla-diag triton": ("#009e73", "o"),
    "mla-diag hopper": ("#d55e00", "o"),
}
_OTHERS = (("#0072b2", "P"), ("#f0e442", "X"))
_PANEL_INCHES = (4.2, 4.0)
# Nothing of the day, the machine or a random number is in the file, so that drawing it again changes nothing.
_SETTINGS = {"svg.hashsalt": "mla-diag", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9}
_METADATA = {"Date": None, "Creator": "mla-diag bench kernel --plot"}


def check_plotting() -> None:
    """See that what draws is installed.

    Raises:
        UsageError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'mla-diag[plot]'")


def draw_svg(record: Record) -> bytes:
    """Draw one panel a head count, time on a logarithmic axis.

    Raises:
        UsageError: there is nothing to draw, or matplotlib is not installed.
    """
    check_plotting()
    import matplotlib  # noqa: PLC0415 - an extra, and slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    heads = list(dict.fromkeys(row.shape.heads for row in record.rows))
    names = list(dict.fromkeys(row.alternative for row in record.rows if row.us is not None))
    if not names:
        raise UsageError("--plot: no alternative ran, so there is nothing to draw")
    with matplotlib.rc_context(_SETTINGS):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * len(heads), height), layout="constrained")
        panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
        for panel, count in zip(panels, heads, strict=True):
            _draw_panel(panel, [row for row in record.rows if row.shape.heads == count], names)
            panel.set_title(f"{count} query head{'' if count == 1 else 's'}")
        panels[0].set_ylabel("microseconds a layer")
        figure.suptitle(f"Decode attention of one MLA layer over an FP8 pool, {record.device}")
        figure.legend(*_legend(panels), loc="outside lower center", ncols=len(names) + 1, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata=_METADATA)
    return file.getvalue()


def _draw_panel(panel: Any, rows: list[Row], names: list[str]) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    others = iter(_OTHERS * len(names))
    for name in names:
        measured = {row.shape: row.us for row in rows if row.alternative == name and row.us is not None}
        colour, marker = _STYLES.get(name) or next(others)
        own = name.startswith("mla-diag")
        panel.plot(
            [place for place, shape in enumerate(shapes) if shape in measured],
            list(measured.values()),
            label=name,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8 if own else 0.9,
            zorder=3 if own else 2,
        )
    floor = {row.shape: row.roofline_us for row in rows}
    panel.plot(range(len(shapes)), list(floor.values()), label="roofline", color="black", linestyle="--", linewidth=1.2)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.set_xticks(range(len(shapes)), [_named(shape) for shape in shapes], rotation=45, ha="right")
    panel.set_xlabel("requests x tokens of each")
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    """Each line of all panels once; an alternative may have run in some of them only."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _named(shape: Shape) -> str:
    thousands, rest = divmod(shape.context, 1024)
    return f"{shape.batch} x {shape.context if rest or not thousands else f'{thousands}k'}"
