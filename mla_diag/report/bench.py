"""A benchmark of a server for a person at a terminal: one table, a line a figure, before beside after."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from mla_diag.bench.agreement import Agreement
from mla_diag.bench.measure import Measured, Row, Spread
from mla_diag.bench.server import Gain, ServerBench, ServerSide
from mla_diag.diagnose.words import count
from mla_diag.report.comparison import print_comparison
from mla_diag.report.units import milliseconds
from mla_diag.report.visible import visible

_AGREEMENT = "{:<26}{:>7}{:>10}{:>10}{:>10}{:>10}{:>8}"
_ROW = "{:>5} {:>8}  {:<8} {:>32} {:>32} {:>8}"
# Each figure's name in the table, its field in a row and in a gain, and how it is shown.
_FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("ttft ms", "ttft_ms", "ttft", milliseconds),
    ("tpot ms", "tpot_ms", "tpot", milliseconds),
    ("tok/s", "tokens_per_second", "tokens_per_second", "{:,.1f}".format),
)


def print_bench(bench: ServerBench, console: Console, top: int) -> None:
    """Print what was measured, as far as it came.

    Args:
        bench: What to print.
        console: Where to.
        top: Ops a stage of the profiles' comparison.
    """
    bench = visible(bench)
    if bench.before is not None:
        for line in (*_header(bench, bench.before), Text(), *_table(bench, bench.before)):
            line.rstrip()
            console.print(line, soft_wrap=not console.is_terminal)
    if bench.agreement:
        console.print()
        for line in _agreement(bench):
            console.print(line, soft_wrap=not console.is_terminal)
    if bench.comparison is not None:
        console.print()
        print_comparison(bench.comparison, console, top)
    if bench.notes:
        console.print()
    for note in bench.notes:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=not console.is_terminal)


def _agreement(bench: ServerBench) -> Iterator[Text]:
    yield Text(
        _AGREEMENT.format("logits, teacher-forced", "tokens", "cosine", "worst", "rms", "largest", "top-1"), "dim"
    )
    again = {found.stage: found for found in bench.repeatability}
    for found in bench.agreement:
        name = found.stage.value.upper()
        if found.stage in again:
            yield _agreed(f"{name}  before, again", again[found.stage])
        yield _agreed(f"{name}  before, after", found)


def _agreed(name: str, found: Agreement) -> Text:
    cosines = [f"{cosine:.5f}" for cosine in (found.cosine, found.worst_cosine)]
    errors = [f"{error:.4f}" for error in (found.rms_error, found.max_error)]
    return Text(_AGREEMENT.format(name, found.positions, *cosines, *errors, f"{found.top1:.1%}"))


def _header(bench: ServerBench, side: ServerSide) -> Iterator[Text]:
    pool = "a pool of unknown size" if side.pool_tokens is None else f"a pool of {side.pool_tokens:,} tokens"
    backends = dict.fromkeys(name for name in (side.decode_backend, side.prefill_backend) if name)
    facts = [f"SGLang {side.sglang or 'of unknown version'}", *backends, f"KV {side.kv_cache_dtype or 'unknown'}", pool]
    yield Text.assemble((bench.command or bench.url, "bold cyan"))
    yield Text(", ".join(facts), "dim")
    if side.rows:
        first = side.rows[0]
        waves = count(first.repeats, "wave")
        yield Text(f"{first.new_tokens} new tokens a request; median of {waves} (least to most)", "dim")
    if bench.fixed is not None:
        yield Text(f"after: strategy {bench.strategy} in {bench.fixed}", "dim")


def _table(bench: ServerBench, before: ServerSide) -> Iterator[Text]:
    after = bench.after
    heads = ("measured", "", "") if after is None else ("before", "after", "gain")
    yield Text(_ROW.format("batch", "context", "", *heads), "dim")
    earlier = {measured.row: measured for measured in before.rows}
    later = {measured.row: measured for measured in after.rows} if after is not None else {}
    gained = {gain.row: gain for gain in bench.gains}
    for row in dict.fromkeys([*earlier, *later]):
        yield from _row(row, earlier.get(row), later.get(row), gained.get(row))
    earlier_left = {left.row for left in before.left_out}
    later_left = [left for left in after.left_out if left.row not in earlier_left] if after is not None else []
    for left, when in (*((left, "") for left in before.left_out), *((left, " after the fix") for left in later_left)):
        yield Text(f"{left.row.batch:>5} {left.row.context:>8,}  left out{when}: {left.reason}", "yellow")


def _row(row: Row, before: Measured | None, after: Measured | None, gain: Gain | None) -> Iterator[Text]:
    where = (str(row.batch), f"{row.context:,}")
    for name, field, gained, shown in _FIGURES:
        ratio = getattr(gain, gained) if gain is not None else None
        figures = [_spread(getattr(side, field), shown) if side is not None else "" for side in (before, after)]
        line = _ROW.format(*where, name, *figures, "" if ratio is None else f"{ratio:.3g} x")
        style = "" if ratio is None or field != "tpot_ms" else "bold green" if ratio >= 1 else "bold red"
        yield Text(line, style)
        where = ("", "")


def _spread(spread: Spread, shown: Callable[[float], str]) -> str:
    return f"{shown(spread.median)} ({shown(spread.least)} to {shown(spread.most)})"
