"""What can stand in the cast's place, for `fix` and `bench server`: as asked for, and as measured on this machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mla_diag.bench.strategies import Card, Measured, NotMeasuredError, Verdict, measure
from mla_diag.commands.common import parse_choice
from mla_diag.errors import UsageError
from mla_diag.fix.locate import Installation, find_python
from mla_diag.fix.strategy import Outlook, Strategy
from mla_diag.report.fix_account import Measurement
from mla_diag.report.kernel_table import format_row, print_head


def parse_strategy(text: str) -> Strategy:
    """The strategy of that name."""
    return parse_choice(Strategy, text, "--strategy")


def measure_strategies(
    installation: Installation, chosen: Strategy, ways: list[Outlook], directory: Path | None, console: Console
) -> Measurement | None:
    """Before a file is touched, measure what can read the pool here with the server's own libraries, and print it.

    Args:
        installation: the SGLang that is to be fixed.
        chosen: the strategy asked for.
        ways: each strategy's outlook; one that cannot work is not tried.
        directory: where the SGLang was said to be, if anywhere.
        console: where to print.

    Returns:
        What was found, with the order in which `auto` is to try strategies; None where nothing could be measured,
        which is said.

    Raises:
        UsageError: the strategy asked for is wrong or fails on this machine.
    """
    python, search = find_python(installation, directory)
    strategies = [*(way.strategy.value for way in ways if way.works is not False), "cast"]
    console.print(
        f"\nmeasuring {', '.join(strategies)} with {python}; FlashInfer may compile kernels first",
        soft_wrap=True,
    )
    try:
        card, found = measure(strategies, python, search)
    except NotMeasuredError as error:
        console.print(f"not measured: {error}", soft_wrap=True)
        return None
    _print(card, found, console)
    _refuse(chosen, found)
    return Measurement.of(card, found)


def _print(card: Card, found: list[Measured], console: Console) -> None:
    """The rows of all strategies, shape by shape, and what disqualifies one."""
    print_head(card.device, card.ceilings, console)
    rows = [row for each in found for row in each.rows]
    for shape in dict.fromkeys(row.shape for row in rows):
        for row in rows:
            if row.shape == shape:
                console.print(format_row(row), soft_wrap=True)
    console.print()
    for each in found:
        if each.verdict is not Verdict.RIGHT:
            what = "fails" if each.verdict is Verdict.FAILED else "not measured"
            console.print(f"{each.strategy}: {what}: {each.why}", soft_wrap=True)
    if card.note:
        console.print(
            f"kernel: the Triton kernel in place of Hopper's own, which is faster: {card.note}", soft_wrap=True
        )


def _refuse(chosen: Strategy, found: list[Measured]) -> None:
    for each in found:
        if each.strategy == chosen.value and each.verdict is Verdict.FAILED:
            raise UsageError(
                f"--strategy {chosen.value}: measured here, it fails: {each.why}; nothing has been touched"
            )
