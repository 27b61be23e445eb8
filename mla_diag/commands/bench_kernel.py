"""`mla-diag bench kernel`: attention of one layer over an FP8 pool, every alternative, against the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from mla_diag.bench.kernel_record import Record, read_record
from mla_diag.bench.rows import Shape
from mla_diag.commands.common import check_output, destination, parse_shape, plain_console
from mla_diag.errors import UsageError
from mla_diag.report.json import render_json
from mla_diag.report.kernel_plot import check_plotting, draw_svg
from mla_diag.report.kernel_table import format_row, print_head

_OTHER_PICTURES = {".png", ".pdf", ".jpg", ".jpeg"}


def run(
    heads: Sequence[int],
    shapes: Sequence[str],
    output: Path | None,
    milliseconds: int,
    *,
    recorded: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time every alternative that is installed at each shape, printing rows as they come; or show an earlier run.

    Args:
        heads: Query heads on a rank; none for the ones that the documentation's tables have, or that were recorded.
        shapes: Requests and tokens of each, such as `16x8192`; none for the tables', or the recorded ones.
        output: Where the run goes as JSON as well.
        milliseconds: Time spent on each measurement.
        recorded: An earlier run's JSON to show instead of measuring.
        plot: Where a picture of it goes, as SVG.

    Raises:
        UnreadableInputError: `recorded` is no such run.
        UsageError: torch, Triton or a GPU is missing, or what draws is; or a shape or an output makes no sense.
    """
    cases = [parse_shape(text) for text in shapes]
    check_output(output)
    if plot is not None:
        check_output(plot)
        if plot.suffix.lower() in _OTHER_PICTURES:
            raise UsageError(f"--plot {plot}: the picture is SVG; name it {plot.stem}.svg")
        check_plotting()
    if recorded is None:
        record = _measure(heads, cases, output, milliseconds)
    elif output is not None:
        raise UsageError("--from shows an earlier run, which is JSON already: leave --json out")
    else:
        record = _chosen(read_record(recorded), heads, cases, recorded)
        console = plain_console()
        print_head(record.device, record.ceilings, console)
        for row in record.rows:
            console.print(format_row(row), soft_wrap=True)
    if plot is not None:
        picture = draw_svg(record)
        with destination(plot) as drawn:
            drawn.file.write(picture.decode())


def _measure(heads: Sequence[int], cases: Sequence[tuple[int, int]], output: Path | None, milliseconds: int) -> Record:
    try:
        import torch  # noqa: PLC0415 - extras: the rest of mla-diag runs without them

        from mla_diag.bench import kernel  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"bench kernel needs torch and Triton ({error}); pip install 'mla-diag[gpu]'") from error
    if not torch.cuda.is_available():
        raise UsageError("bench kernel needs a GPU, and torch sees none here; run it where the server runs")
    record = Record(torch.cuda.get_device_name(), kernel.measure_ceilings(), [])
    console = plain_console()
    print_head(record.device, record.ceilings, console)
    wanted = [Shape(count, *case) for count in heads or kernel.HEADS for case in cases or kernel.CASES]
    for row in kernel.bench_kernels(wanted, record.ceilings, rep_ms=milliseconds):
        record.rows.append(row)
        console.print(format_row(row), soft_wrap=True)
        if output is not None:
            with destination(output) as written:
                written.file.write(render_json(record))
    return record


def _chosen(record: Record, heads: Sequence[int], cases: Sequence[tuple[int, int]], path: Path) -> Record:
    rows = [
        row
        for row in record.rows
        if (not heads or row.shape.heads in heads) and (not cases or (row.shape.batch, row.shape.context) in cases)
    ]
    if not rows:
        raise UsageError(f"{path}: nothing of these heads and shapes was recorded; leave them out to see what was")
    return msgspec.structs.replace(record, rows=rows)
