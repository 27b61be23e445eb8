"""Measurements of attention kernels for a person at a terminal: a line each, as they come."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mla_diag.bench.rows import Ceilings, Row

_ROW = "{:>5} {:>5} {:>7}  {:<15} {:>9} {:>9} {:>9}"


def print_head(device: str, ceilings: Ceilings, console: Console) -> None:
    """What stands above rows: the card and what it does at best, the names of the columns."""
    console.print(
        f"{device}: copies at {ceilings.bandwidth / 1e12:.2f} TB/s, "
        f"BF16 products at {ceilings.matmul / 1e12:.0f} TFLOP/s; a decode step of one layer:\n",
        soft_wrap=True,
    )
    console.print(Text(_ROW.format("heads", "batch", "context", "", "us", "roofline", "error"), "dim"))


def format_row(row: Row) -> Text:
    """One measurement: the time, how many times the roofline that is, and the error; or why there is none."""
    shape = row.shape
    if row.us is None or row.error is None:
        figures = ("-", "", "")
    else:
        figures = (f"{row.us:,.1f}", f"{row.us / row.roofline_us:.2f} x", f"{row.error:.1e}")
    line = _ROW.format(shape.heads, shape.batch, shape.context, row.alternative, *figures)
    if row.us is not None:
        return Text(line)
    return Text(f"{line.rstrip()}  {' '.join(row.reason.split())}", "dim")
