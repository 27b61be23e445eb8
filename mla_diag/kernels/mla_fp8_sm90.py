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

__all__ = ["TILES", "Tile", "mla_fp8_sm90", "unavailable", "workspace_bytes"]

SOURCE = Path(__file__).with_suffix(".cu")
LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
_SCHEDULE_BYTES = 12 * 16 + 512 * 8 + 24  # of `SpanMemory`: totals of 12 warps, 512 items; and of a word before it
_THREADS = 384  # of a block of the attention kernel
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
        """Shared memory of a block: the kernel's `Shared`, whose size the build checks against this."""
        pool = self.stages * _TOKENS * _ROW_STRIDE
        query = WIDTH * self.rows * 2
        probabilities = 2 * _TOKENS * self.rows * 2
        columns = 11 * self.rows * 4
        barriers, schedule = 16 * self.stages, _SCHEDULE_BYTES
        return -(-(pool + query + probabilities + columns + barriers + schedule) // 128) * 128

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the source is built with."""
        return {"ROWS": self.rows, "STAGES": self.stages, "SHARED_BYTES": self.shared_bytes}


# As many stages as fit beside the query: they cover the memory's latency. Of 16 rows two blocks with two stages each
# would fit too, and were 12 % slower (64 x 8k).
TILES = {16: Tile(16, 5), 32: Tile(32, 4), 64: Tile(64, 3)}


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "pool", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial", "partial_lse", "schedule")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_lens", "pages")),
        *((name, ctypes.c_int64) for name in ("q_nope_token", "q_nope_head", "q_rope_token", "q_rope_head")),
        *((name, ctypes.c_int64) for name in ("pool_row", "pages_row")),
        *((name, ctypes.c_int) for name in ("tokens", "batch", "heads", "page_size", "causal")),
        *((name, ctypes.c_int) for name in ("q_type", "out_type", "blocks")),
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
    rows = -(-tokens // batch) * heads
    return TILES[next((height for height in TILES if rows <= height), 64)]


def workspace_bytes(batch: int, device: torch.device | int | None = None) -> int:
    """Size of the workspace for calls of up to `batch` requests: about 17 MB on an H200."""
    multiprocessors = int(torch.cuda.get_device_properties(_index(device)).multi_processor_count)
    rows = 2 * multiprocessors * max(TILES)
    return rows * (LATENT * 2 + 4) + (batch + 2) * 4


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
        out: [T, H, 512] to write into, contiguous; BF16, FP16 or float32.
        lse: [T, H] float32, contiguous, to write into.
        natural_lse: whether the log-sum-exp is natural (FlashAttention) rather than base 2 (FlashInfer).
        workspace: at least `workspace_bytes(...)` bytes of `uint8`, not shared with a call that may run at the same
            time; allocated when absent.
        tile: tile shape in place of `choose_tile`'s.

    Returns:
        `out` and `lse`. Tokens that see no key get zeros and minus infinity.

    Raises:
        ValueError: shapes, dtypes, strides or the combination of arguments do not fit.
        CudaError: the kernel cannot be built or launched here.
    """
    nope, rope = _split_query(query, query_rope)
    tokens, heads, _ = nope.shape
    pages = kv_indices if page_table is None else page_table
    _check_addressing(kv_indptr, kv_indices, page_table, kv_lens, qo_indptr, page_size=page_size)
    assert pages is not None
    batch = page_table.shape[0] if page_table is not None else kv_indptr.numel() - 1  # type: ignore[union-attr]
    _require(qo_indptr is not None or tokens == batch, f"qo_indptr is needed: {tokens} tokens for {batch} requests")
    _require(qo_indptr is None or qo_indptr.numel() == batch + 1, f"qo_indptr must have {batch + 1} elements")
    _require(sm_scale > 0, f"sm_scale must be positive, not {sm_scale}")
    device = nope.device
    out = torch.empty(tokens, heads, LATENT, dtype=nope.dtype, device=device) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if lse is None else lse
    _require(out.shape == (tokens, heads, LATENT) and out.is_contiguous(), "out must be contiguous [T, H, 512]")
    _require(out.dtype in _DTYPES, f"out must be BF16, FP16 or float32, not {out.dtype}")
    _require(lse.shape == (tokens, heads) and lse.is_contiguous(), "lse must be contiguous [T, H]")
    _require(lse.dtype == torch.float32, f"lse must be float32, not {lse.dtype}")
    pool_row = _row_stride(pool)
    if tokens == 0 or batch == 0:
        return out, lse
    tile = choose_tile(tokens, heads, batch) if tile is None else tile
    attention, combine, blocks = _kernels(tile, _index(device))
    size = workspace_bytes(batch, device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if workspace is None else workspace
    _require(workspace.nbytes >= size and workspace.data_ptr() % 16 == 0, f"workspace must have {size} aligned bytes")
    partial = workspace.data_ptr()
    partial_lse = partial + 2 * blocks * tile.rows * LATENT * 2
    params = _Params(
        q_nope=nope.data_ptr(),
        q_rope=rope.data_ptr(),
        pool=pool.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        partial=partial,
        partial_lse=partial_lse,
        schedule=partial_lse + 2 * blocks * tile.rows * 4,
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
        tokens=tokens,
        batch=batch,
        heads=heads,
        page_size=page_size,
        causal=causal and qo_indptr is not None,
        q_type=_DTYPES[nope.dtype],
        out_type=_DTYPES[out.dtype],
        blocks=blocks,
        score_scale=sm_scale * kv_scale,
        value_scale=kv_scale,
        lse_scale=0.6931471805599453 if natural_lse else 1.0,
    )
    # Few rows are cut into up to 8 parts of their 512 latents, to keep the device busy.
    slices = next((n for n in (1, 2, 4) if tokens * heads * n >= 2 * blocks), 8)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        attention.launch((blocks, 1, 1), _THREADS, stream, params)
        rows = min(tokens * heads, 16 * blocks)  # as many blocks as run at once: each can take several rows
        combine.launch((rows, slices, 1), 128 if slices == 1 else 256, stream, params, overlap=True)
    return out, lse


@functools.cache
def _kernels(tile: Tile, device: int) -> tuple[Kernel, Kernel, int]:
    """The attention and combine kernels of a tile shape, and how many blocks the first gets: one a multiprocessor."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current, for the module to load into
        module = Module(build(SOURCE, "sm_90a", tile.defines))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        module.kernel("mla_fp8_sm90_attention", tile.shared_bytes),
        module.kernel("mla_fp8_sm90_combine"),
        multiprocessors,
    )


def _index(device: torch.device | int | None) -> int:
    index = device.index if isinstance(device, torch.device) else device
    return int(torch.cuda.current_device() if index is None else index)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _split_query(query: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    whole = WIDTH if rope is None else LATENT
    _require(query.ndim == 3 and query.shape[-1] == whole, f"query must be [T, H, {whole}], not {tuple(query.shape)}")
    _require(query.dtype in (torch.bfloat16, torch.float16), f"query must be BF16 or FP16, not {query.dtype}")
    if rope is None:
        query, rope = query[..., :LATENT], query[..., LATENT:]
    _require(rope.shape == (*query.shape[:2], ROPE), f"query_rope must be [T, H, 64], not {tuple(rope.shape)}")
    _require(rope.dtype == query.dtype, f"query_rope must be {query.dtype} like query, not {rope.dtype}")
    for name, part in (("query", query), ("query_rope", rope)):
        aligned = part.data_ptr() % 16 == 0 and part.stride(0) % 8 == 0 and part.stride(1) % 8 == 0
        _require(part.stride(2) == 1 and aligned, f"{name}'s rows must be contiguous and 16-byte aligned")
    return query, rope


def _row_stride(pool: torch.Tensor) -> int:
    """Bytes from one row of the pool to the next."""
    _require(pool.dtype in (torch.float8_e4m3fn, torch.uint8), f"pool must be float8_e4m3fn or uint8, not {pool.dtype}")
    _require(pool.ndim in (2, 3, 4) and pool.shape[-1] == WIDTH, f"pool must be [..., 576], not {tuple(pool.shape)}")
    _require(pool.ndim == 2 or pool.shape[-2] == 1, f"pool must have one head, not {pool.shape[-2]}")
    page = pool.shape[1] if pool.ndim == 4 else 1
    stride = int(pool.stride(0)) // page
    _require(page == 1 or pool.stride(1) == stride, "pool's pages must lie end to end")
    _require(
        pool.stride(-1) == 1 and stride % 16 == 0 and pool.data_ptr() % 16 == 0, "pool's rows must be 16-byte aligned"
    )
    return stride


def _check_addressing(
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    qo_indptr: torch.Tensor | None,
    *,
    page_size: int,
) -> None:
    csr = kv_indptr is not None and kv_indices is not None
    _require(csr != (page_table is not None), "give kv_indptr and kv_indices, or page_table")
    _require(page_size >= 1, f"page_size must be at least 1, not {page_size}")
    _require(kv_lens is not None or (csr and page_size == 1), "kv_lens is needed with a page table or larger pages")
    named = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_lens": kv_lens, "qo_indptr": qo_indptr}
    for name, tensor in named.items():
        if tensor is not None:
            _require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name} must be contiguous int32")
    if page_table is not None:
        fits = page_table.dtype == torch.int32 and page_table.ndim == 2 and page_table.stride(1) == 1
        _require(fits, "page_table must be [B, max_pages] int32, rows contiguous")
