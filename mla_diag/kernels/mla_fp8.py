"""Absorbed MLA attention that reads an FP8 (e4m3) paged pool as it lies, for decode and multi-token extend.

This file and mla_fp8_triton.py import torch, Triton and each other only: `mla-diag fix --apply` copies the two beside
SGLang's attention backends, with Hopper's own kernel and mla_fp8_operator.py, which takes one or the other.

The keys of a request are split so that the card is full (flash decoding). Which program does what is planned on the
device, from lengths that the host never sees: a captured CUDA graph fits any lengths of its batch. The plan depends on
lengths alone, so one serves all layers of a step.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

# Relative, because a copy beside SGLang's backends lies in another package.
from .mla_fp8_triton import (
    BITS,
    BITS_SCALE,
    CONVERT,
    EARLY_LAUNCH,
    GROUP_FIELDS,
    ITEM_FIELDS,
    PORTABLE,
    mla_fp8_attention,
    mla_fp8_combine,
    mla_fp8_plan,
)

__all__ = ["Schedule", "Tuning", "mla_fp8", "mla_schedule", "tuning", "workspace_bytes"]

LATENT = 512  # DeepSeek's, and with it Kimi's and GLM-5's; the 64 that follow in a row are rope
LOG2E = 1.4426950408889634
PLAN_ROWS = 32


@dataclass(frozen=True)
class Tuning:
    """How the kernel is laid out on one architecture.

    Attributes:
        block_tokens: KV rows a step.
        warps: warps a program.
        stages: software pipeline depth; a stage holds `block_tokens` rows of the pool.
        programs_per_sm: programs resident on a multiprocessor, by registers and shared memory.
        decode: how bytes become FP16: by `cvt` or by moving bits.
        whole_words: how keys are taken from registers, see `_scores`. Triton 3.6 keeps its pipeline this way for wgmma,
            not for mma.sync.
        block_heads: (query token, head) columns a program; 16 is the tensor core's smallest tile.
    """

    block_tokens: int
    warps: int
    stages: int
    programs_per_sm: int
    decode: int
    whole_words: bool = False
    block_heads: int = 16


def tuning(capability: tuple[int, int], columns: int = 16) -> Tuning:
    """Return the tuning of a card; docs/kernel-log.md has the measurements behind each entry.

    Args:
        capability: (major, minor), as `torch.cuda.get_device_capability` gives it.
        columns: query heads, times the query tokens of a request in extend.

    Returns:
        The table's entry. Architectures newer than the table get what every card since SM80 can run.

    Raises:
        ValueError: the card is older than SM80: no asynchronous copies, no BF16.
    """
    if capability < (8, 0):
        raise ValueError(f"the FP8 MLA kernel needs compute capability 8.0, this card has {capability}")
    if capability[0] == 9 and columns <= 16:
        # Two warpgroups of 64 tokens, wgmma's height, keys from registers. Three stages of 128 rows and the query take
        # 170 KB, and 256 threads of 255 registers an SM's whole file: one program.
        return Tuning(block_tokens=128, warps=8, stages=3, programs_per_sm=1, decode=CONVERT.value, whole_words=True)
    # All others multiply with mma.sync; so does Hopper where 32 columns can share what is decoded, which beats wgmma
    # with 16. No more than 32 tokens, because 64 spill, and because from 64 SM100 would turn to tcgen05, which takes
    # operands from shared memory: the very trip this kernel avoids. The 56 or 76 KB a program takes fit every card, and
    # twice into an SM with more than 100 KB. cvt is faster than moving bits, and came with SM89.
    small = capability in ((8, 6), (8, 9)) or capability[0] == 12
    decode = CONVERT if capability >= (8, 9) else BITS
    heads = 16 if columns <= 16 else 32
    return Tuning(32, warps=4, stages=3, programs_per_sm=1 if small else 2, decode=decode.value, block_heads=heads)


@dataclass(frozen=True)
class Schedule:
    """Who does what at given lengths; see `mla_schedule`.

    Attributes:
        items: [capacity, 8] int32, the work of each program.
        groups: [tiles, 4] int32, what is to be combined.
        config: the tuning it was made for.
    """

    items: torch.Tensor
    groups: torch.Tensor
    config: Tuning


def workspace_bytes(device: torch.device | str, config: Tuning | None = None, latent: int = LATENT) -> int:
    """Return the size of a workspace that serves every call on `device`, whatever the batch, heads and lengths."""
    device = torch.device(device)
    configs = [config] if config else [_tuning(device, columns) for columns in (16, 32)]
    return max(_partial_rows(c, device) for c in configs) * (latent * 2 + 4)


def mla_schedule(
    heads: int,
    *,
    kv_indptr: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    tokens: int | None = None,
    config: Tuning | None = None,
) -> Schedule:
    """Plan a step on the device, for all its layers; the arguments are those of `mla_fp8`.

    Args:
        heads: query heads.
        kv_indptr: [B + 1] int32; the lengths, where `kv_lens` is absent.
        kv_lens: [B] int32.
        qo_indptr: [B + 1] int32 in extend.
        tokens: query tokens, in extend.
        config: tuning in place of the table's.

    Returns:
        A schedule that is valid until a length changes. Recorded in a CUDA graph, it is made anew by every replay.

    Raises:
        ValueError: there are no lengths, or `qo_indptr` comes without `tokens`.
    """
    lengths = kv_lens if kv_lens is not None else kv_indptr
    if lengths is None or (qo_indptr is None) != (tokens is None):
        raise ValueError("a schedule needs kv_lens or kv_indptr, and tokens with qo_indptr")
    batch = len(lengths) - (kv_lens is None)
    config = config or _tuning(lengths.device, heads if tokens is None else triton.cdiv(tokens, max(batch, 1)) * heads)
    columns = config.block_heads
    slots = config.programs_per_sm * _processors(lengths.device)
    # In extend one more, for query tokens that no request has.
    tiles = batch * triton.cdiv(heads, columns) if tokens is None else tokens * heads // columns + batch + 1
    capacity = max(slots, tiles + slots // 4)  # the room that `mla_fp8_plan` has at most
    items = torch.empty(capacity, ITEM_FIELDS.value, dtype=torch.int32, device=lengths.device)
    groups = torch.empty(tiles, GROUP_FIELDS.value, dtype=torch.int32, device=lengths.device)
    mla_fp8_plan[(triton.cdiv(capacity, PLAN_ROWS),)](
        kv_indptr, kv_lens, qo_indptr, items, groups, batch, heads, slots, capacity, tiles,
        HAS_LENS=kv_lens is not None, EXTEND=qo_indptr is not None, BATCH=max(16, triton.next_power_of_2(batch)),
        BLOCK_H=columns, BLOCK_N=config.block_tokens, ROWS=PLAN_ROWS, num_warps=4,
    )  # fmt: skip
    return Schedule(items, groups, config)


def mla_fp8(
    query: torch.Tensor,
    pool: torch.Tensor,
    *,
    sm_scale: float,
    query_rope: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    page_size: int = 1,
    qo_indptr: torch.Tensor | None = None,
    causal: bool = True,
    kv_scale: float = 1.0,
    latent: int = LATENT,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    natural_lse: bool = False,
    schedule: Schedule | None = None,
    workspace: torch.Tensor | None = None,
    config: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to an FP8 pool with an absorbed MLA query, without copying the pool.

    The keys are addressed by a CSR pair (FlashInfer's `kv_indptr`, `kv_indices`) or a page table (FlashAttention's).
    Nothing is read back to the host and the launch depends on shapes alone: the call can be captured in a CUDA graph
    and replayed with other lengths. Rows that no request refers to never reach the result. The byte 0x7f, NaN in
    e4m3, counts as 480 where bits are decoded by hand (before SM89).

    Args:
        query: [T, H, 512] with `query_rope`, or [T, H, 576]; BF16 or FP16; the last dimension contiguous.
        pool: e4m3 numbers (`float8_e4m3fn`, or the same bytes as `uint8`) of shape [rows, 576], [rows, 1, 576] or
            [pages, page_size, 1, 576]; rows may lie further apart than 576 bytes, by an even number of bytes.
        sm_scale: factor of the scores, for DeepSeek (128 + 64) ** -0.5.
        query_rope: [T, H, 64], where the query comes in two.
        kv_indptr: [B + 1] int32, where each request's entries of `kv_indices` begin.
        kv_indices: pages of the pool, int32; rows, at page size 1.
        page_table: [B, max_pages] int32, in place of the CSR pair.
        kv_lens: [B] int32, tokens a request. Needed with a page table or pages of several tokens.
        page_size: tokens a page.
        qo_indptr: [B + 1] int32, where each request's query tokens begin. None means one each (decode).
        causal: whether the last query token of a request stands at its last key, the one before it a key earlier, and
            so on. Without effect in decode.
        kv_scale: what one unit of the pool's numbers is worth. SGLang's MLA pools are unscaled: 1.0.
        latent: width of the latent, here called 512, a power of two from 128. Rope, here 64, is one from 32.
        out: [T, H, 512] to write into, in any floating dtype.
        lse: [T, H] float32, contiguous, to write into.
        natural_lse: whether the log-sum-exp is natural (FlashAttention) rather than base 2 (FlashInfer).
        schedule: from `mla_schedule` at these very lengths; made here when absent.
        workspace: at least `workspace_bytes(...)` bytes of `uint8`; allocated when absent.
        config: tuning in place of the table's.

    Returns:
        `out` and `lse`. Tokens that see no key, or lie behind the last request's, get zeros and minus infinity.

    Raises:
        ValueError: shapes, dtypes or the combination of arguments do not fit.
    """
    for name, tensor in (("pool", pool), ("kv_indices", kv_indices), ("page_table", page_table), ("out", out)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {query.device}")
    query, query_rope = _split_query(query, query_rope, latent)
    rope = query_rope.shape[-1]
    tokens, heads, _ = query.shape
    rows = _byte_pairs(pool, latent + rope)
    table = kv_indices if page_table is None else page_table
    if table is None or (kv_indices is None) != (kv_indptr is None) or (kv_indices is None) == (page_table is None):
        raise ValueError("pass either kv_indptr and kv_indices, or page_table")
    if kv_lens is None and (kv_indptr is None or page_size != 1):
        raise ValueError("kv_lens is needed with a page table and with pages of several tokens")
    for numbers in (table, kv_indptr, kv_lens, qo_indptr):
        if numbers is not None and numbers.stride(-1) != 1:
            raise ValueError("indices, tables and lengths must be contiguous")
    batch = kv_lens.shape[0] if kv_lens is not None else kv_indptr.shape[0] - 1  # type: ignore[union-attr]
    if qo_indptr is None and tokens != batch:
        raise ValueError(f"{tokens} query tokens for {batch} requests: multi-token queries need qo_indptr")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device) if lse is None else lse
    if out.shape != query.shape or out.stride(-1) != 1 or lse.shape != (tokens, heads) or not lse.is_contiguous():
        raise ValueError(f"out must be {tuple(query.shape)} and lse {(tokens, heads)}, contiguous")
    if tokens == 0 or batch == 0:
        return out.zero_(), lse.fill_(-torch.inf)

    schedule = schedule or mla_schedule(
        heads, kv_indptr=kv_indptr, kv_lens=kv_lens, qo_indptr=qo_indptr, config=config,
        tokens=None if qo_indptr is None else tokens,
    )  # fmt: skip
    config = schedule.config
    partial, partial_lse = _partial(workspace, _partial_rows(config, query.device), latent, query.device)
    by_hand = BITS_SCALE if config.decode != CONVERT.value else 1.0
    score_scale, out_scale = sm_scale * kv_scale * LOG2E * by_hand, kv_scale * by_hand
    lse_scale = math.log(2.0) if natural_lse else 1.0
    overlap = _overlaps(query.device)
    launch = {"launch_pdl": True} if overlap else {}
    shared: dict[str, Any] = {"LATENT": latent, "EXTEND": qo_indptr is not None, "BLOCK_H": config.block_heads}
    items, groups = schedule.items.shape[0], schedule.groups.shape[0]
    mla_fp8_attention[(items,)](
        query, query_rope, rows, table, kv_indptr, kv_lens, qo_indptr, schedule.items, out, lse, partial, partial_lse,
        *query.stride()[:2], *query_rope.stride()[:2], *out.stride()[:2], 0 if page_table is None else table.stride(0),
        heads, score_scale, out_scale, lse_scale,
        ROPE=rope, ROW=rows.stride(0), PAGE=page_size, PAGED=page_table is not None, HAS_LENS=kv_lens is not None,
        CAUSAL=causal and qo_indptr is not None, BLOCK_N=config.block_tokens, STAGES=config.stages,
        WHOLE=config.whole_words, DECODE=config.decode, num_warps=config.warps, num_stages=config.stages, **shared,
    )  # fmt: skip
    # As many pieces at a time as a request of an even batch has. A warp spans 256 latents where there are that many, so
    # that pieces add up within threads.
    pieces = min(max(_next_power_of_2(items // groups), 8), 128)
    chunk = min(4096 // pieces, latent)
    mla_fp8_combine[(groups, config.block_heads, latent // chunk)](
        qo_indptr, schedule.groups, out, lse, partial, partial_lse, *out.stride()[:2], tokens, heads,
        out_scale, lse_scale, CHUNK=chunk, BLOCK_P=pieces, OVERLAP=overlap,
        num_warps=4 if chunk < 128 else max(chunk // 256, 1), **shared, **launch,
    )  # fmt: skip
    return out, lse


def _split_query(query: torch.Tensor, rope: torch.Tensor | None, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    if rope is None:
        query, rope = query[..., :latent], query[..., latent:]
    if query.dim() != 3 or query.shape[-1] != latent or rope.shape[:-1] != query.shape[:-1]:
        raise ValueError(f"the query must be [T, H, {latent}] and [T, H, rope], not {query.shape} and {rope.shape}")
    for width, least in ((latent, 128), (rope.shape[-1], 32)):
        if width < least or width & (width - 1):
            raise ValueError(f"widths must be powers of two, latent from 128 and rope from 32, not {width}")
    if query.dtype not in (torch.bfloat16, torch.float16) or rope.dtype != query.dtype:
        raise ValueError(f"the query must be BF16 or FP16, not {query.dtype} and {rope.dtype}")
    if query.stride(-1) != 1 or rope.stride(-1) != 1:
        raise ValueError("the query's last dimension must be contiguous")
    return query, rope


def _byte_pairs(pool: torch.Tensor, width: int) -> torch.Tensor:
    """View the pool as [rows, width / 2] 16-bit words. Views only: a pool that needs copying is refused."""
    if pool.dtype not in (torch.float8_e4m3fn, torch.uint8) or pool.shape[-1] != width:
        raise ValueError(f"the pool must be [rows, 1, {width}] e4m3, not {pool.dtype} {tuple(pool.shape)}")
    try:
        return pool.view(-1, width).view(torch.int16)
    except RuntimeError as error:
        message = f"a pool of shape {tuple(pool.shape)} and strides {pool.stride()} is not a list of rows"
        raise ValueError(message) from error


def _partial_rows(config: Tuning, device: torch.device) -> int:
    """How many rows of partial results there can be: one tile a program."""
    return config.programs_per_sm * config.block_heads * _processors(device)


def _partial(
    workspace: torch.Tensor | None, rows: int, latent: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial outputs and their log-sum-exps."""
    if workspace is None:
        # Two, since views of one would take longer to make.
        outputs = torch.empty(rows * latent, dtype=torch.float16, device=device)
        return outputs, torch.empty(rows, dtype=torch.float32, device=device)
    boundary, needed = rows * latent * 2, rows * (latent * 2 + 4)
    if workspace.numel() < needed or workspace.dtype != torch.uint8:
        raise ValueError(f"the workspace must be uint8 with {needed} bytes or more")
    return workspace[:boundary].view(torch.float16), workspace[boundary:needed].view(torch.float32)


def _next_power_of_2(number: int) -> int:
    """Triton's, which takes microseconds, as it serves kernels too."""
    return 1 << max(number - 1, 0).bit_length()


def _interpreted(device: torch.device) -> bool:
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _tuning(device: torch.device, columns: int) -> Tuning:
    if _interpreted(device):
        return Tuning(block_tokens=16, warps=4, stages=1, programs_per_sm=1, decode=PORTABLE.value)
    return tuning(torch.cuda.get_device_capability(device), columns)


@lru_cache
def _overlaps(device: torch.device) -> bool:
    """Whether the combining kernel may be launched while the other drains."""
    return bool(EARLY_LAUNCH and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9)


@lru_cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a device; a small card stands in for the interpreter's CPU."""
    return 6 if _interpreted(device) else torch.cuda.get_device_properties(device).multi_processor_count
