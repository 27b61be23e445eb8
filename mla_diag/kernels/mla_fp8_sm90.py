"""Absorbed MLA attention over an FP8 (e4m3) paged pool on Hopper: the operator around `mla_fp8_sm90.cu`.

Same job and same meaning as the Triton kernel in `mla_fp8`, for compute capability 9.0 alone. `unavailable()` says whether
it can run here; `docs/kernel-log.md` has what it gains and why it is built as it is (issue 6).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_diag.kernels.cuda import CudaError, Kernel, Module, build

LATENT, ROPE = 512, 64
_TOKENS, _ROW_STRIDE = 64, LATENT + ROPE + 32
_COMPUTE_WARPS, _THREADS, _COMBINE_THREADS = 8, 384, 256
SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class Tile:
    """The shape the kernel is built for.

    Attributes:
        rows: query rows (token x head) of a tile: 16, 32 or 64.
        stages: tiles of 64 pool rows in shared memory.
        blocks: blocks that a multiprocessor holds, 1 or 2.
    """

    rows: int
    stages: int
    blocks: int
    bulk: int = 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the kernel's `Shared`, whose size the build checks against this."""
        pool = self.stages * _TOKENS * _ROW_STRIDE
        query = (LATENT + ROPE) * self.rows * 2
        probabilities = 2 * _TOKENS * self.rows * 2
        columns = (_COMPUTE_WARPS + 3) * self.rows * 4
        return (pool + query + probabilities + columns + 16 * self.stages + 160 + 127) // 128 * 128

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the source is built with."""
        return {"ROWS": self.rows, "STAGES": self.stages, "BLOCKS": self.blocks, "SHARED_BYTES": self.shared_bytes, "BULK": self.bulk}


# One entry a tile height, each the fastest of those measured (docs/kernel-log.md).
TILES = {16: Tile(16, 2, 2), 32: Tile(32, 4, 1), 64: Tile(64, 3, 1)}


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "pool", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial", "partial_lse", "schedule")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_lens", "pages")),
        *((name, ctypes.c_int64) for name in ("q_nope_token", "q_nope_head", "q_rope_token", "q_rope_head")),
        *((name, ctypes.c_int64) for name in ("pool_row", "pages_row")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "page_size", "causal", "is_fp16", "blocks")),
        *((name, ctypes.c_float) for name in ("score_scale", "value_scale")),
    )


def unavailable(device: torch.device | int | None = None) -> str | None:
    """Say in one line why the kernel cannot run on a device, or return None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}, and this kernel is Hopper's (9.0)"
    try:
        _kernels(TILES[16], torch.cuda.current_device() if device is None else torch.device(device).index or 0)
    except (CudaError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _kernels(tile: Tile, device: int) -> tuple[Kernel, Kernel, int]:
    """The split and combine kernels of a tile shape, and the blocks the device holds at once."""
    with torch.cuda.device(device):
        module = Module(build(SOURCE, "sm_90a", tile.defines))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return module.kernel("mla_split", tile.shared_bytes), module.kernel("mla_combine"), multiprocessors * tile.blocks


def choose_tile(tokens: int, heads: int, batch: int) -> Tile:
    """The smallest tile that takes an average request's query rows at once, else the largest."""
    rows = -(-tokens // max(batch, 1)) * heads
    return TILES[next((height for height in TILES if rows <= height), 64)]


class Workspace:
    """Scratch memory of one call, reusable by every later call on the same stream that it is large enough for.

    Args:
        batch: the most requests of a call.
        device: where.
    """

    def __init__(self, batch: int, device: torch.device | int) -> None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        rows = max(2 * multiprocessors * tile.blocks * tile.rows for tile in TILES.values())
        self.batch = batch
        self.partial = torch.empty(rows, LATENT, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.schedule = torch.empty(batch + 2, dtype=torch.int32, device=device)


def mla_fp8_sm90(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    sm_scale: float,
    kv_indptr: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    page_size: int = 1,
    causal: bool = True,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Attention of absorbed MLA queries over the pool's referenced rows.

    The launch depends on shapes alone and lengths are read on the device, so a CUDA graph may capture it (after one call
    outside, which builds the kernel) and replay it with other lengths. Rows that no request owns are never read.

    Args:
        q_nope: [tokens, heads, 512], BF16 or FP16, last dimension contiguous.
        q_rope: [tokens, heads, 64], of the same type.
        pool: [rows, 1, 576] or [rows, 576], e4m3 (or the same bytes as uint8); 512 latents, then 64 rotary values.
        pages: the pages of each request, int32. Flat, with `kv_indptr`; or [batch, pages], with `kv_lens`.
        sm_scale: what a query's product with a key is multiplied by before the softmax.
        kv_indptr: [batch + 1], int32, where each request's pages start in flat `pages`.
        kv_lens: [batch], int32, tokens of each request; may be left out with `kv_indptr` and a page size of 1.
        qo_indptr: [batch + 1], int32, where each request's query tokens start; left out, each request has one.
        page_size: pool rows of a page.
        causal: with several query tokens, whether the last sees all tokens, the one before all but one, and so on.
        kv_scale: what a pool value is multiplied by (1.0 for SGLang's pool, whose writes are unscaled).
        out: [tokens, heads, 512] to write to, contiguous, of the query's type.
        lse: [tokens, heads], float32, contiguous, to receive the natural logarithm of each row's softmax denominator;
            minus infinity for an empty request.
        workspace: scratch memory; made here when left out.
        tile: tile shape, when `choose_tile` is not to choose.

    Returns:
        `out`: zeros for empty requests.

    Raises:
        ValueError: a tensor has a type, a shape or strides that the kernel does not take.
        CudaError: the kernel cannot be built or launched here.
    """
    tokens, heads, _ = q_nope.shape
    batch = (kv_lens.numel() if kv_lens is not None else kv_indptr.numel() - 1) if pages.numel() or True else 0
    out = torch.empty(tokens, heads, LATENT, dtype=q_nope.dtype, device=q_nope.device) if out is None else out
    workspace = Workspace(batch, q_nope.device) if workspace is None else workspace
    tile = choose_tile(tokens, heads, batch) if tile is None else tile
    split, combine, blocks = _kernels(tile, q_nope.device.index or 0)
    params = _Params(
        q_nope=q_nope.data_ptr(),
        q_rope=q_rope.data_ptr(),
        pool=pool.data_ptr(),
        out=out.data_ptr(),
        lse=_address(lse),
        partial=workspace.partial.data_ptr(),
        partial_lse=workspace.partial_lse.data_ptr(),
        schedule=workspace.schedule.data_ptr(),
        qo_indptr=_address(qo_indptr),
        kv_indptr=_address(kv_indptr),
        kv_lens=_address(kv_lens),
        pages=pages.data_ptr(),
        q_nope_token=q_nope.stride(0),
        q_nope_head=q_nope.stride(1),
        q_rope_token=q_rope.stride(0),
        q_rope_head=q_rope.stride(1),
        pool_row=pool.stride(0),
        pages_row=pages.stride(0) if kv_indptr is None else 0,
        batch=batch,
        heads=heads,
        page_size=page_size,
        causal=causal and qo_indptr is not None,
        is_fp16=q_nope.dtype == torch.float16,
        blocks=blocks,
        score_scale=sm_scale * kv_scale,
        value_scale=kv_scale,
    )
    stream = torch.cuda.current_stream(q_nope.device).cuda_stream
    split.launch((blocks, 1, 1), _THREADS, stream, params)
    combine.launch((tokens * heads, _slices(tokens * heads, blocks), 1), _COMBINE_THREADS, stream, params, overlap=True)
    return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _slices(rows: int, blocks: int) -> int:
    """Into how many parts the combine cuts a row's 512 latents: more when few rows must keep the device busy."""
    return next((slices for slices in (1, 2, 4) if rows * slices >= 2 * blocks), 8)
