"""`mla-diag bench server`: what a server's users feel, before and after the fix, on servers that this command runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from mla_diag.bench.agreement import Logits, agree, record_logits
from mla_diag.bench.measure import ROWS, LeftOut, Measured, Plan, Row, measure_rows
from mla_diag.bench.process import ServerCommand, ServerProcess
from mla_diag.bench.server import ServerBench, ServerSide, gains
from mla_diag.commands import profile
from mla_diag.commands.common import check_output, destination, parse_shape, plain_console
from mla_diag.commands.progress import Progress
from mla_diag.commands.signals import ended_by_signals
from mla_diag.commands.strategies import measure_strategies
from mla_diag.diagnose.compare import compare
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from mla_diag.diagnose.words import count
from mla_diag.errors import MlaDiagError, UnreadableInputError, UsageError
from mla_diag.fix import patch
from mla_diag.fix.journal import Journal, JournalError, Record
from mla_diag.fix.locate import Installation, find_gpu, find_installation, find_installation_of
from mla_diag.fix.strategy import Strategy, check, outlooks
from mla_diag.report.bench import print_bench
from mla_diag.report.json import render_json
from mla_diag.report.units import milliseconds
from mla_diag.server.client import Client
from mla_diag.server.live import expose_live
from mla_diag.server.model_config import read_model_config

# On the lab's server a BF16 pool in place of the FP8 one comes to 0.996, another attention backend to 0.998.
_ALIKE = 0.98
# How the lines begin that a fixed SGLang logs (mla_diag/fix/dispatch.py).
_FIX_SAYS = "mla-diag fix: "


@dataclass(frozen=True)
class Options:
    """What to measure and around what.

    Attributes:
        plan: Rows, tokens and repeats.
        fix: Whether to apply a fix and measure again.
        strategy: Of the fix.
        sglang: Where the server's SGLang is, see `find_installation`; None for that of the Python it runs.
        revert: Whether to take the fix back at the end.
        logits: Whether to compare the logits of the two servers.
        profiles: Whether to profile each server.
        out: The directory for logs and profiles; None for a new one here.
        output: The file for the results as JSON.
        ready_timeout: Seconds for a server to start.
        model_config: The model's config.json, where the server's own path does not lead to it.
        top: Ops to print a stage of the profiles' comparison.
    """

    plan: Plan = field(default_factory=Plan)
    fix: bool = True
    strategy: Strategy = Strategy.AUTO
    sglang: Path | None = None
    revert: bool = False
    logits: bool = True
    profiles: bool = True
    out: Path | None = None
    output: Path | None = None
    ready_timeout: float = 900.0
    model_config: Path | None = None
    top: int = 10


@dataclass
class _Visit:
    """What was learnt of one running server."""

    side: ServerSide
    diagnosis: Diagnosis | None = None
    logits: Logits | None = None
    harmless: str | None = None  # why it does not copy its pool, if that is certain


def plan_of(shapes: Sequence[str], new_tokens: int, repeats: int, warmup: int) -> Plan:
    """What to send, of shapes such as `16x2000`; none for the default rows.

    Raises:
        UsageError: A shape is none.
    """
    rows = tuple(dict.fromkeys(Row(*parse_shape(text)) for text in shapes))
    return Plan(rows or ROWS, new_tokens, repeats, warmup)


@ended_by_signals()
def run(
    serve: str | None,
    url: str | None,
    options: Options,
    *,
    api_key: str | None = None,
    verify: bool | Path = True,
) -> None:
    """Measure a server that a command line starts, before and after a fix, or one that somebody else runs.

    Args:
        serve: The command line.
        url: The address of somebody else's.
        options: What to measure and around what.
        api_key: The server's key, if it has one.
        verify: Whether to check its certificate, or the file of the authority that signed it.

    Raises:
        UsageError: Neither or both of the two are given; see also `measure_served` and `measure_url`.
    """
    if serve is not None and url is None:
        measure_served(serve, options, api_key=api_key)
    elif url is not None and serve is None:
        if options.revert or options.sglang is not None:
            raise UsageError("--url: nothing is fixed there; --revert and --sglang go with --serve")
        measure_url(url, options, api_key=api_key, verify=verify)
    else:
        raise UsageError("bench server: give --serve, what starts a server, or --url, where one is; one of the two")


def measure_url(url: str, options: Options, *, api_key: str | None = None, verify: bool | Path = True) -> None:
    """Measure a server that somebody else runs, and change nothing about it.

    Args:
        url: Its address.
        options: What to measure.
        api_key: The server's key, if it has one.
        verify: Whether to check its certificate, or the file of the authority that signed it.

    Raises:
        ServerError: It could not be asked, or failed.
        UsageError: It can run none of the rows.
    """
    check_output(options.output)
    with Client(url, api_key=api_key, verify=verify) as client:
        bench = ServerBench(command=None, url=client.url)
        with _reported(bench, options):
            server = parse_server_info(client.server_info())
            bench.before = ServerSide.of(server)
            _measure(client, server, bench.before, options.plan, bench, "")


def measure_served(command_line: str, options: Options, *, api_key: str | None = None) -> None:
    """Start a server, measure it, fix its SGLang, and measure it again; no server is left, whatever happens.

    Args:
        command_line: What starts it.
        options: What to measure and around what.
        api_key: The server's key, if its command does not say.

    Raises:
        ServerError: A server did not start, or failed; its log is named.
        UnknownCodeError: SGLang is not what the fix was made for; no server has been started.
        UsageError: An option makes no sense, or SGLang is fixed already.
        JournalError: SGLang's files could not be changed.
    """
    command = ServerCommand.parse(command_line)
    check_output(options.output)
    _check_model_config(options.model_config)
    bench = ServerBench(command=str(command), url=command.url)
    installation = _to_fix(command, options, bench) if options.fix else None
    out = options.out or Path(f"mla-diag-bench-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        taken = (out / "before" / "server.log").exists()
    except OSError as error:
        raise UsageError(f"{out}: cannot be used: {error.strerror}; give another --out") from error
    if taken:
        raise UsageError(f"{out}: holds another benchmark; give another --out")
    with _reported(bench, options):
        before = _visit(command, options, bench, out / "before", api_key)
        if installation is None:
            return
        if before.harmless is not None:
            bench.notes.append(f"this server does not copy its pool ({before.harmless}): nothing was fixed")
            return
        says, is_of = before.side.sglang, installation.version
        if None not in (says, is_of) and says != is_of:
            bench.notes.append(
                f"the server says it is SGLang {says}, and {installation.root} is {is_of}: if it runs another, "
                "name that with --sglang"
            )
        with _applied(installation, options, bench):
            after = _visit(command, options, bench, out / "after", api_key)
        _compare(before, after, bench)


def _check_model_config(path: Path | None) -> None:
    """Have what is wrong with it said before minutes are spent on a server."""
    try:
        if path is not None:
            read_model_config(path)
    except UnreadableInputError as error:
        raise UsageError(f"--model-config {error}") from error


def _compare(before: _Visit, after: _Visit, bench: ServerBench) -> None:
    """What was learnt of both servers, side by side; a fixed server that says something else is a note."""
    if before.logits is not None and after.logits is not None:
        try:
            bench.agreement = agree(before.logits, after.logits)
        except ValueError as error:  # a small pool, whose size follows the memory that was free
            bench.notes.append(f"the logits are not compared: the pools were not of one size ({error})")
        for found in bench.agreement:
            if found.cosine < _ALIKE:
                bench.notes.append(
                    f"{found.stage.value}: the fixed server says something else (cosine {found.cosine:.4f}): "
                    "`mla-diag fix --revert`, and please report it"
                )
    if before.diagnosis is not None and after.diagnosis is not None:
        bench.comparison = compare(before.diagnosis, after.diagnosis)


def _to_fix(command: ServerCommand, options: Options, bench: ServerBench) -> Installation | None:
    """The SGLang to fix, known to be fixable, before minutes are spent on a server; None if it needs no fix."""
    python = command.python()
    if options.sglang is None and python is not None:
        installation = find_installation_of(python, command.variables)
    else:
        installation = find_installation(options.sglang)
    record = Journal(installation.root).record()
    if record is not None:
        raise UsageError(
            f"{installation.root}: fixed already (strategy {record.strategy}), so there is no before to measure: "
            f"`mla-diag fix --revert --sglang {quote(str(installation.root))}` first, or measure it as it is, --no-fix"
        )
    check(options.strategy, outlooks(find_gpu(), installation.flashinfer))
    if patch.plan_patch(installation, options.strategy).changes:
        return installation
    bench.notes.append(f"{installation.root}: no cast of the whole KV pool that could be fixed, so nothing was")
    return None


def _visit(command: ServerCommand, options: Options, bench: ServerBench, out: Path, api_key: str | None) -> _Visit:
    """Start the server, learn all there is to learn of it, and stop it."""
    when = out.name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be made: {error.strerror}; give another --out") from error
    with (
        ServerProcess(command, out / "server.log") as process,
        Client(command.url, api_key=api_key or command.api_key) as client,
    ):
        with Progress() as progress:
            process.wait_until_ready(client, options.ready_timeout, lambda what: progress.say(f"{when}: {what}"))
        server = parse_server_info(client.server_info())
        visit = _Visit(ServerSide.of(server))
        setattr(bench, when, visit.side)
        _measure(client, server, visit.side, options.plan, bench, f"{when}: ")
        exposure = expose_live(client, model_config=options.model_config)
        if exposure.exposed is False:
            visit.harmless = exposure.stages[0].why
        elif options.logits and options.fix:
            visit.logits = _logits(client, server, bench, when)
        if options.profiles:
            visit.diagnosis = _profile(client, visit.side, options, bench, out)
        # Where the fix could not do what it was applied for, the figures are those of the cast.
        bench.notes += [f"{when}: the server's log: {said}" for said in process.logged(_FIX_SAYS)]
    return visit


def _measure(client: Client, server: ServerInfo, side: ServerSide, plan: Plan, bench: ServerBench, when: str) -> None:
    """Measure the rows, saying each as it comes, because a server can fail later."""
    ours = bench.command is not None
    with Progress() as progress:
        for found in measure_rows(client, server, plan, lambda what: progress.say(when + what), ours=ours):
            if isinstance(found, LeftOut):
                side.left_out.append(found)
                progress.note(f"{when}{found.row}: left out: {found.reason}")
            else:
                side.rows.append(found)
                progress.note(f"{when}{found.row}: {_figures(found)}")
                if found.cached_prompts:
                    bench.notes.append(f"{when}{found.row}: {_not_new(found, None if ours else client.url)}")
    if not side.rows:
        reasons = "; ".join(f"{left.row}: {left.reason}" for left in side.left_out)
        raise UsageError(f"{client.url}: can run none of the rows ({reasons}); give others with --shape")


def _figures(row: Measured) -> str:
    first, token = milliseconds(row.ttft_ms.median), milliseconds(row.tpot_ms.median)
    return f"first token after {first} ms, {token} ms a token, {row.tokens_per_second.median:,.1f} tokens a second"


def _not_new(row: Measured, url: str | None) -> str:
    """What is wrong with a row whose prompts the server knew in part, and, of somebody else's, what to do about it."""
    prompts = count(row.row.batch * row.repeats, "prompt")
    remedy = "" if url is None else f"; `curl -X POST {url}/flush_cache` empties the cache for all its users"
    return (
        f"the server had the beginning of {row.cached_prompts:,} of {prompts} in its prefix cache, and one such prompt "
        "can send its whole batch to another prefill kernel: the time to first token is not that of new prompts"
        f"{remedy}"
    )


def _logits(client: Client, server: ServerInfo, bench: ServerBench, when: str) -> Logits | None:
    """Record a server's logits; the first one's twice, because what it does not repeat itself, no fix can."""
    try:
        logits = record_logits(client, server)
        if when == "before":
            bench.repeatability = agree(logits, record_logits(client, server, again=True))
    except MlaDiagError as error:
        bench.notes.append(f"no logits {when}: {' '.join(str(error).split())}")
        return None
    return logits


def _profile(client: Client, side: ServerSide, options: Options, bench: ServerBench, out: Path) -> Diagnosis | None:
    """Profile the server at its first row; a profile that fails is a note, because measurements must not be lost."""
    row = side.rows[0].row
    how = profile.Options(
        batch=row.batch, input_len=row.context, out=out, model_config=options.model_config, top=options.top
    )
    try:
        taken = profile.take(client, how, announce=lambda _: None)
    except MlaDiagError as error:
        bench.notes.append(f"no profile {out.name}: {' '.join(str(error).split())}")
        return None
    side.profile = str(out)
    return taken.diagnosis


@contextmanager
def _applied(installation: Installation, options: Options, bench: ServerBench) -> Iterator[None]:
    """Fix SGLang, and afterwards take that back or say how to."""
    root, journal = installation.root, Journal(installation.root)
    if journal.record() is not None:
        raise JournalError(
            f"{root}: another process fixed it while the server was measured, so there is no before to compare with"
        )
    order, ours = _measured_order(installation, options), None
    try:
        if patch.apply(installation, options.strategy, order) is None:
            raise JournalError(f"{root}: another process fixed it at the same time: nothing can be compared")
        ours = journal.record()
        bench.fixed, bench.strategy = str(root), options.strategy.value
        yield
    except JournalError:
        raise
    except BaseException:
        try:
            _settle(installation, options, bench, ours or journal.record())  # Ctrl-C may come once it is applied
        except MlaDiagError as error:  # what went wrong first is what ends the command
            bench.notes.append(f"not reverted: {error}")
        raise
    _settle(installation, options, bench, ours)


def _measured_order(installation: Installation, options: Options) -> tuple[str, ...] | None:
    """What `auto` is to try first, as `fix --apply` measures it; the server tells the worth of a strategy by name."""
    gpu = find_gpu()
    if gpu is None or options.strategy is not Strategy.AUTO:
        return None
    ways = outlooks(gpu, installation.flashinfer)
    measured = measure_strategies(installation, options.strategy, ways, options.sglang, plain_console())
    return None if measured is None else measured.order


def _settle(installation: Installation, options: Options, bench: ServerBench, ours: Record | None) -> None:
    """Revert, if that was asked for and the fix is still the one that was applied here."""
    root = installation.root
    if ours is None:
        return
    if Journal(root).record() != ours:
        bench.notes.append(
            f"{root}: another process took the fix back or changed it: what the server after it ran is not known"
        )
    elif options.revert:
        patch.revert(installation)
        bench.reverted = True
        bench.notes.append(f"{root}: reverted, byte for byte as it was")
    else:
        bench.notes.append(f"{root}: stays fixed; `mla-diag fix --revert --sglang {quote(str(root))}` ends that")


@contextmanager
def _reported(bench: ServerBench, options: Options) -> Iterator[None]:
    """Print and write what was found in the end, also if that is less than was asked for."""
    try:
        yield
    finally:
        if bench.before is not None and bench.after is not None:
            bench.gains = gains(bench.before, bench.after)
        if bench.before is not None:
            try:
                if options.output is not None:
                    with destination(options.output) as console:
                        console.file.write(render_json(bench))
            finally:
                print_bench(bench, plain_console(), options.top)
                sys.stdout.flush()
