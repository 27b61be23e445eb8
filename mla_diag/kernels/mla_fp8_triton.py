# ruff: noqa: N803, N806, PLR0915, RET505 (Triton: capitals for constants, flat arguments, `else` at compile time)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `mla_fp8`: plan, attention, combine. Their names are what a trace shows.

How it works. A pool row is 576 bytes, latent 512 then rope 64; it serves as key and, its latent, as value. Rows go from
the pool to shared memory once, as 16-bit pairs of bytes, so that `ldmatrix` can hand them to the tensor cores in either
direction; a pair becomes two FP16 numbers, exactly, in registers on the way into the product. No converted tile is ever
stored. What the pairing does to the order of the latents is undone on the small side:

  scores   S^T = K Q^T, tokens down and heads across, so that few heads waste no tensor-core rows. Registers hold four
           bytes of a row; the products take them two by two, and the query's latents are sorted to match.
  output   O = P V, even and odd latents apart, joined when the output is written. P is FP16: 11 bits to BF16's 8.

The compiler is led here by the shapes of expressions alone, so what carries the speed is tested: test_compile.py looks
for asynchronous copies, `ldmatrix` and the absence of spills on every architecture.
"""

import triton
import triton.language as tl

# An item: request, tile, first key, end, slot. A group: request, tile, first slot, pieces. See `mla_fp8_plan`.
ITEM_FIELDS, GROUP_FIELDS = tl.constexpr(8), tl.constexpr(4)
CANDIDATES = tl.constexpr(32)
# How a pair of bytes becomes FP16. BITS is the packed form of PORTABLE, which the interpreter runs. Either moves the
# bits up by 7, which makes of e4m3 the FP16 number of a 2^8th the size: exact, subnormals included.
PORTABLE, BITS, CONVERT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BITS_SCALE = 256.0
# Triton 3.4 learnt to launch a kernel early, before the one it depends on has finished.
EARLY_LAUNCH = hasattr(tl.extra.cuda, "gdc_wait")


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
def _both(pairs, DECODE: tl.constexpr):
    """FP16 of the lower and of the upper byte of each pair, by one instruction where there is one."""
    if DECODE == CONVERT:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 w; cvt.rn.f16x2.e4m3x2 w, $2; mov.b32 {$0, $1}, w; }",
            "=h,=h,h", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=1)  # fmt: skip
    else:
        return _low(pairs, DECODE), _high(pairs, DECODE)


@triton.jit
def _scores(pairs, first_query, second_query, s, ROWS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
            DECODE: tl.constexpr):  # fmt: skip
    """Add K Q^T over the latents of `pairs` [ROWS, PAIRS] to s, in two products; `_query` sorts the query to match.

    WHOLE: every other pair, then the rest. Each register of four bytes yields one register of either product: half the
    instructions. Otherwise the even latents, then the odd.
    """
    if WHOLE:
        first, second = tl.split(tl.reshape(pairs, (ROWS, PAIRS // 2, 2)))
        low, high = _both(first, DECODE)
        s = tl.dot(tl.reshape(tl.join(low, high), (ROWS, PAIRS)), first_query, s)
        low, high = _both(second, DECODE)
        return tl.dot(tl.reshape(tl.join(low, high), (ROWS, PAIRS)), second_query, s)
    else:
        return tl.dot(_high(pairs, DECODE), second_query, tl.dot(_low(pairs, DECODE), first_query, s))


@triton.jit
def _query(x, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr):
    """Split the latents of [COLUMNS, 2 * PAIRS] as `_scores` does, into two of [PAIRS, COLUMNS]."""
    if WHOLE:
        x = tl.permute(tl.reshape(x, (COLUMNS, PAIRS // 2, 2, 2)), (0, 1, 3, 2))
        first, second = tl.split(x)
        return tl.trans(tl.reshape(first, (COLUMNS, PAIRS))), tl.trans(tl.reshape(second, (COLUMNS, PAIRS)))
    else:
        first, second = tl.split(tl.reshape(x, (COLUMNS, PAIRS, 2)))
        return tl.trans(first), tl.trans(second)


@triton.jit
def _power_of_two_above(x):
    """2^(7 - floor(log2 x)), which brings x into [128, 256). Multiplying by it is exact."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (tl.minimum(261 - exponent, 254) << 23).to(tl.float32, bitcast=True)


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
def mla_fp8_plan(
    kv_indptr, kv_lens, qo_indptr, items, groups, batch, heads, slots, capacity, groups_size,
    HAS_LENS: tl.constexpr, EXTEND: tl.constexpr, BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Cut the keys of each request into pieces and write down who does what: ROWS work items and ROWS groups.

    An item is one tile of columns against one piece: request, tile, first key, end, slot for the result (-1: none, the
    only piece). A group is one tile: request, tile, first slot, pieces. Groups past the requests' are of the query
    tokens that no request has, in no pieces, and their request is `batch`.

    Pieces are as small as the room for items allows, sought between an even share of the work for each of `slots`
    programs and what always fits. The room is `slots`; a batch that fills the card by itself may still hold one long
    request, and gets a quarter of `slots` on top. So no more than `slots` results are ever to be combined: a tile in n
    pieces is n - 1 items more, and n is at most twice that.
    """
    requests = tl.arange(0, BATCH)
    keys, queries = _lengths(requests, requests < batch, kv_indptr, kv_lens, qo_indptr, HAS_LENS, EXTEND)
    tiles = tl.cdiv(queries * heads, BLOCK_H)
    blocks = tl.cdiv(keys, BLOCK_N)
    work = tl.sum(tiles * blocks)
    whole = tl.sum(tiles)
    room = tl.maximum(slots, whole + slots // 4)
    smallest = tl.maximum(tl.cdiv(work, slots), 1)
    largest = tl.minimum(tl.cdiv(work, tl.maximum(room - whole, 1)), tl.max(blocks))
    largest = tl.maximum(largest, smallest)
    sizes = smallest + tl.arange(0, CANDIDATES) * tl.cdiv(largest - smallest, CANDIDATES - 1)
    counts = tl.sum(tiles[None, :] * tl.maximum(tl.cdiv(blocks[None, :], sizes[:, None]), 1), 1)
    size = tl.min(tl.where(counts <= room, sizes, largest))
    pieces = tl.maximum(tl.cdiv(blocks, size), 1)
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
    tile = row - tl.where(request < batch, _pick(ends - tiles, hit), whole)
    n_pieces = _pick(pieces, hit)
    group = groups + row * GROUP_FIELDS
    here = row < groups_size
    tl.store(group, tl.minimum(request, batch), mask=here)
    tl.store(group + 1, tile, mask=here)
    tl.store(group + 2, _pick(first_slot, hit) + tile * n_pieces, mask=here)
    tl.store(group + 3, tl.where(request < batch, n_pieces, 0), mask=here)


@triton.jit
def _columns(index, tile, request, end, qo_indptr, heads, BLOCK_H: tl.constexpr, EXTEND: tl.constexpr):
    """Token, head and existence of a tile's columns, of which in extend those of tokens from `end` on do not exist."""
    column = tile * BLOCK_H + index
    if EXTEND:
        token = tl.load(qo_indptr + request) + column // heads
        return token.to(tl.int64), column % heads, token < end
    return (request + index * 0).to(tl.int64), column, column < heads


@triton.jit(do_not_specialize=["lse_scale"])
def mla_fp8_attention(
    q_nope, q_rope, pool, table, kv_indptr, kv_lens, qo_indptr, items, out, lse, partial, partial_lse,
    stride_nope_t, stride_nope_h, stride_rope_t, stride_rope_h, stride_out_t, stride_out_h, stride_table,
    heads, score_scale, out_scale, lse_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    HAS_LENS: tl.constexpr, EXTEND: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """One work item: one tile of (query token, head) columns of one request against one piece of its keys."""
    HALF: tl.constexpr = LATENT // 2
    PAIRS: tl.constexpr = LATENT // 4
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

    # The latent comes in halves, so that the registers of one are free again when the other is due.
    half = tl.arange(0, HALF)
    rope = tl.arange(0, ROPE)
    last = tl.load(qo_indptr + request + 1) if EXTEND else 0
    token, head, valid = _columns(index, tile, request, last, qo_indptr, heads, BLOCK_H, EXTEND)
    nope_ptr = q_nope + (token * stride_nope_t + head * stride_nope_h)[:, None] + half[None, :]
    rope_ptr = q_rope + (token * stride_rope_t + head * stride_rope_h)[:, None] + rope[None, :]
    qa = tl.load(nope_ptr, mask=valid[:, None], other=0.0).to(tl.float32)
    qb = tl.load(nope_ptr + HALF, mask=valid[:, None], other=0.0).to(tl.float32)
    qr = tl.load(rope_ptr, mask=valid[:, None], other=0.0).to(tl.float32)
    # A power of two for each column brings a BF16 query of any size into FP16's range.
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(qa), 1), tl.max(tl.abs(qb), 1)), tl.max(tl.abs(qr), 1))
    grow = _power_of_two_above(largest)
    qa_first, qa_second = _query((qa * grow[:, None]).to(tl.float16), BLOCK_H, PAIRS, WHOLE)
    qb_first, qb_second = _query((qb * grow[:, None]).to(tl.float16), BLOCK_H, PAIRS, WHOLE)
    qr_first, qr_second = _query((qr * grow[:, None]).to(tl.float16), BLOCK_H, ROPE // 2, WHOLE)
    scale = score_scale / grow

    pair = tl.arange(0, PAIRS)
    rope_pair = tl.arange(0, ROPE // 2)
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    a_even = tl.zeros((BLOCK_H, PAIRS), tl.float32)
    a_odd = tl.zeros((BLOCK_H, PAIRS), tl.float32)
    b_even = tl.zeros((BLOCK_H, PAIRS), tl.float32)
    b_odd = tl.zeros((BLOCK_H, PAIRS), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        base = pool + (row.to(tl.uint64) * ROW)[:, None]
        kv_a = tl.load(base + pair[None, :])
        kv_b = tl.load(base + PAIRS + pair[None, :])
        kr = tl.load(base + 2 * PAIRS + rope_pair[None, :])
        position = tl.minimum(start + BLOCK_N + step, end - 1)
        row = tl.load(table + position // PAGE).to(tl.uint32) * PAGE + (position % PAGE).to(tl.uint32)
        s = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
        s = _scores(kr, qr_first, qr_second, s, BLOCK_N, ROPE // 2, WHOLE, DECODE)
        s = _scores(kv_a, qa_first, qa_second, s, BLOCK_N, PAIRS, WHOLE, DECODE)
        s = _scores(kv_b, qb_first, qb_second, s, BLOCK_N, PAIRS, WHOLE, DECODE)
        s = tl.where((start + step)[:, None] < tl.minimum(visible, end)[None, :], s * scale[None, :], -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        # A column may have seen no key yet: -inf less -inf would be NaN.
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - safe_top)
        p = tl.exp2(s - safe_top[None, :])
        total = total * fade + tl.sum(p, 0)
        top = new_top
        p = tl.trans(p.to(tl.float16))
        a_even = tl.dot(p, _low(kv_a, DECODE), a_even * fade[:, None])
        a_odd = tl.dot(p, _high(kv_a, DECODE), a_odd * fade[:, None])
        b_even = tl.dot(p, _low(kv_b, DECODE), b_even * fade[:, None])
        b_odd = tl.dot(p, _high(kv_b, DECODE), b_odd * fade[:, None])

    seen = total > 0
    norm = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
    a = tl.reshape(tl.join(a_even * norm, a_odd * norm), (BLOCK_H, HALF))
    b = tl.reshape(tl.join(b_even * norm, b_odd * norm), (BLOCK_H, HALF))
    log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
    if slot < 0:
        out_ptr = out + (token * stride_out_t + head * stride_out_h)[:, None] + half[None, :]
        tl.store(out_ptr, (a * out_scale).to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(out_ptr + HALF, (b * out_scale).to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(lse + token * heads + head, log_sum * lse_scale, mask=valid)
    else:
        # Averages of pool numbers, at most 448: FP16 holds them, with 11 bits, in half the traffic.
        column = slot * BLOCK_H + index
        partial_ptr = partial + column[:, None] * LATENT + half[None, :]
        tl.store(partial_ptr, a.to(tl.float16))
        tl.store(partial_ptr + HALF, b.to(tl.float16))
        tl.store(partial_lse + column, log_sum)


@triton.jit(do_not_specialize=["tokens", "lse_scale"])
def mla_fp8_combine(
    qo_indptr, groups, out, lse, partial, partial_lse, stride_out_t, stride_out_h, tokens, heads, out_scale, lse_scale,
    LATENT: tl.constexpr, EXTEND: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one column, CHUNK latents of it. Columns in one piece are already written.

    Those in none are of tokens that no request has: they get what a token gets that sees no key.
    """
    index = tl.program_id(1)
    latent = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    piece = tl.arange(0, BLOCK_P)
    group = groups + tl.program_id(0) * GROUP_FIELDS
    slot = tl.load(group + 2)
    pieces = tl.load(group + 3)
    request = tl.load(group)
    last = tl.load(qo_indptr + request + 1, mask=pieces > 0, other=tokens) if EXTEND else 0
    token, head, valid = _columns(index, tl.load(group + 1), request, last, qo_indptr, heads, BLOCK_H, EXTEND)
    if OVERLAP:
        # Launched early. Every program waits, also one without work: kernels after this one count on it too.
        # Triton's own name for it, gdc_wait, does not compile in 3.4.
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if (pieces == 1) | (valid == 0):
        return
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
    result = tl.where(seen, acc * out_scale / tl.where(seen, total, 1.0), 0.0)
    tl.store(out + token * stride_out_t + head * stride_out_h + latent, result.to(out.dtype.element_ty))
    if tl.program_id(2) == 0:
        log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
        tl.store(lse + token * heads + head, log_sum * lse_scale)
