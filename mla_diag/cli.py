"""The command line: each command is one thin function that calls its module in `commands`.

Those modules are imported when their command runs, because `--help` and shell completion should not wait for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mla_diag._version import __version__
from mla_diag.commands.standard_streams import sturdy_streams
from mla_diag.errors import MlaDiagError, UnreadableInputError, UsageError

app = typer.Typer(
    name="mla-diag",
    help="Find, explain and fix what an MLA decode or prefill step wastes on a live SGLang server.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


OutputFormat = Annotated[str, typer.Option("--format", help="terminal or json.")]
ModelConfig = Annotated[Path | None, typer.Option(help="The model's config.json, or the directory that has it.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="MLA_DIAG_API_KEY", show_default=False, help="For servers started with --api-key."),
]
CaFile = Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the server's.")]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="DASK", help="Read several traces at a time: processes, or a Dask scheduler's tcp://HOST:PORT."
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")]


def _verify(ca_file: Path | None, insecure: bool) -> bool | Path:
    """How a server's certificate is checked; an authority that was named does not matter where none is."""
    return not insecure and (ca_file or True)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"mla-diag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def explain(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Traces (.json, .json.gz), directories of them, glob patterns; or URLs: sftp://."
        ),
    ],
    output_format: OutputFormat = "terminal",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the report to this file.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Ops to print a stage; JSON has all of them.")] = 10,
    stage: Annotated[str | None, typer.Option(help="Only decode, prefill, mixed or other steps.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="RANK", help="Only this rank: 3, TP1-DP0; or ranks: DP1.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps to leave out at the head of each stage.")] = 0,
    sources: Annotated[bool, typer.Option(help="Read Python frames and name the line behind each op.")] = True,
    server_info: Annotated[
        Path | None, typer.Option(help="What GET /server_info of the traced server answered: its pool and backends.")
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A trace of the same server without CUDA graphs, or of their capture: names what they replay.",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND[:LIMIT]", help="Exit with 1 on such a finding: whole-pool-copy, any:2ms, any:5%."),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Leave findings of this kind out.")] = None,
    scheduler: Scheduler = None,
) -> None:
    """Rank what a step spends its time on, per stage and rank, from recorded traces.

    Exits with 0, with 1 on a finding that --fail-on names, 2 for wrong options, 3 if a trace could not be read, 4 if
    --scheduler does not do it.
    """
    from mla_diag.commands import common
    from mla_diag.commands import explain as command

    command.run(
        paths,
        output_format=common.parse_format(output_format),
        output=output,
        top=top,
        stage=common.parse_stage(stage),
        rank=rank,
        warmup=warmup,
        sources=sources,
        server_info=server_info,
        mapping=mapping,
        fail_on=fail_on or (),
        ignore=ignore or (),
        scheduler=scheduler,
    )


@app.command()
def profile(
    url: Annotated[str, typer.Option(help="The server's address: http://HOST:PORT, with its path.")],
    stage: Annotated[str, typer.Option(help="The stages to report: decode, prefill or both.")] = "decode,prefill",
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of each stage to record.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Requests in a step.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2000,
    cached_len: Annotated[
        int | None, typer.Option(min=0, show_default="half", help="Of them, in the cache before: paged prefill.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, show_default="what the steps take", help="New tokens of each.")
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Record Python stacks: names lines, slows the host.")
    ] = False,
    no_load: Annotated[
        bool, typer.Option("--no-load", help="Send nothing: record the next --steps forward passes of your traffic.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(show_default="a new one", help="The directory to leave everything in.")
    ] = None,
    trace_root: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the server writes and this host can read: a shared path, an fsspec URL, or PATH=PATH_OR_URL.",
        ),
    ] = None,
    model_config: ModelConfig = None,
    mapping: Annotated[
        str | None, typer.Option(metavar="PATH", help="A trace that names what CUDA graphs replay.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Ops to print a stage.")] = 10,
    fail_on: Annotated[
        list[str] | None, typer.Option(metavar="KIND[:LIMIT]", help="Exit with 1 on such a finding.")
    ] = None,
    export_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait while it exports.")] = 600.0,
    traffic_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for traffic with --no-load.")] = 120.0,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Record what a live server's steps spend their time on, and explain it.

    Exits as explain does, and with 4 if the server cannot be reached, refuses, or never writes its traces.
    """
    from mla_diag.commands import profile as command
    from mla_diag.server.connection import Timeouts

    options = command.Options(
        stages=command.parse_stages(stage),
        steps=steps,
        batch=batch,
        input_len=input_len,
        cached_len=cached_len,
        output_len=output_len,
        stacks=stacks,
        no_load=no_load,
        traffic_timeout=traffic_timeout,
        out=out,
        trace_root=trace_root,
        model_config=model_config,
        mapping=mapping,
        top=top,
        fail_on=fail_on or (),
    )
    timeouts = Timeouts(export=export_timeout)
    command.run(url, options, api_key=api_key, verify=_verify(ca_file, insecure), timeouts=timeouts)


@app.command()
def doctor(
    url: Annotated[str | None, typer.Option(help="The server's address: http://HOST:PORT, with its path.")] = None,
    server_info: Annotated[
        Path | None, typer.Option(help="Instead of a live server: what its GET /server_info answered.")
    ] = None,
    model_config: ModelConfig = None,
    gpu: Annotated[
        str | None, typer.Option(help="The server's card, where nothing says: H100, NVIDIA B200 ...")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests of the decode step whose floor is shown.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 2000,
    output_format: OutputFormat = "terminal",
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Say whether a server copies its KV pool, what that costs and what to do; no load, no profiling.

    Exits with 0, with 1 if the server copies its pool, 2 if too little is known to tell, 3 for a file that cannot be
    read, 4 if the server does not answer.
    """
    from mla_diag.commands import common
    from mla_diag.commands import doctor as command

    command.run(
        url,
        api_key=api_key,
        verify=_verify(ca_file, insecure),
        server_info=server_info,
        model_config=model_config,
        gpu=gpu,
        batch=batch,
        context=context,
        output_format=common.parse_format(output_format),
    )


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="A trace, a directory of them, or a JSON report of explain.")],
    after: Annotated[str, typer.Argument(help="The same after a change.")],
    output_format: OutputFormat = "terminal",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the comparison to this file.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Ops to print a stage; JSON has all of them.")] = 10,
    fail_on_slower: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Exit with 1 if a stage's step takes longer by more: 5%.")
    ] = None,
    scheduler: Scheduler = None,
) -> None:
    """Compare two recordings stage by stage: which ops went, came, grew and shrank, and what that saved.

    Exits with 0, with 1 on what --fail-on-slower names, 2 for wrong options, 3 if one of the two could not be read, 4
    if --scheduler does not do it.
    """
    from mla_diag.commands import common
    from mla_diag.commands import compare as command

    command.run(
        before,
        after,
        output_format=common.parse_format(output_format),
        output=output,
        top=top,
        fail_on_slower=fail_on_slower,
        scheduler=scheduler,
    )


@app.command()
def fix(
    apply: Annotated[bool, typer.Option("--apply", help="Change the files; all of them or none.")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="Put the originals back, byte for byte.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Print the dtype map and prove that no whole-pool cast remains.")
    ] = False,
    strategy: Annotated[str, typer.Option(help="auto, kernel, native or gather.")] = "auto",
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="SGLang's package, a site-packages, a venv, a checkout, a container's mount."),
    ] = None,
    output_format: OutputFormat = "terminal",
) -> None:
    """Show, apply, prove or revert the fix of an installed SGLang's whole-pool casts; shows it unless told more.

    Exits with 0, with 1 if --verify fails or files cannot be changed, 2 for wrong options, 5 for unknown code.
    """
    from mla_diag.commands import common
    from mla_diag.commands import fix as command
    from mla_diag.commands.strategies import parse_strategy

    command.run(
        apply=apply,
        revert=revert,
        verify=verify,
        strategy=parse_strategy(strategy),
        sglang=sglang,
        output_format=common.parse_format(output_format),
    )


bench = typer.Typer(no_args_is_help=True, help="Measure what a change is worth: to one kernel, to a server.")
app.add_typer(bench, name="bench")


@bench.command("kernel")
def bench_kernel(
    heads: Annotated[list[int] | None, typer.Option(min=1, max=128, help="Query heads on a rank; repeat.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="BATCHxCONTEXT", help="Requests and tokens of each: 16x8192; repeat.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as well.")] = None,
    milliseconds: Annotated[int, typer.Option("--rep-ms", min=1, help="Time spent on each measurement.")] = 30,
    recorded: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show what --json wrote instead of measuring.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it to this SVG file as well.")] = None,
) -> None:
    """Time the attention of one layer over an FP8 pool: every alternative installed, against the roofline."""
    from mla_diag.commands import bench_kernel as command

    command.run(heads or (), shape or (), output, milliseconds, recorded=recorded, plot=plot)


@bench.command("server")
def bench_server(
    serve: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Start this server, and end it: 'python -m sglang.launch_server ...'."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Measure a server that somebody else runs; nothing is fixed.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxCONTEXT",
            show_default="1x2000, 1x30000 and 16x2000",
            help="Requests sent together and tokens of each: 16x8192; repeat.",
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of each request.")] = 65,
    repeats: Annotated[int, typer.Option(min=1, help="Waves of each row that count.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Waves of each row before them that do not.")] = 1,
    strategy: Annotated[str, typer.Option(help="Of the fix: auto, kernel, native or gather.")] = "auto",
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="of COMMAND's Python", help="The SGLang to fix, as for fix."),
    ] = None,
    revert: Annotated[bool, typer.Option("--revert", help="Put SGLang back as it was in the end.")] = False,
    no_fix: Annotated[bool, typer.Option("--no-fix", help="Only start the server and measure it as it is.")] = False,
    no_logits: Annotated[bool, typer.Option("--no-logits", help="Do not compare what the two servers say.")] = False,
    no_profile: Annotated[bool, typer.Option("--no-profile", help="Only measure: record no traces.")] = False,
    out: Annotated[
        Path | None, typer.Option(show_default="a new one", help="The directory for logs and profiles.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the results to this file as well.")] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the server to start.")] = 900.0,
    model_config: ModelConfig = None,
    top: Annotated[int, typer.Option(min=1, help="Ops to print a stage of the profiles.")] = 10,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Time first token, output tokens and throughput of a server; with --serve before and after the fix.

    Exits with 0, with 1 if SGLang's files cannot be changed, 2 for wrong options, 4 if a server fails, 5 for unknown
    code of SGLang's.
    """
    from mla_diag.commands import bench_server as command
    from mla_diag.commands.strategies import parse_strategy

    command.run(
        serve,
        url,
        command.Options(
            plan=command.plan_of(shape or (), output_len, repeats, warmup),
            fix=not no_fix,
            strategy=parse_strategy(strategy),
            sglang=sglang,
            revert=revert,
            logits=not no_logits,
            profiles=not no_profile,
            out=out,
            output=output,
            ready_timeout=ready_timeout,
            model_config=model_config,
            top=top,
        ),
        api_key=api_key,
        verify=_verify(ca_file, insecure),
    )


@app.command()
def demo() -> None:
    """Explain recordings that come with mla-diag: a server that copies its whole KV pool, and one that does not."""
    from mla_diag.commands import demo as command

    command.run()


def _refuse_empty(arguments: list[str]) -> None:
    """An empty path is the working directory, and a shell variable that is not set is an empty argument.

    Raises:
        UsageError: One is empty.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=")
        if not argument or (option.startswith("--") and equals and not value):
            name = option or (before if before.startswith("-") else "an argument")
            raise UsageError(f"{name}: nothing is given for it; is a shell variable not set?")


def _say(line: str) -> None:
    from mla_diag.report.visible import visible

    print(f"mla-diag: {visible(line)}", file=sys.stderr)


def main() -> None:
    """Run the command line; errors meant for its user become one line and an exit code."""
    with sturdy_streams():
        try:
            _refuse_empty(sys.argv[1:])
            try:
                app()
            finally:
                sys.stdout.flush()
        except MlaDiagError as error:
            for line in str(error).splitlines():
                _say(line)
            sys.exit(error.exit_code)
        except OSError as error:
            # A file that no command foresaw: one that its user may not even ask for, say.
            if error.filename is None:
                raise
            _say(f"{error.filename}: {error.strerror}")
            sys.exit(UnreadableInputError.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)
