"""Absorbed MLA attention over an FP8 (e4m3) paged pool on Hopper: the operator around `mla_fp8_sm90.cu`.

The same operator as the Triton one in `mla_fp8`, for compute capability 9.0 alone and faster there. `unavailable()`
says whether it can run; docs/kernel-log.md has what it gains and why it is built as it is (issue 6). `mla-diag fix
--apply` copies this file, its sources and mla_fp8_cuda.py beside SGLang's attention backends.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

# Relative, because a copy beside SGLang's backends lies in another package.
from .mla_fp8_cuda import CudaError, Kernel, Module, build

__all__ = ["TILES", "Schedule", "Tile", "mla_fp8_sm90", "mla_sm90_schedule", "unavailable", "workspace_bytes"]

SOURCE = Path(__file__).with_suffix(".cu")
LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
_THREADS = 384  # of a block of the attention kernel
_SPAN_BYTES = 48  # of the kernel's `Span`
_TOKENS, _ROW_STRIDE = 64, WIDTH + 32  # pool rows of a tile, and bytes from one to the next in shared memory
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_QUERY_DTYPES, _POOL_DTYPES = (torch.bfloat16, torch.float16), (torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class Tile:
    """The shape the kernel is built for.

    Attributes:
        rows: query rows (token x head) of a tile: 16, 32 or 64.
        stages: tiles of 64 pool rows in shared memory.
    """

    rows: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the kernel's `Shared`, of which the build checks that it is no larger."""
        pool = self.stages * _TOKENS * _ROW_STRIDE
        query = WIDTH * self.rows * 2
        probabilities = 2 * _TOKENS * self.rows * 2
        columns = 11 * self.rows * 4
        barriers, span = 16 * self.stages, 256
        return -(-(pool + query + probabilities + columns + barriers + span) // 128) * 128

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the source is built with."""
        sizes = {"SHARED_BYTES": self.shared_bytes, "SPAN_BYTES": _SPAN_BYTES, "PARAMS_BYTES": ctypes.sizeof(_Params)}
        return {"ROWS": self.rows, "STAGES": self.stages} | sizes


# As many stages as fit beside the query: they cover the memory's latency. Of 16 rows two blocks with two stages each
# would fit too, and were 12 % slower (64 x 8k).
TILES = {16: Tile(16, 5), 32: Tile(32, 4), 64: Tile(64, 3)}


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "pool", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial", "partial_lse", "spans", "items", "first")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_lens", "pages")),
        *((name, ctypes.c_int64) for name in ("q_nope_token", "q_nope_head", "q_rope_token", "q_rope_head")),
        *((name, ctypes.c_int64) for name in ("pool_row", "pages_row")),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "heads", "page_size", "causal")),
        *((name, ctypes.c_int) for name in ("q_type", "out_type", "blocks", "block_items", "planned")),
        *((name, ctypes.c_float) for name in ("score_scale", "value_scale", "lse_scale")),
    )


def unavailable(device: torch.device | int | None = None) -> str | None:
    """Say in one line why the kernel cannot run on a device, or return None if it can.

    Builds the kernel if it is not in the cache, which takes a second or two.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"this kernel is Hopper's (compute capability 9.0), the device's is {capability[0]}.{capability[1]}"
    try:
        for tile in TILES.values():
            _kernels(tile, _index(device))
    except (CudaError, OSError) as error:
        return str(error)
    return None


def choose_tile(tokens: int, heads: int, batch: int) -> Tile:
    """The smallest tile that takes an average request's query rows at once, else the largest."""
    rows = -(-tokens // max(batch, 1)) * heads
    return TILES[next((height for height in TILES if rows <= height), 64)]


@dataclass(frozen=True)
class Schedule:
    """Which block does what at given lengths; see `mla_sm90_schedule`.

    Attributes:
        plan: int32 on the device: the blocks' spans, their whole items, and where each request's items begin.
        tile: the tile shape it was made for.
        work: query tokens, heads and requests of the calls it serves.
        csr: whether it knows where a CSR pair's requests begin, being made with `kv_indptr`.
    """

    plan: torch.Tensor
    tile: Tile
    work: tuple[int, int, int]
    csr: bool


def workspace_bytes(device: torch.device | int | None = None) -> int:
    """Size of a workspace that serves every call on `device`: 17 MB on an H200."""
    return _partial_rows(max(TILES), _multiprocessors(_index(device))) * (LATENT * 2 + 4)


def mla_sm90_schedule(
    heads: int,
    *,
    kv_indptr: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    tokens: int | None = None,
    tile: Tile | None = None,
) -> Schedule:
    """Plan a step on the device, for all its layers; the arguments are those of `mla_fp8_sm90`.

    A call without a schedule finds its part of the work by itself, which takes a microsecond or two. Extend is planned
    as if it were causal; one that is not gets the same result, less evenly shared.

    Args:
        heads: query heads.
        kv_indptr: [B + 1] int32, for calls with a CSR pair; the lengths, where `kv_lens` is absent.
        kv_lens: [B] int32.
        qo_indptr: [B + 1] int32 in extend.
        tokens: query tokens, in extend.
        tile: tile shape in place of `choose_tile`'s.

    Returns:
        A schedule that is valid until a length changes. Recorded in a CUDA graph, it is made anew by every replay.

    Raises:
        ValueError: there are no lengths, or `qo_indptr` comes without `tokens`.
        CudaError: the kernel cannot be built or launched here.
    """
    lengths = kv_lens if kv_lens is not None else kv_indptr
    if lengths is None:
        raise ValueError("a schedule needs kv_lens or kv_indptr")
    if (qo_indptr is None) != (tokens is None):
        raise ValueError("qo_indptr and tokens go together")
    batch, device = lengths.numel() - (kv_lens is None), lengths.device
    params = _Params(
        kv_indptr=_numbers("kv_indptr", kv_indptr, device, batch + 1),
        kv_lens=_numbers("kv_lens", kv_lens, device, batch),
        qo_indptr=_query_starts(qo_indptr, device, batch),
        causal=qo_indptr is not None,
    )
    work = (batch if tokens is None else tokens, heads, batch)
    tile = choose_tile(*work) if tile is None else tile
    schedule = _room_for_schedule(tile, work, device, csr=kv_indptr is not None)
    if min(work) > 0:
        index = _index(device)
        kernels = _kernels(tile, index)
        _set_schedule(params, schedule, kernels.blocks)
        with torch.cuda.device(index):
            kernels.plan.launch((kernels.blocks, 1, 1), _THREADS, _stream(index), params)
    return schedule


def mla_fp8_sm90(
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
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to an FP8 pool with an absorbed MLA query, without copying the pool.

    The keys are addressed by a CSR pair (FlashInfer's `kv_indptr`, `kv_indices`) or a page table (FlashAttention's).
    The launch depends on shapes alone and lengths are read on the device, so a CUDA graph may capture the call (after
    one call outside, which builds and loads the kernel) and replay it with other lengths. Rows that no request refers
    to are never read.

    Args:
        query: [T, H, 512] with `query_rope`, or [T, H, 576]; BF16 or FP16; the last dimension contiguous, the others
            strided by multiples of 8.
        pool: e4m3 numbers (`float8_e4m3fn`, or the same bytes as `uint8`) of shape [rows, 576], [rows, 1, 576] or
            [pages, page_size, 1, 576]; rows may lie further apart than 576 bytes, by a multiple of 16 bytes.
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
        out: [T, H, 512] to write into, contiguous and aligned to 16 bytes; BF16, FP16 or float32.
        lse: [T, H] float32, contiguous, to write into.
        natural_lse: whether the log-sum-exp is natural (FlashAttention) rather than base 2 (FlashInfer).
        schedule: from `mla_sm90_schedule` at these very lengths.
        workspace: at least `workspace_bytes(...)` bytes of `uint8`, not shared with a call that may run at the same
            time; allocated when absent.
        tile: tile shape in place of `choose_tile`'s, where there is no schedule.

    Returns:
        `out` and `lse`. Tokens that see no key, or lie behind the last request's, get zeros and minus infinity.

    Raises:
        ValueError: shapes, dtypes, strides or the combination of arguments do not fit.
        CudaError: the kernel cannot be built or launched here.
    """
    device, params = query.device, _Params()
    _check_device(
        device, query_rope=query_rope, pool=pool, page_table=page_table, out=out, lse=lse, workspace=workspace
    )
    tokens, heads = _set_query(params, query, query_rope)
    lens = kv_lens is not None
    batch = _set_pages(params, device, kv_indptr, kv_indices, page_table, lens=lens, page_size=page_size)
    if qo_indptr is None and tokens != batch:
        raise ValueError(f"qo_indptr is needed: {tokens} tokens for {batch} requests")
    params.kv_lens = _numbers("kv_lens", kv_lens, device, batch)
    params.qo_indptr = _query_starts(qo_indptr, device, batch)
    params.causal = causal and qo_indptr is not None
    if not sm_scale > 0:
        raise ValueError(f"sm_scale must be positive, not {sm_scale}")
    params.score_scale, params.value_scale = sm_scale * kv_scale, kv_scale
    out, lse = _set_results(params, (tokens, heads), query, out, lse)
    params.lse_scale = 0.6931471805599453 if natural_lse else 1.0
    _set_pool(params, pool)
    if tokens == 0 or batch == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    work = (tokens, heads, batch)
    if schedule is None:
        schedule = _room_for_schedule(choose_tile(*work) if tile is None else tile, work, device, csr=True)
    else:
        _check_schedule(schedule, work, device, csr=page_table is None)
        params.planned = True
    index = query.get_device()
    kernels = _kernels(schedule.tile, index)
    blocks = kernels.blocks
    _set_schedule(params, schedule, blocks)
    workspace = _set_workspace(params, device, workspace, _partial_rows(schedule.tile.rows, blocks))
    rows, slices = tokens * heads, 1
    while rows * slices < 2 * blocks and slices < 8:  # few rows are cut by their latents, to keep the device busy
        slices *= 2
    with torch.cuda.device(index):
        stream = _stream(index)
        kernels.attention.launch((blocks, 1, 1), _THREADS, stream, params, overlap=True)
        joined = min(rows, 16 * blocks)  # as many blocks as run at once: each can take several rows
        kernels.combine.launch((joined, slices, 1), 128 if slices == 1 else 256, stream, params, overlap=True)
    return out, lse


@dataclass(frozen=True)
class _Kernels:
    """The kernels of a tile shape, loaded on a device, and how many blocks work there: one a multiprocessor."""

    plan: Kernel
    attention: Kernel
    combine: Kernel
    blocks: int


@functools.cache
def _kernels(tile: Tile, device: int) -> _Kernels:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current, for the module to load into
        module = Module(build(SOURCE, "sm_90a", tile.defines))
    return _Kernels(
        module.kernel("mla_fp8_sm90_plan"),
        module.kernel("mla_fp8_sm90_attention", tile.shared_bytes),
        module.kernel("mla_fp8_sm90_combine"),
        _multiprocessors(device),
    )


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _partial_rows(rows: int, blocks: int) -> int:
    """How many rows of partial results there can be: two tiles a block."""
    return 2 * blocks * rows


def _block_items(tile: Tile, work: tuple[int, int, int], blocks: int) -> int:
    """How many whole items a block can get."""
    tokens, heads, batch = work
    return -(-(tokens * heads // tile.rows + batch) // blocks)


def _room_for_schedule(tile: Tile, work: tuple[int, int, int], device: torch.device, *, csr: bool) -> Schedule:
    """A schedule that has still to be written."""
    blocks = _multiprocessors(_index(device))
    numbers = blocks * (_SPAN_BYTES // 4 + 2 * _block_items(tile, work, blocks)) + work[2] + 2
    return Schedule(torch.empty(numbers, dtype=torch.int32, device=device), tile, work, csr)


def _stream(device: int) -> int:
    """The current stream there, asked for as Triton does, without a `torch.cuda.Stream` around it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def _index(device: torch.device | int | None) -> int:
    index = device.index if isinstance(device, torch.device) else device
    return int(torch.cuda.current_device() if index is None else index)


def _check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, not on {device}")


# Each of these checks a part of a call and sets the parameters that come of it. An eager prefill waits for the host in
# every layer: so an attribute of a tensor is read once, and a complaint is put together only when there is one.


def _set_query(params: _Params, query: torch.Tensor, rope: torch.Tensor | None) -> tuple[int, int]:
    """Returns its tokens and heads."""
    shape, dtype, whole = query.shape, query.dtype, WIDTH if rope is None else LATENT
    if len(shape) != 3 or shape[2] != whole:
        raise ValueError(f"query must be [T, H, {whole}], not {tuple(shape)}")
    if dtype not in _QUERY_DTYPES:
        raise ValueError(f"query must be BF16 or FP16, not {dtype}")
    if rope is None:
        query, rope = query[..., :LATENT], query[..., LATENT:]
    tokens, heads, _ = shape
    if rope.shape != (tokens, heads, ROPE):
        raise ValueError(f"query_rope must be [T, H, {ROPE}], not {tuple(rope.shape)}")
    if rope.dtype != dtype:
        raise ValueError(f"query_rope must be {dtype} like query, not {rope.dtype}")
    params.q_nope, params.q_nope_token, params.q_nope_head = _query_rows("query", query)
    params.q_rope, params.q_rope_token, params.q_rope_head = _query_rows("query_rope", rope)
    params.q_type = _DTYPES[dtype]
    return tokens, heads


def _query_rows(name: str, part: torch.Tensor) -> tuple[int, int, int]:
    """Where they begin, and how far it is from one token to the next, and from one head to the next."""
    address, (token, head, element) = part.data_ptr(), part.stride()
    if element != 1 or address % 16 or token % 8 or head % 8:
        raise ValueError(f"{name}'s rows must be contiguous and 16-byte aligned")
    return address, token, head


def _set_pool(params: _Params, pool: torch.Tensor) -> None:
    shape, strides, address = pool.shape, pool.stride(), pool.data_ptr()
    if pool.dtype not in _POOL_DTYPES:
        raise ValueError(f"pool must be float8_e4m3fn or uint8, not {pool.dtype}")
    if not 2 <= len(shape) <= 4 or shape[-1] != WIDTH:
        raise ValueError(f"pool must be [..., {WIDTH}], not {tuple(shape)}")
    if len(shape) > 2 and shape[-2] != 1:
        raise ValueError(f"pool must have one head, not {tuple(shape)}")
    page = shape[1] if len(shape) == 4 else 1
    row = strides[1 if page > 1 else 0]
    if page > 1 and strides[0] != page * row:
        raise ValueError("pool's pages must lie end to end")
    if strides[-1] != 1 or row % 16 or address % 16:
        raise ValueError("pool's rows must be 16-byte aligned")
    params.pool, params.pool_row = address, row


def _set_pages(
    params: _Params,
    device: torch.device,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    page_table: torch.Tensor | None,
    *,
    lens: bool,
    page_size: int,
) -> int:
    """Returns how many requests there are."""
    csr = kv_indptr is not None and kv_indices is not None
    if csr == (page_table is not None):
        raise ValueError("give kv_indptr and kv_indices, or page_table")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    if not lens and not (csr and page_size == 1):
        raise ValueError("kv_lens is needed with a page table or larger pages")
    starts, pages = _numbers("kv_indptr", kv_indptr, device), _numbers("kv_indices", kv_indices, device)
    if page_table is None:
        assert kv_indptr is not None
        batch: int = kv_indptr.numel() - 1
        params.kv_indptr, params.pages = starts, pages
    else:
        if page_table.dtype != torch.int32 or page_table.ndim != 2 or page_table.stride(1) != 1:
            raise ValueError("page_table must be [B, max_pages] int32, rows contiguous")
        batch = page_table.shape[0]
        params.pages, params.pages_row = page_table.data_ptr(), page_table.stride(0)
    params.page_size = page_size
    return batch


def _numbers(name: str, tensor: torch.Tensor | None, device: torch.device, least: int = 0) -> int | None:
    """Where lengths or pages begin. They may be of a buffer that has room for more requests."""
    if tensor is None:
        return None
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32")
    _check_device(device, **{name: tensor})
    if tensor.numel() < least:
        raise ValueError(f"{name} must have {least} elements")
    address: int = tensor.data_ptr()
    return address


def _query_starts(qo_indptr: torch.Tensor | None, device: torch.device, batch: int) -> int | None:
    """Where `qo_indptr` begins, whose size says how many requests there are."""
    address = _numbers("qo_indptr", qo_indptr, device)
    if qo_indptr is not None and qo_indptr.numel() != batch + 1:
        raise ValueError(f"qo_indptr must have {batch + 1} elements")
    return address


def _set_results(
    params: _Params, rows: tuple[int, int], query: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the log-sum-exp, as given or new."""
    if out is None:
        out = torch.empty(*rows, LATENT, dtype=query.dtype, device=query.device)
    elif out.shape != (*rows, LATENT) or not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(f"out must be contiguous [T, H, {LATENT}], aligned to 16 bytes")
    elif out.dtype not in _DTYPES:
        raise ValueError(f"out must be BF16, FP16 or float32, not {out.dtype}")
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=query.device)
    elif lse.shape != rows or not lse.is_contiguous():
        raise ValueError("lse must be contiguous [T, H]")
    elif lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32, not {lse.dtype}")
    params.out, params.out_type, params.lse = out.data_ptr(), _DTYPES[out.dtype], lse.data_ptr()
    return out, lse


def _set_workspace(params: _Params, device: torch.device, workspace: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Returns it, as given or new; to be held until the launches are made."""
    size = rows * (LATENT * 2 + 4)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    address = workspace.data_ptr()
    if workspace.nbytes < size or address % 16:
        raise ValueError(f"workspace must have {size} aligned bytes")
    params.partial, params.partial_lse = address, address + rows * LATENT * 2
    return workspace


def _check_schedule(schedule: Schedule, work: tuple[int, int, int], device: torch.device, *, csr: bool) -> None:
    if schedule.work != work:
        raise ValueError(f"the schedule is for (tokens, heads, requests) {schedule.work}, not {work}")
    if csr and not schedule.csr:
        raise ValueError("the schedule was made without kv_indptr")
    if schedule.plan.device != device:
        raise ValueError(f"the schedule is on {schedule.plan.device}, the query on {device}")


def _set_schedule(params: _Params, schedule: Schedule, blocks: int) -> None:
    block_items = _block_items(schedule.tile, schedule.work, blocks)
    params.tokens, params.heads, params.batch = schedule.work
    params.blocks, params.block_items = blocks, block_items
    spans = schedule.plan.data_ptr()
    items = spans + blocks * _SPAN_BYTES
    params.spans, params.items, params.first = spans, items, items + blocks * block_items * 8
