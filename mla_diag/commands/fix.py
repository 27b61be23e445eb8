"""`mla-diag fix`: replace the whole-pool cast in an installed SGLang, prove it, and take it back."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from mla_diag.commands.common import Format, plain_console
from mla_diag.commands.signals import ended_by_signals
from mla_diag.commands.strategies import measure_strategies
from mla_diag.errors import MlaDiagError, UsageError
from mla_diag.fix import patch
from mla_diag.fix.journal import Journal
from mla_diag.fix.locate import Gpu, Installation, find_gpu, find_installation
from mla_diag.fix.strategy import Outlook, Strategy, check, outlooks
from mla_diag.fix.verify import verify as prove
from mla_diag.report import fix as report
from mla_diag.report.fix_account import FixAccount, Outcome, account_of_patch, account_of_proof, account_of_revert
from mla_diag.report.json import render_json

_NOTHING_FIXED = "\nno cast of the whole KV pool that could be fixed in this SGLang: nothing has been changed"
_MEASURE_THE_SERVER = """
To measure the server: mla-diag bench server --url http://localhost:30000
or, before and after:  mla-diag bench server --serve "python -m sglang.launch_server ..."\
"""


class NotFixedError(MlaDiagError):
    """`--verify` found a cast of the whole pool, or dtypes that do not agree."""


@ended_by_signals()
def run(
    *,
    apply: bool = False,
    revert: bool = False,
    verify: bool = False,
    strategy: Strategy = Strategy.AUTO,
    sglang: Path | None = None,
    output_format: Format = Format.TERMINAL,
    console: Console | None = None,
) -> None:
    """Show what a fix would change, or with one of the flags apply, revert or verify it.

    Args:
        apply: change the files.
        revert: put the originals back.
        verify: print the dtype map and the proof that no whole-pool cast remains.
        strategy: what is to read the pool.
        sglang: where SGLang is, see `find_installation`.
        output_format: for a person as it goes, or JSON at the end.
        console: where to print.

    Raises:
        UsageError: no SGLang, several, two flags at once, or a strategy that cannot work here or fails when measured.
        UnknownCodeError: the code is not understood; nothing has been touched.
        JournalError: the files cannot be changed, or are not as an earlier fix left them.
        NotFixedError: `verify` found that something is not fixed.
    """
    if apply + revert + verify > 1:
        raise UsageError("--apply, --revert and --verify: give one of them")
    if console is None:
        console = plain_console()
        console.soft_wrap = not console.is_terminal  # what reads a pipe is another tool
    # What a program reads is the account alone; what is said to a person meanwhile goes nowhere.
    shown = console if output_format is Format.TERMINAL else plain_console(io.StringIO())
    installation = find_installation(sglang)
    if revert:
        account = _revert(installation, shown)
    elif verify:
        account = _verify(installation, shown)
    else:
        gpu = find_gpu()
        ways = outlooks(gpu, installation.flashinfer)
        report.print_installation(installation, gpu, shown)
        check(strategy, ways)
        if apply:
            account = _apply(installation, strategy, ways, gpu, sglang, shown)
        else:
            account = _dry_run(installation, strategy, ways, gpu, shown)
    if output_format is Format.JSON:
        console.file.write(render_json(account))
    if account.outcome is Outcome.NOT_FIXED:
        verdicts = account.verdicts or []
        failed = sum(verdict.holds is False for verdict in verdicts)
        raise NotFixedError(f"{installation.root}: not fixed: {failed} of {len(verdicts)} lines say otherwise")


def _dry_run(
    installation: Installation, strategy: Strategy, ways: list[Outlook], gpu: Gpu | None, console: Console
) -> FixAccount:
    record = Journal(installation.root).record()
    if record is not None and record.state != "applied":
        console.print("\na fix was cut off here: --apply or --revert undoes it first")
        return account_of_patch(Outcome.CUT_OFF, installation, gpu, record.strategy, ways)
    if record is not None:
        console.print(f"\nfixed already, strategy {record.strategy}: --verify proves it, --revert ends it")
        return account_of_patch(Outcome.FIXED_ALREADY, installation, gpu, record.strategy, ways)
    planned = patch.plan_patch(installation, strategy)
    outcome = Outcome.FIXABLE if planned.changes else Outcome.NOTHING_TO_FIX
    account = account_of_patch(outcome, installation, gpu, strategy.value, ways, planned)
    if not planned.files:
        console.print("\nno cast of the whole KV pool in this SGLang: there is nothing to fix")
        return account
    console.print()
    report.print_sites(planned.files, installation, console)
    console.print()
    report.print_outlooks(strategy, ways, console)
    console.print()
    report.print_diff(planned, console)
    console.print("\nnothing has been changed: --apply does it")
    return account


def _apply(
    installation: Installation,
    strategy: Strategy,
    ways: list[Outlook],
    gpu: Gpu | None,
    directory: Path | None,
    console: Console,
) -> FixAccount:
    # Measuring takes minutes: what is not understood, or needs no fix, is said before.
    fixed = f"\nfixed already, strategy {strategy.value}: nothing has been changed; --revert first to measure anew"
    if patch.is_fixed(installation, strategy):
        console.print(fixed)
        return account_of_patch(Outcome.FIXED_ALREADY, installation, gpu, strategy.value, ways)
    if Journal(installation.root).record() is None:
        planned = patch.plan_patch(installation, strategy)
        if not planned.changes:
            console.print(_NOTHING_FIXED)
            return account_of_patch(Outcome.NOTHING_TO_FIX, installation, gpu, strategy.value, ways, planned)
    measured = None if gpu is None else measure_strategies(installation, strategy, ways, directory, console)
    order = None if measured is None else measured.order
    applied = patch.apply(installation, strategy, order)
    if applied is None or not applied.changes:  # another --apply was quicker
        console.print(fixed if applied is None else _NOTHING_FIXED)
        outcome = Outcome.FIXED_ALREADY if applied is None else Outcome.NOTHING_TO_FIX
        return account_of_patch(outcome, installation, gpu, strategy.value, ways, applied, measured)
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
    return account_of_patch(Outcome.APPLIED, installation, gpu, strategy.value, ways, applied, measured)


def _revert(installation: Installation, console: Console) -> FixAccount:
    files = patch.revert(installation)
    if not files:
        console.print(f"{installation.root}: a fix that was cut off has been undone")
    for path in files:
        console.print(f"{path}: {'as it was' if path.exists() else 'removed'}", soft_wrap=True)
    return account_of_revert(installation, files)


def _verify(installation: Installation, console: Console) -> FixAccount:
    proof = prove(installation)
    if not proof.verdicts:
        console.print("no cast of the whole KV pool in this SGLang, and no fix: there is nothing to prove")
    report.print_proof(proof, console)
    if proof.holds:
        console.print("no cast of the whole pool remains, and each plan is given the pool's dtype")
    return account_of_proof(installation, proof)
