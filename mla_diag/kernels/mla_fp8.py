# ruff: noqa: N803, PLR0915, PLR0917 (Triton: constants in capitals, kernels take flat arguments)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Absorbed MLA attention that reads an FP8 (e4m3) paged pool as it lies, for decode and multi-token extend.

This file imports torch and Triton only: `mla-diag fix --apply` copies it, alone, beside SGLang's attention backends.

How it works. A pool row is 576 bytes, latent 512 then rope 64; it serves as key and, its latent, as value. Rows go from
the pool to shared memory once, as 16-bit pairs of bytes, so that `ldmatrix` can hand them to the tensor cores in either
direction; a pair becomes two FP16 numbers in registers, on the way into the product. No converted tile is ever stored.
That is why even and odd latents have accumulators of their own, joined when the output is written.

  scores   S^T = K Q^T, tokens down and heads across, so that few heads waste no tensor-core rows. On Hopper the bytes
           enter the FP8 tensor cores as they are and a BF16 query as two e4m3 terms, which hold its 8 bits exactly.
  output   O = P V, with P in FP16, whose 11 bits beat BF16's 8.

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
import triton.language as tl

__all__ = ["Schedule", "Tuning", "mla_fp8", "mla_schedule", "tuning", "workspace_bytes"]

LATENT, ROPE = 512, 64
LOG2E = 1.4426950408889634
# e4m3 bits moved up by 7 are the FP16 number a 2^8th of the size: exact, subnormals included.
BITS_SCALE = 256.0
LOW_TERM = tl.constexpr(16.0)
CANDIDATES = tl.constexpr(32)
ITEM_FIELDS, GROUP_FIELDS = tl.constexpr(8), tl.constexpr(4)

# How a pair of bytes becomes FP16. BITS is the packed form of PORTABLE, which the interpreter runs.
PORTABLE, BITS, CONVERT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is laid out on one architecture.

    Attributes:
        block_tokens: KV rows a step.
        warps: warps a program.
        stages: software pipeline depth; a stage holds `block_tokens` rows of the pool.
        programs_per_sm: programs resident on a multiprocessor, by registers and shared memory.
        decode: how bytes become FP16: by `cvt` or by moving bits.
        fp8_scores: multiply query and keys on the FP8 tensor cores.
        block_heads: (query token, head) columns a program; 16 is the tensor core's smallest tile.
    """

    block_tokens: int
    warps: int
    stages: int
    programs_per_sm: int
    decode: int
    fp8_scores: bool = False
    block_heads: int = 16


def tuning(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tuning:
    """Return the tuning of a card; docs/kernel-log.md has the measurements behind each entry.

    Args:
        capability: (major, minor), as `torch.cuda.get_device_capability` gives it.
        dtype: the query's.

    Returns:
        The table's entry. Architectures newer than the table get what every card since SM80 can run.

    Raises:
        ValueError: the card is older than SM80: no asynchronous copies, no BF16.
    """
    if capability < (8, 0):
        raise ValueError(f"the FP8 MLA kernel needs compute capability 8.0, this card has {capability}")
    if capability[0] == 9 and dtype == torch.bfloat16:
        # wgmma takes 64 tokens, from registers. Two programs, of 94 KB and 255 registers a thread, fill an SM. FP16
        # queries stay out: two e4m3 terms hold 8 bits, not their 11.
        return Tuning(block_tokens=64, warps=4, stages=3, programs_per_sm=2, decode=CONVERT.value, fp8_scores=True)
    # More tokens spill where products are mma.sync; and at 64 rows SM100 would turn to tcgen05, which takes operands
    # from shared memory, the very trip this kernel avoids. The 56 KB a program takes fit every card (99 KB on SM86, SM89
    # and SM120, so that only one is resident there). cvt is 7 % faster than moving bits and came with SM89.
    small = capability in ((8, 6), (8, 9)) or capability[0] == 12
    decode = CONVERT if capability >= (8, 9) else BITS
    return Tuning(block_tokens=32, warps=4, stages=3, programs_per_sm=1 if small else 2, decode=decode.value)


@triton.jit
def _low(pairs, DECODE: tl.constexpr):
    """FP16 of the lower byte of each pair (the even latents)."""
    if DECODE == PORTABLE:
        return (((pairs & 0x7F) << 7) | ((pairs & 0x80) << 8)).to(tl.float16, bitcast=True)
    elif DECODE == BITS:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, m; shl.b32 s, $1, 8; shl.b32 m, $1, 7; and.b32 m, m, 0x3f803f80;"
            " lop3.b32 $0, s, 0x80008000, m, 0xEA; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .b16 low, high; prmt.b32 w, $1, 0, 0x4420; mov.b32 {low, high}, w;"
            " cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip


@triton.jit
def _high(pairs, DECODE: tl.constexpr):
    """FP16 of the upper byte of each pair (the odd latents)."""
    if DECODE == PORTABLE:
        return (((pairs >> 1) & 0x3F80) | (pairs & -0x8000)).to(tl.float16, bitcast=True)
    elif DECODE == BITS:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 m; shr.u32 m, $1, 1; and.b32 m, m, 0x3f803f80; lop3.b32 $0, $1, 0x80008000, m, 0xEA; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .b16 low, high; prmt.b32 w, $1, 0, 0x4431; mov.b32 {low, high}, w;"
            " cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip


@triton.jit
def _e4m3(pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs of bytes [ROWS, PAIRS] as the e4m3 numbers [ROWS, 2 * PAIRS] they are; compiles to nothing."""
    low = pairs.to(tl.uint8)
    high = (pairs.to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)
    return tl.reshape(tl.join(low, high), (ROWS, 2 * PAIRS)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _even_odd(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Split the columns of [ROWS, 2 * PAIRS] into even and odd ones, each transposed to [PAIRS, ROWS]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.trans(even), tl.trans(odd)


@triton.jit
def _power_of_two_above(x):
    """2^(7 - floor(log2 x)): brings x into [128, 256), where two e4m3 terms hold a BF16 number. Exact to multiply by."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (tl.minimum(261 - exponent, 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _four_bits(x):
    """Round float32 to 4 significant bits, e4m3's, by adding half a unit: the conversion that follows is then exact."""
    return ((x.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def _query_terms(x, is_low):
    """The two e4m3 terms of a BF16 query scaled to 256: the high one, or what it leaves times LOW_TERM."""
    high = _four_bits(x).to(tl.float8e4nv)
    low = ((x - high.to(tl.float32)) * LOW_TERM).to(tl.float8e4nv)
    return tl.trans(tl.where(is_low, low, high))


@triton.jit
def _lengths(requests, valid, kv_indptr, kv_lens, qo_indptr, HAS_LENS: tl.constexpr, EXTEND: tl.constexpr):
    """Key length and query length of each request, 0 where `valid` is false."""
    if HAS_LENS:
        keys = tl.load(kv_lens + requests, mask=valid, other=0)
    else:
        keys = tl.load(kv_indptr + requests + 1, mask=valid, other=0)
        keys -= tl.load(kv_indptr + requests, mask=valid, other=0)
    if EXTEND:
        queries = tl.load(qo_indptr + requests + 1, mask=valid, other=0)
        queries -= tl.load(qo_indptr + requests, mask=valid, other=0)
    else:
        queries = valid.to(tl.int32)
    return keys.to(tl.int32), queries.to(tl.int32)


@triton.jit
def _pick(values, hit):
    return tl.sum(tl.where(hit, values[None, :], 0), 1)


@triton.jit(do_not_specialize=["batch", "slots", "capacity", "groups_size"])
def _plan(
    kv_indptr, kv_lens, qo_indptr, items, groups, batch, heads, slots, capacity, groups_size,
    HAS_LENS: tl.constexpr, EXTEND: tl.constexpr, BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Cut the keys of each request into pieces and write down who does what: ROWS work items and ROWS groups.

    An item is one tile of columns against one piece: request, tile, first key, end, slot for the result (-1: none, the
    only piece). A group is one tile: request, tile, first slot, pieces. The piece size is the smallest for which all
    items fit into `capacity`, sought between an even share of the work for each of `slots` programs and what always fits.
    """
    requests = tl.arange(0, BATCH)
    keys, queries = _lengths(requests, requests < batch, kv_indptr, kv_lens, qo_indptr, HAS_LENS, EXTEND)
    tiles = tl.cdiv(queries * heads, BLOCK_H)
    blocks = tl.cdiv(keys, BLOCK_N)
    work = tl.sum(tiles * blocks)
    smallest = tl.maximum(tl.cdiv(work, slots), 1)
    largest = tl.maximum(tl.cdiv(work, capacity - tl.sum(tiles)), smallest)
    sizes = smallest + tl.cdiv(tl.arange(0, CANDIDATES) * (largest - smallest), CANDIDATES - 1)
    counts = tl.sum(tiles[None, :] * tl.maximum(tl.cdiv(blocks[None, :], sizes[:, None]), 1), 1)
    size = tl.min(tl.where(counts <= capacity, sizes, largest))
    pieces = tl.maximum(tl.cdiv(blocks, size), 1)
    # Only requests in several pieces use slots. They never need more than `slots`: a second piece is one beyond the tiles.
    slotted = tl.where(pieces > 1, tiles * pieces, 0)
    first_slot = tl.cumsum(slotted, 0) - slotted
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)

    ends = tl.cumsum(tiles * pieces, 0)
    request = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    hit = requests[None, :] == request[:, None]
    offset = row - _pick(ends - tiles * pieces, hit)
    # Tiles of one piece are neighbours, so that what one reads the others find in L2.
    n_tiles = tl.maximum(_pick(tiles, hit), 1)
    n_pieces = tl.maximum(_pick(pieces, hit), 1)
    n_blocks = _pick(blocks, hit)
    tile = offset % n_tiles
    piece = offset // n_tiles
    item = items + row * ITEM_FIELDS
    here = row < capacity
    tl.store(item, tl.where(request < batch, request, -1), mask=here)
    tl.store(item + 1, tile, mask=here)
    tl.store(item + 2, n_blocks * piece // n_pieces * BLOCK_N, mask=here)
    tl.store(item + 3, tl.minimum(n_blocks * (piece + 1) // n_pieces * BLOCK_N, _pick(keys, hit)), mask=here)
    tl.store(item + 4, tl.where(n_pieces > 1, _pick(first_slot, hit) + tile * n_pieces + piece, -1), mask=here)

    ends = tl.cumsum(tiles, 0)
    request = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    hit = requests[None, :] == request[:, None]
    tile = row - _pick(ends - tiles, hit)
    n_pieces = _pick(pieces, hit)
    group = groups + row * GROUP_FIELDS
    here = row < groups_size
    tl.store(group, request, mask=here)
    tl.store(group + 1, tile, mask=here)
    tl.store(group + 2, _pick(first_slot, hit) + tile * n_pieces, mask=here)
    tl.store(group + 3, tl.where(request < batch, n_pieces, 0), mask=here)


@triton.jit
def _columns(index, tile, request, qo_indptr, heads, BLOCK_H: tl.constexpr, EXTEND: tl.constexpr):
    """Token, head and existence of a tile's columns."""
    column = tile * BLOCK_H + index
    if EXTEND:
        token = tl.load(qo_indptr + request) + column // heads
        return token.to(tl.int64), column % heads, token < tl.load(qo_indptr + request + 1)
    return (request + index * 0).to(tl.int64), column, column < heads


@triton.jit(do_not_specialize=["lse_scale"])
def _attend(
    q_nope, q_rope, pool, table, kv_indptr, kv_lens, qo_indptr, items, out, lse, partial, partial_lse,
    stride_nope_t, stride_nope_h, stride_rope_t, stride_rope_h, stride_out_t, stride_out_h, stride_table,
    heads, score_scale, out_scale, lse_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    HAS_LENS: tl.constexpr, EXTEND: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FP8_SCORES: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """One work item: one tile of (query token, head) columns of one request against one piece of its keys."""
    LATENT2: tl.constexpr = LATENT // 2
    ROPE2: tl.constexpr = ROPE // 2
    item = items + tl.program_id(0) * ITEM_FIELDS
    request = tl.load(item)
    if request < 0:
        return
    tile = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    slot = tl.load(item + 4)
    if PAGED:
        table += request.to(tl.int64) * stride_table
    else:
        table += tl.load(kv_indptr + request).to(tl.int64)
    index = tl.arange(0, BLOCK_H)
    if CAUSAL:
        n_keys, n_queries = _lengths(request, True, kv_indptr, kv_lens, qo_indptr, HAS_LENS, EXTEND)
        # Columns past the last token see what it sees: they are dropped, but must not make the tile longer.
        visible = tl.minimum(n_keys - n_queries + (tile * BLOCK_H + index) // heads + 1, n_keys)
        end = tl.minimum(end, tl.max(visible))
    else:
        visible = tl.full((BLOCK_H,), 0, tl.int32) + end

    # Rows are looked up a step ahead. Positions past the end repeat the last row: what masked scores weigh by zero is
    # then a row this request owns, not one that may hold NaN.
    step = tl.arange(0, BLOCK_N)
    position = tl.maximum(tl.minimum(begin + step, end - 1), 0)
    page = tl.load(table + position // PAGE, mask=position < end, other=0)
    row = page.to(tl.uint32) * PAGE + (position % PAGE).to(tl.uint32)

    latent = tl.arange(0, LATENT)
    rope = tl.arange(0, ROPE)
    # Scaling each column by a power of two, exact, brings a query of any size into the range of FP16, or of e4m3.
    if FP8_SCORES:
        # Rows 0 to BLOCK_H hold the high terms, the rest the low ones.
        both = tl.arange(0, 2 * BLOCK_H)
        is_low = (both >= BLOCK_H)[:, None]
        q_token, q_head, q_valid = _columns(both % BLOCK_H, tile, request, qo_indptr, heads, BLOCK_H, EXTEND)
    else:
        q_token, q_head, q_valid = _columns(index, tile, request, qo_indptr, heads, BLOCK_H, EXTEND)
    nope_ptr = q_nope + (q_token * stride_nope_t + q_head * stride_nope_h)[:, None] + latent[None, :]
    rope_ptr = q_rope + (q_token * stride_rope_t + q_head * stride_rope_h)[:, None] + rope[None, :]
    qn = tl.load(nope_ptr, mask=q_valid[:, None], other=0.0).to(tl.float32)
    qr = tl.load(rope_ptr, mask=q_valid[:, None], other=0.0).to(tl.float32)
    grow = _power_of_two_above(tl.maximum(tl.max(tl.abs(qn), 1), tl.max(tl.abs(qr), 1)))
    qn *= grow[:, None]
    qr *= grow[:, None]
    if FP8_SCORES:
        qn_both = _query_terms(qn, is_low)
        qr_both = _query_terms(qr, is_low)
        grow, same = tl.split(tl.trans(tl.reshape(grow, (2, BLOCK_H))))
    else:
        qn_even, qn_odd = _even_odd(qn.to(tl.float16), BLOCK_H, LATENT2)
        qr_even, qr_odd = _even_odd(qr.to(tl.float16), BLOCK_H, ROPE2)
    scale = score_scale / grow

    latent2 = tl.arange(0, LATENT2)
    rope2 = tl.arange(0, ROPE2)
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc_even = tl.zeros((BLOCK_H, LATENT2), tl.float32)
    acc_odd = tl.zeros((BLOCK_H, LATENT2), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        base = pool + (row.to(tl.uint64) * ROW)[:, None]
        kv = tl.load(base + latent2[None, :])
        kr = tl.load(base + LATENT2 + rope2[None, :])
        position = tl.minimum(start + BLOCK_N + step, end - 1)
        row = tl.load(table + position // PAGE).to(tl.uint32) * PAGE + (position % PAGE).to(tl.uint32)
        if FP8_SCORES:
            # Hopper's FP8 products keep some 14 bits of a running sum: every 64 latents it moves on to FP32.
            s = tl.dot(_e4m3(kv, BLOCK_N, LATENT2), qn_both, max_num_imprecise_acc=64)
            s = tl.dot(_e4m3(kr, BLOCK_N, ROPE2), qr_both, s, max_num_imprecise_acc=64)
            high, low = tl.split(tl.permute(tl.reshape(s, (BLOCK_N, 2, BLOCK_H)), (0, 2, 1)))
            s = high + low * (1.0 / LOW_TERM)
        else:
            s = tl.dot(_low(kv, DECODE), qn_even)
            s = tl.dot(_high(kv, DECODE), qn_odd, s)
            s = tl.dot(_low(kr, DECODE), qr_even, s)
            s = tl.dot(_high(kr, DECODE), qr_odd, s)
        s = tl.where((start + step)[:, None] < tl.minimum(visible, end)[None, :], s * scale[None, :], -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        # A column may have seen no key yet: -inf less -inf would be NaN.
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - safe_top)
        p = tl.exp2(s - safe_top[None, :])
        total = total * fade + tl.sum(p, 0)
        top = new_top
        p = tl.trans(p.to(tl.float16))
        acc_even = tl.dot(p, _low(kv, DECODE), acc_even * fade[:, None])
        acc_odd = tl.dot(p, _high(kv, DECODE), acc_odd * fade[:, None])

    seen = total > 0
    norm = tl.where(seen, out_scale / tl.where(seen, total, 1.0), 0.0)[:, None]
    result = tl.reshape(tl.join(acc_even * norm, acc_odd * norm), (BLOCK_H, LATENT))
    log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
    if slot < 0:
        token, head, valid = _columns(index, tile, request, qo_indptr, heads, BLOCK_H, EXTEND)
        out_ptr = out + (token * stride_out_t + head * stride_out_h)[:, None] + latent[None, :]
        tl.store(out_ptr, result.to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(lse + token * heads + head, log_sum * lse_scale, mask=valid)
    else:
        column = slot * BLOCK_H + index
        tl.store(partial + column[:, None] * LATENT + latent[None, :], result)
        tl.store(partial_lse + column, log_sum)


@triton.jit(do_not_specialize=["lse_scale"])
def _combine(
    qo_indptr, groups, out, lse, partial, partial_lse, stride_out_t, stride_out_h, heads, lse_scale,
    LATENT: tl.constexpr, EXTEND: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one column, CHUNK latents of it. Columns in one piece are already written."""
    index = tl.program_id(1)
    latent = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    piece = tl.arange(0, BLOCK_P)
    group = groups + tl.program_id(0) * GROUP_FIELDS
    pieces = tl.load(group + 3)
    if pieces < 2:
        return
    slot = tl.load(group + 2)
    token, head, valid = _columns(index, tl.load(group + 1), tl.load(group), qo_indptr, heads, BLOCK_H, EXTEND)
    if not valid:
        return
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, pieces, BLOCK_P):
        there = start + piece < pieces
        column = (slot + start + piece) * BLOCK_H + index
        log_sum = tl.load(partial_lse + column, mask=there, other=-float("inf"))
        values = tl.load(partial + column[:, None] * LATENT + latent[None, :], mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - safe_top)
        weight = tl.exp2(log_sum - safe_top)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(values * weight[:, None], 0)
        top = new_top
    seen = total > 0
    result = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
    tl.store(out + token * stride_out_t + head * stride_out_h + latent, result.to(out.dtype.element_ty))
    if tl.program_id(2) == 0:
        log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
        tl.store(lse + token * heads + head, log_sum * lse_scale)


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


def workspace_bytes(device: torch.device | str, config: Tuning | None = None) -> int:
    """Return the size of a workspace that serves every call on `device`, whatever the batch and the lengths."""
    default, processors = _device(torch.device(device), torch.bfloat16)
    config = config or default
    return config.programs_per_sm * processors * config.block_heads * (LATENT + 1) * 4


def mla_schedule(
    heads: int,
    *,
    kv_indptr: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: Tuning | None = None,
) -> Schedule:
    """Plan a step on the device, for all its layers; the arguments are those of `mla_fp8`.

    Args:
        heads: query heads.
        kv_indptr: [B + 1] int32; the lengths, where `kv_lens` is absent.
        kv_lens: [B] int32.
        qo_indptr: [B + 1] int32 in extend.
        tokens: query tokens, in extend.
        dtype: the query's.
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
    default, processors = _device(lengths.device, dtype)
    config = config or default
    columns = config.block_heads
    slots = config.programs_per_sm * processors
    tiles = batch * triton.cdiv(heads, columns) if tokens is None else tokens * heads // columns + batch
    # A batch that fills the card by itself may still hold one long request: leave room to cut it up.
    capacity = max(slots, tiles + max(slots // 4, 1))
    items = torch.empty(capacity, ITEM_FIELDS.value, dtype=torch.int32, device=lengths.device)
    groups = torch.empty(tiles, GROUP_FIELDS.value, dtype=torch.int32, device=lengths.device)
    rows = 32
    _plan[(triton.cdiv(capacity, rows),)](
        kv_indptr, kv_lens, qo_indptr, items, groups, batch, heads, slots, capacity, tiles,
        HAS_LENS=kv_lens is not None, EXTEND=qo_indptr is not None, BATCH=max(16, triton.next_power_of_2(batch)),
        BLOCK_H=columns, BLOCK_N=config.block_tokens, ROWS=rows, num_warps=4,
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    natural_lse: bool = False,
    schedule: Schedule | None = None,
    workspace: torch.Tensor | None = None,
    config: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to an FP8 pool with an absorbed MLA query, without copying the pool.

    The keys are addressed by a CSR pair (FlashInfer's `kv_indptr`, `kv_indices`) or a page table (FlashAttention's).
    Nothing is read back to the host and the launch depends on shapes alone: the call can be captured in a CUDA graph and
    replayed with other lengths. Rows that no request refers to never reach the result. The byte 0x7f, NaN in e4m3,
    counts as 480 where bits are decoded by hand (before SM89).

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
        out: [T, H, 512] to write into, in any floating dtype.
        lse: [T, H] float32, contiguous, to write into.
        natural_lse: whether the log-sum-exp is natural (FlashAttention) rather than base 2 (FlashInfer).
        schedule: from `mla_schedule` at these very lengths; made here when absent.
        workspace: at least `workspace_bytes(...)` bytes of `uint8`; allocated when absent.
        config: tuning in place of the table's.

    Returns:
        `out` and `lse`. Tokens that see no key get zeros and minus infinity.

    Raises:
        ValueError: shapes, dtypes or the combination of arguments do not fit.
    """
    query, query_rope = _split_query(query, query_rope)
    tokens, heads, _ = query.shape
    rows = _byte_pairs(pool)
    table = kv_indices if page_table is None else page_table
    if table is None or (kv_indices is None) != (kv_indptr is None) or (kv_indices is None) == (page_table is None):
        raise ValueError("pass either kv_indptr and kv_indices, or page_table")
    if kv_lens is None and (kv_indptr is None or page_size != 1):
        raise ValueError("kv_lens is needed with a page table and with pages of several tokens")
    batch = len(kv_lens) if kv_lens is not None else len(kv_indptr) - 1  # type: ignore[arg-type]
    if qo_indptr is None and tokens != batch:
        raise ValueError(f"{tokens} query tokens for {batch} requests: multi-token queries need qo_indptr")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device) if lse is None else lse
    if out.shape != query.shape or out.stride(-1) != 1 or lse.shape != (tokens, heads) or not lse.is_contiguous():
        raise ValueError(f"out must be {tuple(query.shape)} and lse {(tokens, heads)}, contiguous")
    if tokens == 0 or batch == 0:
        return out, lse

    schedule = schedule or mla_schedule(
        heads, kv_indptr=kv_indptr, kv_lens=kv_lens, qo_indptr=qo_indptr, dtype=query.dtype, config=config,
        tokens=None if qo_indptr is None else tokens,
    )  # fmt: skip
    config = schedule.config
    needed = workspace_bytes(query.device, config)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=query.device)
    elif workspace.numel() < needed or workspace.dtype != torch.uint8:
        raise ValueError(f"the workspace must be uint8 with {needed} bytes or more")
    partial = workspace[: needed // (LATENT + 1) * LATENT].view(torch.float32)
    partial_lse = workspace[partial.numel() * 4 : needed].view(torch.float32)
    by_hand = BITS_SCALE if config.decode != CONVERT.value else 1.0
    lse_scale = math.log(2.0) if natural_lse else 1.0
    shared: dict[str, Any] = {"LATENT": LATENT, "EXTEND": qo_indptr is not None, "BLOCK_H": config.block_heads}
    _attend[(len(schedule.items),)](
        query, query_rope, rows, table, kv_indptr, kv_lens, qo_indptr, schedule.items, out, lse, partial, partial_lse,
        *query.stride()[:2], *query_rope.stride()[:2], *out.stride()[:2], 0 if page_table is None else table.stride(0),
        heads, sm_scale * kv_scale * LOG2E * (1.0 if config.fp8_scores else by_hand), kv_scale * by_hand, lse_scale,
        ROPE=ROPE, ROW=rows.stride(0), PAGE=page_size, PAGED=page_table is not None, HAS_LENS=kv_lens is not None,
        CAUSAL=causal and qo_indptr is not None, BLOCK_N=config.block_tokens, STAGES=config.stages,
        FP8_SCORES=config.fp8_scores, DECODE=config.decode, num_warps=config.warps, num_stages=config.stages, **shared,
    )  # fmt: skip
    chunk = 128 if tokens * heads < 1024 else LATENT  # enough programs for the card
    overlap = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
    _combine[(len(schedule.groups), config.block_heads, LATENT // chunk)](
        qo_indptr, schedule.groups, out, lse, partial, partial_lse, *out.stride()[:2], heads, lse_scale,
        CHUNK=chunk, BLOCK_P=4096 // chunk, OVERLAP=overlap, num_warps=4, **shared, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return out, lse


def _split_query(query: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if rope is None and query.dim() == 3 and query.shape[-1] == LATENT + ROPE:
        query, rope = query[..., :LATENT], query[..., LATENT:]
    if query.dim() != 3 or query.shape[-1] != LATENT or rope is None or rope.shape != (*query.shape[:2], ROPE):
        raise ValueError(f"the query must be [T, H, {LATENT}] and [T, H, {ROPE}], or [T, H, {LATENT + ROPE}]")
    if query.dtype not in (torch.bfloat16, torch.float16) or rope.dtype != query.dtype:
        raise ValueError(f"the query must be BF16 or FP16, not {query.dtype} and {rope.dtype}")
    if query.stride(-1) != 1 or rope.stride(-1) != 1:
        raise ValueError("the query's last dimension must be contiguous")
    return query, rope


def _byte_pairs(pool: torch.Tensor) -> torch.Tensor:
    """View the pool as [rows, 288] 16-bit words. Views only: a pool that needs copying is refused."""
    if pool.dtype not in (torch.float8_e4m3fn, torch.uint8) or pool.shape[-1] != LATENT + ROPE or pool.dim() > 4:
        raise ValueError(f"the pool must be [rows, 1, {LATENT + ROPE}] e4m3 (float8_e4m3fn or uint8), not {pool.dtype}")
    try:
        return pool.view(-1, LATENT + ROPE).view(torch.int16)
    except RuntimeError as error:
        raise ValueError(f"a pool of shape {tuple(pool.shape)}, strides {pool.stride()} is not a list of rows") from error


@lru_cache
def _device(device: torch.device, dtype: torch.dtype) -> tuple[Tuning, int]:
    """The tuning and the number of multiprocessors of a device; a small card stands in for the interpreter's CPU."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return Tuning(block_tokens=16, warps=4, stages=1, programs_per_sm=1, decode=PORTABLE.value), 6
    properties = torch.cuda.get_device_properties(device)
    return tuning((properties.major, properties.minor), dtype), properties.multi_processor_count
