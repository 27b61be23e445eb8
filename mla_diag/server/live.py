"""What can be learnt of a live server without load: its card, its model, and whether it copies its KV pool."""

from __future__ import annotations

import re
from pathlib import Path

from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from mla_diag.server.client import Client
from mla_diag.server.exposure import Exposure, expose
from mla_diag.server.model_config import ModelConfig, read_model_config

_DRIVER = Path("/proc/driver/nvidia/gpus")


def expose_live(
    client: Client, *, model_config: Path | None = None, gpu: str | None = None, batch: int = 1, context: int = 2000
) -> Exposure:
    """Judge a live server.

    Args:
        client: The server.
        model_config: Its model's config.json, or the directory that has it; None for the one at its model's path.
        gpu: Its card, as the driver names it; None for what the server or this host's driver says.
        batch: Requests of the decode step whose floor is asked for.
        context: Tokens of each.

    Raises:
        ServerError: It could not be asked.
        UnreadableInputError: The model's config could not be read.
    """
    server = parse_server_info(client.server_info())
    return expose(
        server,
        model_of(server, model_config, here=client.is_local),
        architecture=_architecture_of(client),
        gpu=gpu_named(gpu or card_of(client)),
        batch=batch,
        context=context,
    )


def _architecture_of(client: Client) -> str | None:
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
