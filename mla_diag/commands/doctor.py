"""`mla-diag doctor`: whether a server copies its KV pool, without load and without profiling."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from mla_diag.commands.common import Format
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info, read_server_info
from mla_diag.errors import ExposedError, UsageError
from mla_diag.report.exposure import print_exposure
from mla_diag.report.json import render_json
from mla_diag.server.client import Client
from mla_diag.server.exposure import Exposure, expose
from mla_diag.server.model_config import ModelConfig, read_model_config

_DRIVER = Path("/proc/driver/nvidia/gpus")


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
            exposure = ask(client, model_config=model_config, gpu=gpu, batch=batch, context=context)
    if output_format is Format.JSON:
        print(render_json(exposure), end="")
    else:
        print_exposure(exposure, Console(highlight=False))
    if exposed_stages := [stage for stage in exposure.stages if stage.copies]:
        names = " and ".join(stage.stage.value for stage in exposed_stages)
        raise ExposedError(f"this server copies its whole KV pool in {names} steps")
    if exposure.exposed is None:
        raise UsageError("doctor: cannot tell whether this server copies its pool; see what is not known above")


def ask(
    client: Client, *, model_config: Path | None = None, gpu: str | None = None, batch: int = 1, context: int = 2000
) -> Exposure:
    """Judge a live server; see `run` for what may be given."""
    server = parse_server_info(client.server_info())
    return expose(
        server,
        model_of(server, model_config, here=client.is_local),
        architecture=architecture_of(client),
        gpu=gpu_named(gpu or card_of(client)),
        batch=batch,
        context=context,
    )


def architecture_of(client: Client) -> str | None:
    """The architecture of a live server's model, where its release says."""
    info = client.optional("model_info") or client.optional("get_model_info") or {}
    named = info.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def card_of(client: Client) -> str | None:
    """The card of a live server: by its own word, or by this host's driver if it runs here."""
    said = (client.optional("v1/loads") or {}).get("accelerator")
    if isinstance(said, str) and said:
        return said
    if not client.is_local:
        return None
    for file in sorted(_DRIVER.glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return None


def model_of(server: ServerInfo, given: Path | None, *, here: bool = False) -> ModelConfig | None:
    """The config of a server's model: the file that was given, or the model's own where the server runs here."""
    if given is not None:
        return read_model_config(given, server.quantization)
    if not here or server.model_path is None:
        return None
    beside = Path(server.model_path, "config.json")
    return read_model_config(beside, server.quantization) if beside.is_file() else None
