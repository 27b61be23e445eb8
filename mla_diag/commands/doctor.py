"""`mla-diag doctor`: whether a server copies its KV pool, without load and without profiling."""

from __future__ import annotations

from pathlib import Path

from mla_diag.commands.common import Format, plain_console
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import read_server_info
from mla_diag.errors import ExposedError, UsageError
from mla_diag.report.exposure import print_exposure
from mla_diag.report.json import render_json
from mla_diag.server.client import Client
from mla_diag.server.exposure import expose
from mla_diag.server.live import expose_live, model_of


def run(
    url: str | None = None,
    *,
    api_key: str | None = None,
    verify: bool | Path = True,
    server_info: Path | None = None,
    model_config: Path | None = None,
    gpu: str | None = None,
    batch: int = 1,
    context: int = 2000,
    output_format: Format = Format.TERMINAL,
) -> None:
    """Judge a live server, or a saved answer of one, and print what was found.

    Args:
        url: The live server.
        api_key: Its key, if it has one.
        verify: Whether to check its certificate, or the file of the authority that signed it.
        server_info: Its saved answer instead.
        model_config: Its model's config.json, or the directory that has it.
        gpu: Its card, as the driver names it.
        batch: Requests of the decode step whose floor is shown.
        context: Tokens of each.
        output_format: terminal or json.

    Raises:
        ExposedError: The server copies its pool; the report has been printed by then.
        ServerError: The live server could not be asked.
        UnreadableInputError: A file could not be read.
        UsageError: Neither or both of server and answer, or too little is known to judge; the report has been printed.
    """
    if (url is None) == (server_info is None):
        raise UsageError("doctor: give the server's --url, or its saved answer with --server-info, one of the two")
    if server_info is not None:
        server = read_server_info(server_info)
        model = model_of(server, model_config)
        exposure = expose(server, model, gpu=gpu_named(gpu), batch=batch, context=context)
    else:
        with Client(str(url), api_key=api_key, verify=verify) as client:
            exposure = expose_live(client, model_config=model_config, gpu=gpu, batch=batch, context=context)
    if output_format is Format.JSON:
        print(render_json(exposure), end="")
    else:
        print_exposure(exposure, plain_console())
    if exposed_stages := [stage for stage in exposure.stages if stage.copies]:
        names = " and ".join(stage.stage.value for stage in exposed_stages)
        raise ExposedError(f"this server copies its whole KV pool in {names} steps")
    if exposure.exposed is None:
        raise UsageError("doctor: cannot tell whether this server copies its pool; see what is not known above")
