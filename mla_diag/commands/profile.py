"""`mla-diag profile`: record what a live server's steps spend their time on, and explain it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NamedTuple, TextIO

import msgspec

from mla_diag.commands.common import plain_console
from mla_diag.commands.explain import fail_on_findings
from mla_diag.commands.progress import Progress
from mla_diag.commands.signals import ended_by_signals
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.rules import KINDS
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.verdict import parse_fail_on
from mla_diag.diagnose.words import count
from mla_diag.errors import MlaDiagError, ServerError, UnreadableInputError, UsageError
from mla_diag.report.json import render_json
from mla_diag.report.profile import graph_guidance, measured_gap_lines
from mla_diag.report.terminal import print_report
from mla_diag.server.capture import Capture, CapturePlan
from mla_diag.server.client import Client
from mla_diag.server.connection import Timeouts
from mla_diag.server.live import card_of, model_of
from mla_diag.server.load import Load, LoadPlan, plan_load
from mla_diag.server.measured_gap import CONTEXT, beside_floor
from mla_diag.server.model_config import ModelConfig
from mla_diag.server.releases import START_STEP, STEP_SPANS, is_older
from mla_diag.server.trace_files import TraceDirectory, locate, rank_notes
from mla_diag.trace.remote import without_password

_STAGES = {Stage.PREFILL, Stage.DECODE}


@dataclass(frozen=True)
class Options:
    """What to record and where; lengths in tokens.

    Attributes:
        stages: The stages to report.
        steps: Steps of each stage; with `no_load`, forward passes in all.
        batch: Requests in a step on each data-parallel rank.
        input_len: Tokens a prompt.
        cached_len: Of them, in the cache before; None for half.
        output_len: New tokens a prompt; None for as many as the steps take.
        stacks: Whether to record Python stacks.
        no_load: Whether to record the traffic that comes, and send none.
        traffic_timeout: Seconds to wait for that.
        out: The directory to leave everything in; None for a new one here.
        trace_root: Where the server's files are seen from here (see `locate`).
        model_config: The model's config.json, for the floor.
        mapping: A trace that names what CUDA graphs replay, or its URL.
        top: Ops to print a stage.
        fail_on: Findings to exit with 1 on, as `explain --fail-on` takes them.
    """

    stages: frozenset[Stage] = frozenset(_STAGES)
    steps: int = 5
    batch: int = 1
    input_len: int = 2000
    cached_len: int | None = None
    output_len: int | None = None
    stacks: bool = False
    no_load: bool = False
    traffic_timeout: float = 120.0
    out: Path | None = None
    trace_root: str | None = None
    model_config: Path | None = None
    mapping: str | None = None
    top: int = 10
    fail_on: Sequence[str] = ()


class Recording(NamedTuple):
    """What a profile left.

    Attributes:
        url: The server's address.
        server: What it says of itself.
        device: What it runs on, such as `cuda`.
        model: Its model, where the config can be read.
        plan: The load; None for other people's traffic.
        out: The directory here.
        traces: The traces in it.
        announcement: What was said before.
        summary: What it cost.
    """

    url: str
    server: ServerInfo
    device: str
    model: ModelConfig | None
    plan: LoadPlan | None
    out: Path
    traces: list[Path]
    announcement: str
    summary: str


class Profile(NamedTuple):
    """A recording explained.

    Attributes:
        recording: What it was made of.
        diagnosis: What it shows.
        tail: Lines to print after the report.
    """

    recording: Recording
    diagnosis: Diagnosis
    tail: list[str]


def parse_stages(text: str) -> frozenset[Stage]:
    """The stages in a list such as `decode,prefill`.

    Raises:
        UsageError: One of them is none, or none is given.
    """
    named = {part.strip().lower() for part in text.split(",")}
    found = frozenset(stage for stage in _STAGES if stage.value in named)
    if not named or len(found) != len(named):
        raise UsageError(f"--stage {text}: not a list of decode and prefill")
    return found


@ended_by_signals()
def run(
    url: str,
    options: Options,
    *,
    api_key: str | None = None,
    verify: bool | Path = True,
    timeouts: Timeouts | None = None,
) -> None:
    """Record, fetch, explain and print; leave `OUT/{traces/,server_info.json,report.json,report.txt}`.

    Args:
        url: The server.
        options: What to record.
        api_key: The server's key, if it has one.
        verify: Whether to check its certificate, or the file of the authority that signed it.
        timeouts: How long to wait for it.

    Raises:
        FindingError: A finding that `fail_on` names is there; the report has been given by then.
        ServerError: The server could not be asked, refused, went away, or its traces cannot be reached from here.
        UnreadableInputError: The traces could not be explained; they are kept.
        UsageError: The options make no sense for this server, or OUT cannot be written.
    """
    failures = [parse_fail_on(text, KINDS) for text in options.fail_on]
    with Client(url, api_key=api_key, verify=verify, timeouts=timeouts) as client:
        recording, diagnosis, tail = take(client, options)
    print()
    print_report(diagnosis, plain_console(), options.top)
    print("", *tail, f"all of it is in {recording.out}", sep="\n")
    fail_on_findings(diagnosis, failures)


def _announce_at_once(text: str) -> None:
    print(text, flush=True)


def take(client: Client, options: Options, announce: Callable[[str], None] = _announce_at_once) -> Profile:
    """Record, fetch and explain; leave `OUT/{traces/,server_info.json,report.json,report.txt}`.

    Args:
        client: The server.
        options: What to record.
        announce: Told what is about to be done to the server.

    Raises:
        ServerError, UnreadableInputError, UsageError: As for `run`.
    """
    recording = _record(client, options, announce)
    card = card_of(client)
    diagnosis = _explain(recording, options, announce)
    card = next((trace.device for trace in diagnosis.traces if trace.device), card)
    context = CONTEXT if recording.plan is None else recording.plan.input_len
    diagnosis = beside_floor(diagnosis, recording.server, recording.model, gpu_named(card), context)
    tail = [
        recording.summary,
        *(f"note: {note}" for note in rank_notes((trace.name for trace in recording.traces), recording.server)),
        *measured_gap_lines(diagnosis),
        *graph_guidance(
            diagnosis,
            recording.url,
            recording.out,
            graphs=recording.server.cuda_graphs if Stage.DECODE in options.stages else None,
            mapped=options.mapping is not None,
        ),
    ]
    _write(recording.out / "report.json", render_json(diagnosis))
    with _opened(recording.out / "report.txt") as file:
        print(recording.announcement, "", sep="\n", file=file)
        print_report(diagnosis, plain_console(file), options.top)
        print("", *tail, sep="\n", file=file)
    return Profile(recording, diagnosis, tail)


def _record(client: Client, options: Options, announce: Callable[[str], None]) -> Recording:
    """Profile the server and copy its traces here."""
    answer = client.server_info()
    server = parse_server_info(answer)
    if options.no_load and is_older(server.version, START_STEP):
        raise UsageError(
            f"--no-load: SGLang {server.version} cannot profile from a given step on, as {START_STEP} can, and could "
            "end somebody else's profile; let mla-diag send the load"
        )
    plan = None if options.no_load else _plan(server, options)
    name = f"mla-diag-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = locate(options.trace_root, local=client.is_local, name=f"{name}-{os.getpid()}")
    out = options.out or Path(name)
    model = model_of(server, options.model_config, here=client.is_local)
    by_stage = plan is not None and is_older(server.version, STEP_SPANS)
    passes = options.steps + (plan.prefill_steps if plan is not None and not by_stage else 0)
    capture_plan = CapturePlan(passes, by_stage, options.stacks, options.traffic_timeout)
    with Progress() as progress, Capture(client, server, directory, capture_plan, progress.say) as capture:
        _make(out)
        directory.prepare(options.stacks)
        _write(out / "server_info.json", msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
        announcement = "\n".join(_announce(client, options, server, plan, directory, out))
        announce(announcement)
        try:
            capture.run(None if plan is None else Load(client, plan, server.data_parallel))
        except BaseException:
            capture.close()
            progress.stop()
            if capture.left_running is not None:
                print(f"mla-diag: {capture.left_running}", file=sys.stderr)
            _keep(directory, out)
            raise
    traces = _fetch(directory, out)
    if not traces:
        raise ServerError(_out_of_reach(directory, out, client.url))
    size = sum(trace.stat().st_size for trace in traces)
    summary = f"{count(len(traces), 'trace')}, {size / 1e6:,.2f} MB, written {capture.seconds:.1f} s after the start"
    device = str(answer.get("device") or "cuda")
    return Recording(client.url, server, device, model, plan, out, traces, announcement, summary)


def _plan(server: ServerInfo, options: Options) -> LoadPlan:
    return plan_load(
        server,
        batch=options.batch,
        input_len=options.input_len,
        cached_len=options.cached_len,
        output_len=options.output_len,
        steps=options.steps,
    )


def _announce(
    client: Client,
    options: Options,
    server: ServerInfo,
    plan: LoadPlan | None,
    directory: TraceDirectory,
    out: Path,
) -> Iterator[str]:
    """What is about to be done to the server, and for how long."""
    stages = " and ".join(sorted(stage.value for stage in options.stages))
    with_what = "shapes and Python stacks" if options.stacks else "shapes"
    yield f"profile of {client.url}: {stages} steps, with {with_what}"
    if plan is None:
        yield (
            f"  traffic  yours: the next {options.steps} forward passes, waited for {options.traffic_timeout:.0f} s "
            "at most; nothing is sent"
        )
    else:
        yield (
            f"  load     one wave, on each data-parallel rank {count(plan.batch, 'request')} of {plan.input_len:,} "
            f"tokens ({plan.cached_len:,} of them cached first) and {plan.output_len} new ones; recorded are "
            f"{count(plan.prefill_steps, 'prefill step')} and {count(options.steps, 'decode step')}"
        )
    if server.cuda_graphs and Stage.DECODE in options.stages and options.mapping is None:
        yield "  graphs   on: decode steps come without ops, shapes and stacks; how to have them is said at the end"
    yield (
        "  cost     the server answers nobody while it exports its traces: seconds for small ones, 25 to 300 s for "
        f"large; waited for {client.timeouts.export:.0f} s at most"
    )
    yield f"  files    {directory.on_server} on the server; {out}/ here"


def _keep(directory: TraceDirectory, out: Path) -> None:
    """After a failure, copy what the server has written by then; never a reason to hide that failure."""
    try:
        kept = _fetch(directory, out)
    except MlaDiagError as error:
        print(f"mla-diag: {error}", file=sys.stderr)
        return
    if kept:
        print(f"mla-diag: written by then: {count(len(kept), 'trace')}, in {out / 'traces'}", file=sys.stderr)


def _fetch(directory: TraceDirectory, out: Path) -> list[Path]:
    """Copy the traces here and remove the server's; the originals stay unless all could be copied."""
    traces = [directory.fetch(name, out / "traces") for name in sorted(directory.sizes())]
    directory.remove()
    return traces


def _out_of_reach(directory: TraceDirectory, out: Path, url: str) -> str:
    lines = [f"{url}: recorded, but its traces cannot be read from here: they are in {directory.on_server} on its host"]
    if directory.here is not None:
        lines[0] = (
            f"{url}: no trace came to {without_password(directory.here)}; a server in a container has a disk of its own"
        )
    lines.append(
        f"explain them there: mla-diag explain {quote(directory.on_server)} --server-info server_info.json, with "
        f"{out / 'server_info.json'} copied there; or name a place that both see with --trace-root"
    )
    return "\n".join(lines)


def _explain(recording: Recording, options: Options, announce: Callable[[str], None]) -> Diagnosis:
    """Explain the traces; where that fails, say why and leave them."""
    only = next(iter(options.stages)) if len(options.stages) == 1 else None
    try:
        return explain(
            recording.traces,
            stage=only,
            server=recording.server,
            mapping=options.mapping,
            sources=options.stacks,
        )
    except UnreadableInputError as error:
        reason = str(error)
        if recording.device == "cpu":
            reason = "this server runs on its CPU: they hold no device work, so there is nothing to rank"
        message = f"{recording.out / 'traces'}: {count(len(recording.traces), 'trace')} recorded and kept, but {reason}"
        _write(recording.out / "report.txt", f"{recording.announcement}\n\n{message}\n{recording.summary}\n")
        announce(recording.summary)
        raise UnreadableInputError(message) from error


def _make(out: Path) -> None:
    traces = out / "traces"
    try:
        traces.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{traces}: cannot be made: {error.strerror}; give another --out") from error
    if any(traces.iterdir()):
        raise UsageError(f"{traces}: holds traces of another profile; give another --out")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; the traces are in {path.parent}") from error


def _write(path: Path, text: str) -> None:
    with _opened(path) as file:
        file.write(text)
