"""`mla-diag doctor`: whether a server copies its KV pool, without load and without profiling."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from mla_diag.commands.common import Format
from mla_diag.diagnose.diagnosis import Tool
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info, read_server_info
from mla_diag.errors import ExposedError, UsageError
from mla_diag.server.client import Client
from mla_diag.server.exposure import Exposure, expose
from mla_diag.server.model_config import ModelConfig, read_model_config

SCHEMA_VERSION = 1
_DRIVER = Path("/proc/driver/nvidia/gpus")
_WIDTH = 120
_INDENT = 12


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
        print(_json(exposure))
    else:
        console = Console(highlight=False, width=_WIDTH, soft_wrap=True)
        for line in describe(exposure):
            console.print(line, markup=False)
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


def describe(exposure: Exposure) -> Iterator[str]:
    """The exposure in lines for a person."""
    yield _headline(exposure)
    for stage in exposure.stages:
        verdict = {True: "copies", False: "does not copy", None: "not known"}[stage.copies]
        yield from _item(stage.stage.value, f"{stage.backend or 'backend not given'}: {verdict}: {stage.why}")
        if stage.copies and stage.site:
            yield from _item("", stage.site)
    known = [f"{name} {fact.value} ({fact.source})" for name, fact in exposure.facts.items() if fact.value is not None]
    yield from _item("known", "; ".join(known))
    yield from cost_lines(exposure)
    yield from floor_lines(exposure)
    for number, remedy in enumerate(exposure.remedies):
        yield from _item("" if number else "what to do", remedy)
    for number, unknown in enumerate(exposure.unknown):
        yield from _item("" if number else "not known", unknown)


def _headline(exposure: Exposure) -> str:
    if exposure.exposed is None:
        return "UNKNOWN: too little is known to say whether this server copies its KV pool"
    if not exposure.exposed:
        return "NOT EXPOSED: this server does not copy its KV pool"
    cost = exposure.copy
    much = ""
    if cost is not None:
        much = (
            f", {cost.ms_per_layer:.2f} ms a layer"
            if cost.ms_per_step is None
            else f", {cost.ms_per_step:.1f} ms a step"
        )
    return f"EXPOSED: this server copies its whole KV pool in every layer{much}"


def cost_lines(exposure: Exposure) -> Iterator[str]:
    """What copying costs, with its inputs."""
    cost = exposure.copy
    if cost is None:
        return
    layers = "layers unknown" if cost.layers is None else f"{cost.layers} layers"
    total = cost.bytes_per_layer if cost.bytes_per_step is None else cost.bytes_per_step
    yield from _item(
        "cost",
        f"{cost.rows:,} rows x {cost.width} x 3 bytes (1 read, 2 written), {layers}: {total / 1e9:.3g} GB "
        f"{'a layer' if cost.bytes_per_step is None else 'a step'} at {cost.bytes_per_second / 1e12:.2f} TB/s",
    )
    yield from _item("", f"rate: {cost.rate_source}")


def floor_lines(exposure: Exposure) -> Iterator[str]:
    """The floor of a decode step, with its inputs, and how much of a step the copy is at least."""
    floor = exposure.floor
    if floor is None:
        return
    experts = "" if floor.experts_read is None else f", about {floor.experts_read:.1f} experts a layer"
    yield from _item(
        "floor",
        f"{floor.ms:.2f} ms a decode step: {floor.weight_bytes / 1e9:.3g} GB of weights "
        f"({floor.weight_bits:.3g} bits, {floor.quantization or 'not quantised'}{experts}) and "
        f"{floor.kv_bytes / 1e9:.3g} GB of KV (batch {floor.batch}, {floor.context:,} tokens each) on one rank, at "
        f"{floor.bandwidth / 1e12:.2f} TB/s ({floor.bandwidth_source})",
    )
    if exposure.copy is not None and exposure.copy.ms_per_step is not None:
        least = floor.ms + exposure.copy.ms_per_step
        yield from _item(
            "gap",
            f"a decode step takes at least {least:.1f} ms, {exposure.copy.ms_per_step / least:.0%} of it the copy",
        )


def _item(name: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, _WIDTH - _INDENT - 2, break_on_hyphens=False, break_long_words=False)
    for number, line in enumerate(lines):
        yield f"  {name if not number else '':<{_INDENT}}{line}"


def _json(exposure: Exposure) -> str:
    fields: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "tool": msgspec.to_builtins(Tool())}
    return msgspec.json.format(msgspec.json.encode(fields | msgspec.to_builtins(exposure)), indent=2).decode()
