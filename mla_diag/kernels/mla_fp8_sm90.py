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
    _require(lengths is not None, "a schedule needs kv_lens or kv_indptr")
    assert lengths is not None
    _require((qo_indptr is None) == (tokens is None), "qo_indptr and tokens go together")
    batch = lengths.numel() - (kv_lens is None)
    _check_int32(lengths.device, kv_indptr=kv_indptr, kv_lens=kv_lens, qo_indptr=qo_indptr)
    _check_sizes(batch, kv_indptr, kv_lens, qo_indptr)
    work = (batch if tokens is None else tokens, heads, batch)
    tile = choose_tile(*work) if tile is None else tile
    schedule = _room_for_schedule(tile, work, lengths.device, csr=kv_indptr is not None)
    if min(work) > 0:
        kernels = _kernels(tile, _index(lengths.device))
        params = _Params(
            kv_indptr=_address(kv_indptr),
            kv_lens=_address(kv_lens),
            qo_indptr=_address(qo_indptr),
            causal=qo_indptr is not None,
            **_describe(schedule, kernels.blocks),
        )
        with torch.cuda.device(lengths.device):
            stream = torch.cuda.current_stream().cuda_stream
            kernels.plan.launch((kernels.blocks, 1, 1), _THREADS, stream, params)
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
    nope, rope = _split_query(query, query_rope)
    tokens, heads, _ = nope.shape
    pages = kv_indices if page_table is None else page_table
    device = nope.device
    _check_addressing(kv_indptr, kv_indices, page_table, kv_lens, page_size=page_size)
    _check_int32(device, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_lens=kv_lens, qo_indptr=qo_indptr)
    assert pages is not None
    batch = page_table.shape[0] if page_table is not None else kv_indptr.numel() - 1  # type: ignore[union-attr]
    _require(qo_indptr is not None or tokens == batch, "qo_indptr is needed: {} tokens for {} requests", tokens, batch)
    _check_sizes(batch, None, kv_lens, qo_indptr)
    _require(sm_scale > 0, "sm_scale must be positive, not {}", sm_scale)
    out = torch.empty(tokens, heads, LATENT, dtype=nope.dtype, device=device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if lse is None else lse
    fits = out.shape == (tokens, heads, LATENT) and out.is_contiguous() and out.data_ptr() % 16 == 0
    _require(fits, "out must be contiguous [T, H, 512], aligned to 16 bytes")
    _require(out.dtype in _DTYPES, "out must be BF16, FP16 or float32, not {}", out.dtype)
    _require(lse.shape == (tokens, heads) and lse.is_contiguous(), "lse must be contiguous [T, H]")
    _require(lse.dtype == torch.float32, "lse must be float32, not {}", lse.dtype)
    pool_row = _row_stride(pool)
    if tokens == 0 or batch == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    work = (tokens, heads, batch)
    planned = schedule is not None
    if schedule is None:
        schedule = _room_for_schedule(choose_tile(*work) if tile is None else tile, work, device, csr=True)
    _require(schedule.work == work, "the schedule is for (tokens, heads, requests) {}, not {}", schedule.work, work)
    _require(schedule.csr or page_table is not None, "the schedule was made without kv_indptr")
    _require(schedule.plan.device == device, "the schedule is on {}, the query on {}", schedule.plan.device, device)
    tile = schedule.tile
    kernels = _kernels(tile, _index(device))
    blocks = kernels.blocks
    rows = _partial_rows(tile.rows, blocks)
    size = rows * (LATENT * 2 + 4)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if workspace is None else workspace
    _require(workspace.nbytes >= size and workspace.data_ptr() % 16 == 0, "workspace must have {} aligned bytes", size)
    params = _Params(
        q_nope=nope.data_ptr(),
        q_rope=rope.data_ptr(),
        pool=pool.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        partial=workspace.data_ptr(),
        partial_lse=workspace.data_ptr() + rows * LATENT * 2,
        qo_indptr=_address(qo_indptr),
        kv_indptr=None if page_table is not None else _address(kv_indptr),
        kv_lens=_address(kv_lens),
        pages=pages.data_ptr(),
        q_nope_token=nope.stride(0),
        q_nope_head=nope.stride(1),
        q_rope_token=rope.stride(0),
        q_rope_head=rope.stride(1),
        pool_row=pool_row,
        pages_row=0 if page_table is None else page_table.stride(0),
        page_size=page_size,
        causal=causal and qo_indptr is not None,
        q_type=_DTYPES[nope.dtype],
        out_type=_DTYPES[out.dtype],
        planned=planned,
        score_scale=sm_scale * kv_scale,
        value_scale=kv_scale,
        lse_scale=0.6931471805599453 if natural_lse else 1.0,
        **_describe(schedule, blocks),
    )
    # Few rows are cut into up to 8 parts of their 512 latents, to keep the device busy.
    slices = next((n for n in (1, 2, 4) if tokens * heads * n >= 2 * blocks), 8)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        kernels.attention.launch((blocks, 1, 1), _THREADS, stream, params, overlap=True)
        joined = min(tokens * heads, 16 * blocks)  # as many blocks as run at once: each can take several rows
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


def _describe(schedule: Schedule, blocks: int) -> dict[str, int]:
    """The kernel's parameters that tell of a schedule: `_Params` by name."""
    tokens, heads, batch = schedule.work
    block_items = _block_items(schedule.tile, schedule.work, blocks)
    spans = schedule.plan.data_ptr()
    items = spans + blocks * _SPAN_BYTES
    sizes = {"tokens": tokens, "heads": heads, "batch": batch, "blocks": blocks, "block_items": block_items}
    return {"spans": spans, "items": items, "first": items + blocks * block_items * 8} | sizes


def _index(device: torch.device | int | None) -> int:
    index = device.index if isinstance(device, torch.device) else device
    return int(torch.cuda.current_device() if index is None else index)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require(condition: bool, complaint: str, *values: object) -> None:
    """Raise a ValueError unless `condition`; the complaint is only put together then, as calls are many and small."""
    if not condition:
        raise ValueError(complaint.format(*(tuple(v) if isinstance(v, torch.Size) else v for v in values)))


def _split_query(query: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    whole = WIDTH if rope is None else LATENT
    _require(query.ndim == 3 and query.shape[-1] == whole, "query must be [T, H, {}], not {}", whole, query.shape)
    _require(query.dtype in (torch.bfloat16, torch.float16), "query must be BF16 or FP16, not {}", query.dtype)
    if rope is None:
        query, rope = query[..., :LATENT], query[..., LATENT:]
    _require(rope.shape == (*query.shape[:2], ROPE), "query_rope must be [T, H, 64], not {}", rope.shape)
    _require(rope.dtype == query.dtype, "query_rope must be {} like query, not {}", query.dtype, rope.dtype)
    for name, part in (("query", query), ("query_rope", rope)):
        aligned = part.data_ptr() % 16 == 0 and part.stride(0) % 8 == 0 and part.stride(1) % 8 == 0
        _require(part.stride(2) == 1 and aligned, "{}'s rows must be contiguous and 16-byte aligned", name)
    return query, rope


def _row_stride(pool: torch.Tensor) -> int:
    """Bytes from one row of the pool to the next."""
    _require(
        pool.dtype in (torch.float8_e4m3fn, torch.uint8), "pool must be float8_e4m3fn or uint8, not {}", pool.dtype
    )
    _require(pool.ndim in (2, 3, 4) and pool.shape[-1] == WIDTH, "pool must be [..., 576], not {}", pool.shape)
    _require(pool.ndim == 2 or pool.shape[-2] == 1, "pool must have one head, not {}", pool.shape)
    page = pool.shape[1] if pool.ndim == 4 else 1
    stride = int(pool.stride(1) if page > 1 else pool.stride(0))
    _require(page == 1 or pool.stride(0) == page * stride, "pool's pages must lie end to end")
    _require(
        pool.stride(-1) == 1 and stride % 16 == 0 and pool.data_ptr() % 16 == 0, "pool's rows must be 16-byte aligned"
    )
    return stride


def _check_addressing(
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    *,
    page_size: int,
) -> None:
    csr = kv_indptr is not None and kv_indices is not None
    _require(csr != (page_table is not None), "give kv_indptr and kv_indices, or page_table")
    _require(page_size >= 1, "page_size must be at least 1, not {}", page_size)
    _require(kv_lens is not None or (csr and page_size == 1), "kv_lens is needed with a page table or larger pages")
    if page_table is not None:
        fits = page_table.dtype == torch.int32 and page_table.ndim == 2 and page_table.stride(1) == 1
        _require(fits, "page_table must be [B, max_pages] int32, rows contiguous")


def _check_sizes(
    batch: int, kv_indptr: torch.Tensor | None, kv_lens: torch.Tensor | None, qo_indptr: torch.Tensor | None
) -> None:
    """Lengths may be of a buffer that has room for more requests; where query tokens begin says how many there are."""
    for name, tensor, size in (("kv_indptr", kv_indptr, batch + 1), ("kv_lens", kv_lens, batch)):
        _require(tensor is None or tensor.numel() >= size, "{} must have {} elements", name, size)
    _require(qo_indptr is None or qo_indptr.numel() == batch + 1, "qo_indptr must have {} elements", batch + 1)


def _check_int32(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            _require(tensor.dtype == torch.int32 and tensor.is_contiguous(), "{} must be contiguous int32", name)
            _require(tensor.device == device, "{} is on {}, not on {}", name, tensor.device, device)
