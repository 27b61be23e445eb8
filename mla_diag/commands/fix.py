"""`mla-diag fix`: replace the whole-pool cast in an installed SGLang, prove it, and take it back."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mla_diag.commands.measuring import measured_order
from mla_diag.errors import MlaDiagError, UsageError
from mla_diag.fix import patch
from mla_diag.fix.journal import Journal
from mla_diag.fix.locate import Gpu, Installation, find_gpu, find_installation
from mla_diag.fix.strategy import Outlook, Strategy, check, outlooks
from mla_diag.fix.verify import verify as prove
from mla_diag.report import fix as report

_NOTHING_FIXED = "\nno cast of the whole KV pool that could be fixed in this SGLang: nothing has been changed"
_MEASURE_THE_SERVER = """
To measure the server: mla-diag bench server --url http://localhost:30000
or, before and after:  mla-diag bench server --serve "python -m sglang.launch_server ..."\
"""


class NotFixedError(MlaDiagError):
    """`--verify` found a cast of the whole pool, or dtypes that do not agree."""


def parse_strategy(text: str) -> Strategy:
    """The strategy of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return Strategy(text.lower())
    except ValueError:
        choices = ", ".join(strategy.value for strategy in Strategy)
        raise UsageError(f"--strategy {text}: not one of {choices}") from None


def run(
    *,
    apply: bool = False,
    revert: bool = False,
    verify: bool = False,
    strategy: Strategy = Strategy.AUTO,
    sglang: Path | None = None,
    console: Console | None = None,
) -> None:
    """Show what a fix would change, or with one of the flags apply, revert or verify it.

    Args:
        apply: change the files.
        revert: put the originals back.
        verify: print the dtype map and the proof that no whole-pool cast remains.
        strategy: what is to read the pool.
        sglang: where SGLang is, see `find_installation`.
        console: where to print.

    Raises:
        UsageError: no SGLang, several, two flags at once, or a strategy that cannot work here or fails when measured.
        UnknownCodeError: the code is not understood; nothing has been touched.
        JournalError: the files cannot be changed, or are not as an earlier fix left them.
        NotFixedError: `verify` found that something is not fixed.
    """
    if apply + revert + verify > 1:
        raise UsageError("--apply, --revert and --verify: give one of them")
    console = console or Console(highlight=False)
    installation = find_installation(sglang)
    if revert:
        _revert(installation, console)
    elif verify:
        _verify(installation, console)
    else:
        gpu = find_gpu()
        ways = outlooks(gpu, installation.flashinfer)
        report.print_installation(installation, gpu, console)
        check(strategy, ways)
        if apply:
            _apply(installation, strategy, ways, gpu, sglang, console)
        else:
            _dry_run(installation, strategy, ways, console)


def _dry_run(installation: Installation, strategy: Strategy, ways: list[Outlook], console: Console) -> None:
    record = Journal(installation.root).record()
    if record is not None and record.state != "applied":
        console.print("\na fix was cut off here: --apply or --revert undoes it first")
        return
    if record is not None:
        console.print(f"\nfixed already, strategy {record.strategy}: --verify proves it, --revert ends it")
        return
    planned = patch.plan_patch(installation, strategy)
    if not planned.files:
        console.print("\nno cast of the whole KV pool in this SGLang: there is nothing to fix")
        return
    console.print()
    report.print_sites(planned.files, installation, console)
    console.print()
    report.print_outlooks(strategy, ways, console)
    console.print()
    report.print_diff(planned, console)
    console.print("\nnothing has been changed: --apply does it")


def _apply(
    installation: Installation,
    strategy: Strategy,
    ways: list[Outlook],
    gpu: Gpu | None,
    directory: Path | None,
    console: Console,
) -> None:
    # Measuring takes minutes: what is not understood, or needs no fix, is said before.
    fixed = f"\nfixed already, strategy {strategy.value}: nothing has been changed; --revert first to measure anew"
    if patch.is_fixed(installation, strategy):
        console.print(fixed)
        return
    if Journal(installation.root).record() is None and not patch.plan_patch(installation, strategy).changes:
        console.print(_NOTHING_FIXED)
        return
    order = None if gpu is None else measured_order(installation, strategy, ways, directory, console)
    applied = patch.apply(installation, strategy, order)
    if applied is None or not applied.changes:  # another --apply was quicker
        console.print(fixed if applied is None else _NOTHING_FIXED)
        return
    console.print()
    report.print_sites(applied.files, installation, console)
    console.print()
    report.print_outlooks(strategy, ways, console)
    if strategy is Strategy.AUTO:
        console.print(f"auto takes the first that works: {', '.join(order or [way.strategy.value for way in ways])}")
    rewritten = sum(change.before is not None for change in applied.changes)
    console.print(
        f"\napplied: {rewritten} files rewritten, {len(applied.changes) - rewritten} added. "
        "A server that runs keeps the old code: restart it."
    )
    if gpu is None:
        console.print("There is no GPU here, so nothing was measured.")
    console.print(_MEASURE_THE_SERVER, soft_wrap=True)


def _revert(installation: Installation, console: Console) -> None:
    files = patch.revert(installation)
    if not files:
        console.print(f"{installation.root}: a fix that was cut off has been undone")
    for path in files:
        console.print(f"{path}: {'as it was' if path.exists() else 'removed'}", soft_wrap=True)


def _verify(installation: Installation, console: Console) -> None:
    proof = prove(installation)
    if not proof.verdicts:
        console.print("no cast of the whole KV pool in this SGLang, and no fix: there is nothing to prove")
    report.print_proof(proof, console)
    failed = [verdict for verdict in proof.verdicts if verdict.holds is False]
    if failed:
        raise NotFixedError(
            f"{installation.root}: not fixed: {len(failed)} of {len(proof.verdicts)} lines say otherwise"
        )
    if proof.verdicts:
        console.print("no cast of the whole pool remains, and each plan is given the pool's dtype")
