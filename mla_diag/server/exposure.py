"""Whether a server copies its KV pool in every layer of a step, and what that costs: from what it says, by arithmetic.

Four things together make the copy (sglang#35291): an MLA model, an FP8 pool, an attention backend that casts the pool
to the query's type, and a release that has the cast. What is not known of the four is said, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mla_diag.diagnose.cause import known_line
from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Tool
from mla_diag.diagnose.gap import Floor, Gap
from mla_diag.diagnose.gpu import Gpu
from mla_diag.diagnose.pool_shapes import MLA_WIDTH
from mla_diag.diagnose.server_info import POOL_BYTES_ERROR, ServerInfo
from mla_diag.diagnose.step_spans import Stage
from mla_diag.server.copy_cost import CopyCost, copy_cost
from mla_diag.server.floor import floor_of_decode
from mla_diag.server.model_config import ModelConfig
from mla_diag.server.releases import (
    CASTS,
    LAST_READ,
    MLA_ARCHITECTURES,
    MLA_BACKENDS,
    READS_FP8,
    default_backend,
    is_older,
)

Value = bool | int | float | str | None


class Fact(msgspec.Struct, frozen=True):
    """One thing known of a server, or None, and what says so."""

    value: Value
    source: str


class StageExposure(msgspec.Struct, frozen=True):
    """Whether the steps of one stage copy the pool.

    Attributes:
        stage: decode or prefill.
        backend: The attention backend; None where the server does not say.
        copies: None where that is not known.
        site: The file, line (where the release is known) and function of SGLang's that casts; None where none does.
        why: In words.
    """

    stage: Stage
    backend: str | None
    copies: bool | None
    site: str | None
    why: str


class Exposure(msgspec.Struct, frozen=True):
    """What can be said of a server without profiling it.

    Attributes:
        exposed: Whether some stage copies the pool; None where it cannot be told.
        facts: What is known, by name: version, mla, kv_dtype, rows, width, layers, gpu.
        stages: Each stage.
        copy: What it costs; None where nothing copies or the pool's size is unknown.
        floor: The least that a decode step can take; None without the model's config or an unknown card.
        gap: A decode step with that copy beside the floor; None where decode copies nothing or either is unknown.
        remedies: What to do, best first.
        unknown: What could not be told, and how to tell.
    """

    exposed: bool | None
    facts: dict[str, Fact]
    stages: list[StageExposure]
    copy: CopyCost | None
    floor: Floor | None
    gap: Gap | None
    remedies: list[str]
    unknown: list[str]
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()


def expose(
    server: ServerInfo,
    model: ModelConfig | None = None,
    *,
    architecture: str | None = None,
    gpu: Gpu | None = None,
    batch: int = 1,
    context: int = 2000,
) -> Exposure:
    """Judge a server.

    Args:
        server: What it says of itself.
        model: Its model's config, if that can be read.
        architecture: The model's, as the server says at /model_info, if it does.
        gpu: Its card, if that is known.
        batch: Requests in the decode step whose floor is asked for.
        context: Tokens of each.
    """
    gpu = gpu or Gpu(None, None, None, None)
    width = (model.width if model is not None else None) or MLA_WIDTH
    layers = _layers(server, model, width)
    mla = _is_mla(server, model, architecture)
    dtype, fp8 = _kv_dtype(server, model, width)
    facts = {
        "version": Fact(server.version, "the server"),
        "mla": mla,
        "kv_dtype": dtype,
        "rows": Fact(server.pool_rows, "the server: max_total_num_tokens and a page"),
        "width": Fact(width if mla.value else None, "the model's config" if model else "every MLA model so far"),
        "layers": layers,
        "gpu": Fact(gpu.name, "given, or as the server or the driver has it"),
    }
    stages = [_stage(stage, server, gpu, mla.value, fp8) for stage in (Stage.DECODE, Stage.PREFILL)]
    exposed = _any(stage.copies for stage in stages)
    copy = None
    if any(stage.copies for stage in stages):
        copy = copy_cost(server, width, layers.value if isinstance(layers.value, int) else None, gpu)
    floor = None
    if model is not None:
        floor = floor_of_decode(model, server, gpu, kv_bytes=1 if fp8 else 2, batch=batch, context=context)
    gap = _predicted_gap(copy, floor) if stages[0].copies else None
    unknown = [] if exposed is False else _unknown(server, model, gpu, facts, stages)
    return Exposure(exposed, facts, stages, copy, floor, gap, _remedies(exposed, stages, server), unknown)


def _is_mla(server: ServerInfo, model: ModelConfig | None, architecture: str | None) -> Fact:
    if model is not None:
        return Fact(model.mla, f"the model's config ({model.architecture})")
    backend = next((name for name in _backends(server) if name in MLA_BACKENDS), None)
    if backend is not None:
        return Fact(True, f"its attention backend, {backend}, which runs no other models")
    if server.chunked_prefix_cache:
        return Fact(True, "its scheduler has chunked prefix caching on, which SGLang turns off for any other model")
    if architecture is not None and MLA_ARCHITECTURES.search(architecture):
        return Fact(True, f"its architecture, {architecture}")
    if architecture is not None and server.chunked_prefix_cache is False:
        return Fact(False, f"its architecture, {architecture}, and its scheduler")
    return Fact(None, "neither the server's answer nor a model's config says")


def _kv_dtype(server: ServerInfo, model: ModelConfig | None, width: int) -> tuple[Fact, bool | None]:
    """The pool's dtype, and whether that is FP8."""
    if server.fp8_pool is not None:
        return Fact(server.kv_cache_dtype, "--kv-cache-dtype"), server.fp8_pool
    if model is not None and model.fp8_kv:
        return Fact("fp8_e4m3", "auto: the checkpoint's kv_cache_quant_algo"), True
    size = _bytes_per_element(server, model, width)
    if size is not None:
        return Fact("an 8-bit type" if size == 1 else "a 16-bit type", "auto: by the size of the pool"), size == 1
    if model is not None:
        return Fact("the model's type", "auto, and the checkpoint asks for no FP8 pool"), False
    return Fact("auto", "--kv-cache-dtype; the model's config decides"), None


def _bytes_per_element(server: ServerInfo, model: ModelConfig | None, width: int) -> int | None:
    if model is None or not model.layers or server.pool_bytes is None or not server.pool_rows or not model.mla:
        return None
    layers = model.layers / server.pipeline_parallel
    size = round(server.pool_bytes / (server.pool_rows * width * layers))
    return size if size in (1, 2) else None


def _layers(server: ServerInfo, model: ModelConfig | None, width: int) -> Fact:
    if model is not None and model.layers:
        return Fact(model.layers, "the model's config")
    if server.fp8_pool and server.pool_bytes is not None and server.pool_rows:
        of_layer = server.pool_rows * width
        layers = round(server.pool_bytes / of_layer)
        if layers and abs(server.pool_bytes - layers * of_layer) <= POOL_BYTES_ERROR:
            return Fact(layers * server.pipeline_parallel, "the bytes of the server's pool over those of a layer")
    return Fact(None, "the server does not say")


def _backends(server: ServerInfo) -> list[str]:
    return [name for decode in (True, False) if (name := server.backend(decode=decode)) is not None]


def _stage(stage: Stage, server: ServerInfo, gpu: Gpu, mla: Value, fp8: bool | None) -> StageExposure:
    """Judge one stage: harmless if one of the four conditions fails, unknown if its backend is."""
    said = server.backend(decode=stage is Stage.DECODE)
    backend = said or default_backend(gpu.name)
    harmless = _harmless(backend, server, mla, fp8)
    if harmless is not None:
        return StageExposure(stage, said, False, None, harmless)
    if backend is None:
        return StageExposure(stage, None, None, None, "the server does not say which attention backend it uses")
    if backend not in CASTS:
        return StageExposure(
            stage, said, None, None, "this backend is not known; `mla-diag profile` shows what it does"
        )
    file, _ = CASTS[backend]
    function = "forward_decode" if stage is Stage.DECODE else "forward_extend"
    why = "casts the whole pool to the query's type in every layer"
    if stage is Stage.PREFILL:
        why += " of steps that read a cached prefix"
    if said is None:
        why += f"; {backend} is SGLang's default for MLA on this card"
    if mla is None or fp8 is None:
        why += f", if {'the model is MLA' if mla is None else 'the pool is FP8'}"
    # An FP8 pool and a backend that casts it leave one question open; an unknown pool leaves it open altogether.
    line = known_line(server.version, file, function)
    site = f"sglang/srt/layers/attention/{file}{'' if line is None else f':{line}'} {function}"
    return StageExposure(stage, said, None if fp8 is None else True, site, why)


def _harmless(backend: str | None, server: ServerInfo, mla: Value, fp8: bool | None) -> str | None:
    """Why nothing is copied, or None if something may be."""
    if mla is False:
        return "the model is not MLA"
    if fp8 is False:
        return "the pool is not FP8, so there is nothing to convert"
    if backend in READS_FP8:
        return "this backend reads the FP8 pool as it is"
    since = CASTS[backend][1] if backend in CASTS else None
    if since is not None and is_older(server.version, since):
        return f"this release has no cast: the first that does is {since}"
    return None


def _predicted_gap(copy: CopyCost | None, floor: Floor | None) -> Gap | None:
    """The least that a decode step takes which copies the pool, beside its floor."""
    if copy is None or copy.ms_per_step is None or floor is None:
        return None
    cost = copy.ms_per_step
    return Gap(
        floor.ms + cost, measured=False, wall_ms=None, gap_ms=cost, copy_ms=cost, trace=None, copy_by_flags_ms=cost
    )


def _remedies(exposed: bool | None, stages: list[StageExposure], server: ServerInfo) -> list[str]:
    if exposed is False:
        return ["nothing: this server does not copy its pool"]
    if exposed is None:
        return []
    found = ["`mla-diag fix --apply` on the server's host: attention reads the pool as it is; then restart the server"]
    if {stage.backend for stage in stages} != {"triton"}:
        found.append("`--attention-backend triton`: no copy; slower than a fixed flashinfer or fa3 at long contexts")
    found.append("`--attention-backend flashmla --page-size 64` on Hopper: no copy")
    held = (
        "" if server.pool_tokens is None else f", {server.pool_tokens // 2:,} tokens instead of {server.pool_tokens:,}"
    )
    found.append(f"`--kv-cache-dtype bf16`: no copy, and half the capacity{held}")
    return found


def _unknown(
    server: ServerInfo,
    model: ModelConfig | None,
    gpu: Gpu,
    facts: dict[str, Fact],
    stages: list[StageExposure],
) -> list[str]:
    found = []
    judged_by_model = facts["mla"].value is None or facts["layers"].value is None
    if model is None and (judged_by_model or any(stage.copies is None for stage in stages)):
        lacking = [name for name, fact in facts.items() if fact.value is None and name in ("mla", "layers")]
        what = {"mla": "whether the model is MLA", "layers": "how many layers it has"}
        words = " and ".join(what[name] for name in lacking) or "what type `--kv-cache-dtype auto` is"
        found.append(f"{words}: give the model's config.json with --model-config")
    if gpu.name is None:
        found.append("which card this is: name it with --gpu, such as --gpu H100")
    if server.pool_rows is None:
        found.append("the pool's size: this release does not say; `mla-diag profile` reads it off a trace")
    if model is None:
        found.append("the floor of a decode step, which needs --model-config")
    if any(stage.copies for stage in stages):
        found.append("whether this SGLang was patched: `mla-diag fix --verify` on its host tells")
    if server.version is not None and is_older(LAST_READ, server.version):
        found.append(f"whether {server.version} still casts: releases up to {LAST_READ} were read")
    return found


def _any(answers: Iterable[bool | None]) -> bool | None:
    """Whether any is true; None if none is and some are unknown."""
    listed = list(answers)
    return True if True in listed else None if None in listed else False
