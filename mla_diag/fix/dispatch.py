"""Attention over an FP8 MLA pool without casting the pool: what a patched SGLang backend calls.

`mla-diag fix --apply` copies this file beside SGLang's attention backends, so a patched SGLang needs torch and nothing
of mla-diag. A strategy runs where it can, and elsewhere the expression that SGLang shipped, `pool.to(q.dtype)`, with
one warning that says why. `MLA_FP8_STRATEGY=cast` in the server's environment turns the fix off. It keeps to what
Python 3.9 has, for SGLang before 0.5.1.

  kernel   `mla_fp8_operator.py` beside this file reads the pool as it lies; decode, extend, CUDA graphs, both backends
  native   FlashInfer's FP8 MLA on Hopper (flashinfer-ai/flashinfer#3694); the flashinfer backend only
  gather   the referenced rows are cast into a compact buffer; not inside CUDA graphs, whose indices it cannot rewrite
  cast     as shipped
  auto     the first in ORDER that works: fastest first, as measured where the fix was applied

The pool is read with scale 1.0, whatever `k_scale` says: SGLang's MLA pools cast on write without scaling
(sgl-project/sglang#35322), and the shipped `.to()` applies no scale either.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

STRATEGY = "auto"
ORDER = ("kernel", "native", "gather")

_LATENT, _ROPE = 512, 64
_STRATEGIES = ("kernel", "native", "gather", "cast")
# The order of `BatchMLAPagedAttentionWrapper.plan`'s arguments in every FlashInfer from 0.2.5 to 0.7.2.
_PLAN_ARGUMENTS = (
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_len_arr",
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "use_profiler",
)
_RUN_OPTIONS = frozenset({"out", "return_lse"})  # what the kernel has a counterpart for
# What the kernel takes of FlashAttention's call, what is checked apart, and what only tells FlashAttention how to work.
_FLASH_NEEDED = frozenset({"qv", "page_table", "cache_seqlens", "cu_seqlens_q", "softmax_scale"})
_FLASH_HARMLESS = frozenset(
    {"causal", "return_softmax_lse", "softcap", "window_size", "max_seqlen_q", "cu_seqlens_k_new"}
    | {"num_splits", "ver", "scheduler_metadata", "pack_gqa", "sm_margin"}
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Plan:
    """How a wrapper was planned, which the reads and runs that follow must agree with.

    Attributes:
        strategy: kernel, native, gather or cast.
        why: for cast, what kept the others from being used; empty where the pool is not FP8.
        pages: for gather, the pool's pages that the plan refers to, in the order it refers to them.
        page_size: tokens a page.
    """

    strategy: str
    why: str = ""
    pages: torch.Tensor | None = None
    page_size: int = 1


_PLANNED_ELSEWHERE = _Plan("cast", "the wrapper was planned outside the patched code")


def plan(
    wrapper: Any,
    *args: Any,
    planner: Callable[..., None] | None = None,
    device_kv_indptr: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Plan a FlashInfer MLA wrapper for the pool's dtype, given as `kv_data_type`, or for what will be read instead.

    Args:
        wrapper: a `BatchMLAPagedAttentionWrapper`.
        *args: arguments of its `plan`, in order; `options` are those passed by name.
        planner: SGLang's own plan function, called with the wrapper, where the shipped code calls that directly.
        device_kv_indptr: [B + 1] int32 on the device, where the plan's own `kv_indptr` is a host copy (graph replay).
        **options: see `args`.
    """
    wrapper.mla_fp8_schedule = None
    if planner is not None or "plan" in vars(wrapper):
        # SGLang's fast plans replay a captured graph: the capture's plan has settled dtype and strategy for good.
        if planner is not None:
            planner(wrapper, *args, **options)
        else:
            wrapper.plan(*args, **options)
        if device_kv_indptr is not None and _planned(wrapper).strategy == "kernel":
            # They plan from host copies and leave the captured buffer as the capture filled it.
            wrapper._kv_indptr_buf[: len(device_kv_indptr)].copy_(device_kv_indptr, non_blocking=True)
        return
    call = {_PLAN_ARGUMENTS[place]: arg for place, arg in enumerate(args)} | options
    pool_dtype, call["kv_data_type"] = call["kv_data_type"], call["q_data_type"]
    wrapper.mla_fp8_plan = _plan_for(wrapper, pool_dtype, call)


def _plan_for(wrapper: Any, pool_dtype: torch.dtype, call: dict[str, Any]) -> _Plan:
    """Plan by the first strategy that can, and say which it was."""
    if not _is_fp8(pool_dtype):
        wrapper.plan(**call)
        return _Plan("cast")
    reasons = []
    for strategy in _strategies():
        if strategy == "native":
            refusal = _plan_native(wrapper, pool_dtype, call)
            if refusal is None:
                return _Plan("native")
        elif strategy == "kernel":
            widths = (call["head_dim_ckv"], call["head_dim_kpe"])
            refusal = _kernel_refusal(wrapper.device, pool_dtype, call["q_data_type"], widths)
            if refusal is None and call["page_size"] != 1:
                refusal = f"it reads CSR indices of single tokens, not pages of {call['page_size']}"
            if refusal is None:
                wrapper.plan(**call)
                return _Plan("kernel")
        elif strategy == "gather":
            refusal = "CUDA graphs replay with indices that it cannot rewrite" if wrapper._use_cuda_graph else None
            if refusal is None:
                return _plan_gather(wrapper, call)
        else:
            refusal = "chosen by MLA_FP8_STRATEGY or when the fix was applied"
        reasons.append(f"{strategy}: {refusal}")
    wrapper.plan(**call)
    return _Plan("cast", "; ".join(reasons))


def kv_for_wrapper(pool: torch.Tensor, dtype: torch.dtype, wrapper: Any) -> torch.Tensor:
    """What a wrapper's `run` should be given as KV, in place of `pool.to(dtype)`.

    Args:
        pool: [rows, 1, 576], the layer's pool, or a buffer of the rows that the plan refers to.
        dtype: the query's.
        wrapper: the wrapper that will run, planned by `plan`.

    Returns:
        The pool itself for kernel and native; for gather [n, 1, 576] in `dtype`, the rows that the plan was made for.
    """
    planned = _planned(wrapper)
    if planned.pages is not None:  # whatever the dtype: the plan's indices are those of its rows
        return _rows(pool.unflatten(0, (-1, planned.page_size)), planned.pages, dtype).flatten(0, 1)
    if pool.dtype == dtype or (planned.strategy in ("kernel", "native") and pool.dtype == torch.float8_e4m3fn):
        return pool
    return _cast(pool, dtype, planned.why or f"the wrapper was planned for {dtype}")


def run(
    wrapper: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, **options: Any
) -> Any:
    """Run a planned wrapper, or the kernel in its place, on what `kv_for_wrapper` returned.

    Args:
        wrapper: a `BatchMLAPagedAttentionWrapper`.
        q_nope: [T, H, 512].
        q_rope: [T, H, 64].
        ckv: [rows, 1, 512], a view of the pool or of the rows gathered from it.
        kpe: [rows, 1, 64], the rest of the same rows.
        **options: of the wrapper's `run`: `out` and `return_lse` (base 2).

    Returns:
        What the wrapper's `run` returns.
    """
    if ckv.dtype == q_nope.dtype:
        return wrapper.run(q_nope, q_rope, ckv, kpe, **options)
    if _planned(wrapper).strategy == "native":
        return wrapper.run(q_nope, q_rope, ckv, kpe, ckv_scale=1.0, kpe_scale=1.0, **options)
    unknown = [name for name, value in options.items() if value is not None and name not in _RUN_OPTIONS]
    if unknown:
        pool = _cast(_joined(ckv, kpe), q_nope.dtype, f"kernel: it has no {', '.join(sorted(unknown))}")
        return wrapper.run(q_nope, q_rope, pool[..., :_LATENT], pool[..., _LATENT:], **options)
    kv_indptr = wrapper._kv_indptr_buf
    one_each = not wrapper._causal and q_nope.shape[0] == kv_indptr.shape[0] - 1
    qo_indptr = None if one_each else wrapper._qo_indptr_buf
    out, lse = _kernel().attend(
        q_nope,
        _joined(ckv, kpe),
        query_rope=q_rope,
        sm_scale=wrapper._sm_scale,
        kv_indptr=kv_indptr,
        kv_indices=wrapper._kv_indices_buf,
        qo_indptr=qo_indptr,
        causal=wrapper._causal,
        out=options.get("out"),
        schedule=_schedule(wrapper, q_nope, kv_indptr, qo_indptr),
    )
    return (out, lse) if options.get("return_lse") else out


def _schedule(wrapper: Any, q: torch.Tensor, kv_indptr: torch.Tensor, qo_indptr: torch.Tensor | None) -> Any:
    """Who does what in a step, worked out on the device by its first layer and shared by the others.

    A captured graph must hold the working out, or its replays would go by the lengths of the capture. So what was made
    in the eager runs that warm a capture up does not serve the capture, and each plan begins anew.
    """
    if not q.shape[0]:
        return None
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    made = wrapper.mla_fp8_schedule
    if made is None or made[0] != (capturing, q.shape[:2]):
        tokens = None if qo_indptr is None else q.shape[0]
        schedule = _kernel().schedule(q.shape[1], kv_indptr=kv_indptr, qo_indptr=qo_indptr, tokens=tokens)
        made = wrapper.mla_fp8_schedule = ((capturing, q.shape[:2]), schedule)
    return made[1]


def kv_for_page_table(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What FlashAttention's call should be given as KV, in place of `pool.to(dtype)`.

    Args:
        pool: [rows, 1, 576], the layer's pool.
        dtype: the query's.

    Returns:
        The pool itself where `flash_attn_with_kvcache` below will deal with it, else the pool in `dtype`.
    """
    if pool.dtype == dtype:
        return pool
    strategy, why = _paged_strategy(pool, dtype)
    return _cast(pool, dtype, why) if strategy == "cast" else pool


def flash_attn_with_kvcache(
    attend: Callable[..., Any], *, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
) -> Any:
    """FlashAttention over a paged MLA pool of any dtype.

    Args:
        attend: the `flash_attn_with_kvcache` that the backend imported.
        q: [T, H, 64], the rope part of the query; the latent part, [T, H, 512], is `qv` among the options.
        k_cache: [pages, page, 1, 64], a view of the pool.
        v_cache: [pages, page, 1, 512], the rest of the same rows.
        **options: the other arguments, by name: `page_table` [B, max_pages], `cache_seqlens` [B], `cu_seqlens_q`, …

    Returns:
        What `attend` returns: [T, H, 512], with the natural log-sum-exp [H, T] after it where asked for.
    """
    if k_cache.dtype == q.dtype:
        return attend(q=q, k_cache=k_cache, v_cache=v_cache, **options)
    pool = _joined(v_cache, k_cache)
    strategy, why = _paged_strategy(pool, q.dtype, options)
    if strategy == "kernel":
        return _attend_kernel(q, pool, options)
    if strategy == "gather":
        pool, table = _gather_pages(pool, q.dtype, options["page_table"], options["cache_seqlens"])
        options = options | {"page_table": table}
    else:
        pool = _cast(pool, q.dtype, why)
    return attend(q=q, k_cache=pool[..., _LATENT:], v_cache=pool[..., :_LATENT], **options)


def _attend_kernel(q: torch.Tensor, pool: torch.Tensor, options: dict[str, Any]) -> Any:
    one_each = options.get("max_seqlen_q") == 1 and q.shape[0] == options["cache_seqlens"].shape[0]
    out, lse = _kernel().attend(
        options["qv"],
        pool,
        query_rope=q,
        sm_scale=options["softmax_scale"],
        page_table=options["page_table"],
        kv_lens=options["cache_seqlens"],
        page_size=pool.shape[1],
        qo_indptr=None if one_each else options["cu_seqlens_q"],
        causal=options.get("causal", False),
        natural_lse=True,
    )
    return (out, lse.T) if options.get("return_softmax_lse") else out


def _call_refusal(options: dict[str, Any]) -> str | None:
    """What the kernel has no counterpart for in this call of FlashAttention; what is new there counts as such."""
    missing = [name for name in _FLASH_NEEDED if options.get(name) is None]
    if missing:
        return f"the call has no {', '.join(missing)}"
    if options.get("softcap"):
        return "it has no logit cap"
    if tuple(options.get("window_size") or (-1, -1)) != (-1, -1):
        return "it has no sliding window"
    # Of FlashAttention-3 SGLang asks this with --enable-deterministic-inference; of 4 always, which has no such choice.
    if options.get("num_splits") == 1 and options.get("ver") != 4:
        return "it splits keys by what the batch holds, and this server wants the same result in every batch"
    others = options.keys() - _FLASH_NEEDED - _FLASH_HARMLESS
    unknown = sorted(name for name in others if options[name] is not None and options[name] is not False)
    return f"it has no {', '.join(unknown)}" if unknown else None


def _plan_native(wrapper: Any, pool_dtype: torch.dtype, call: dict[str, Any]) -> str | None:
    """Plan FlashInfer's FP8 MLA, or say why it cannot be; FlashInfer knows its own limits best, so it is asked."""
    # The signature decides, not the version: builds between releases have it too (flashinfer-ai/flashinfer#3694).
    if "ckv_scale" not in inspect.signature(type(wrapper).run).parameters:
        return "this FlashInfer's run() takes no ckv_scale (0.6.14 was the first)"
    if pool_dtype != torch.float8_e4m3fn:
        return f"it reads float8_e4m3fn, not {pool_dtype}"
    key = (type(wrapper), str(wrapper.device), call["q_data_type"], call["head_dim_ckv"], call["head_dim_kpe"])
    if key in _native_refusals:
        return _native_refusals[key]
    call = call | {"kv_data_type": pool_dtype}
    if "scale_mode" in inspect.signature(type(wrapper).plan).parameters:
        # FlashInfer 0.7 raises in run() unless the plan announced the scales.
        call["scale_mode"] = "kv-per-tensor"
    try:
        wrapper.plan(**call)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _native_refusals[key] = f"FlashInfer refused: {error}"
        return _native_refusals[key]
    return None


_native_refusals: dict[tuple[Any, ...], str] = {}


def _plan_gather(wrapper: Any, call: dict[str, Any]) -> _Plan:
    """Plan over a compact index space: page i of the plan is `pages[i]` of the pool."""
    indices = call["kv_indices"]
    # Past the last request's end the indices are left over from other steps. `plan` reads the lengths back anyway.
    live = indices[: int(call["kv_indptr"][-1])]
    # A page that many requests share is cast once, so this never casts more than the pool.
    pages, places = torch.unique(live, return_inverse=True)
    wrapper.plan(**call | {"kv_indices": places.to(indices.dtype)})
    return _Plan("gather", pages=_or_first(pages), page_size=call["page_size"])


def _gather_pages(
    pool: torch.Tensor, dtype: torch.dtype, page_table: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that some request refers to, cast, and a page table into them; the rest of the table becomes 0."""
    pages_used = (lengths + pool.shape[1] - 1) // pool.shape[1]
    live = torch.arange(page_table.shape[1], device=page_table.device) < pages_used[:, None]
    pages, places = torch.unique(page_table[live], return_inverse=True)
    table = torch.zeros_like(page_table)
    table[live] = places.to(table.dtype)
    return _rows(pool, _or_first(pages), dtype), table


def _or_first(pages: torch.Tensor) -> torch.Tensor:
    """At least one page, since SGLang's views of an empty buffer would be ambiguous."""
    return pages if pages.numel() else pages.new_zeros(1)


def _rows(pool: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # As bytes, because not every torch indexes FP8.
    return pool.view(torch.uint8).index_select(0, pages.long()).view(pool.dtype).to(dtype)


def _paged_strategy(pool: torch.Tensor, dtype: torch.dtype, options: dict[str, Any] | None = None) -> tuple[str, str]:
    """The first strategy that can read the pool, for a call of FlashAttention if its options are given; and why not."""
    reasons = []
    for strategy in _strategies():
        if strategy == "kernel":
            refusal = None if options is None else _call_refusal(options)
            refusal = refusal or _kernel_refusal(pool.device, pool.dtype, dtype, (pool.shape[-1] - _ROPE, _ROPE))
        elif strategy == "gather":
            capturing = pool.is_cuda and torch.cuda.is_current_stream_capturing()
            refusal = "CUDA graphs replay with a page table that it cannot rewrite" if capturing else None
            if options is not None and options.get("page_table") is None:
                refusal = "there is no page table"
        elif strategy == "native":
            refusal = "FlashAttention has no kernel for an FP8 pool and a 16-bit query"
        else:
            refusal = "chosen by MLA_FP8_STRATEGY or when the fix was applied"
        if refusal is None:
            return strategy, ""
        reasons.append(f"{strategy}: {refusal}")
    return "cast", "; ".join(reasons)


def _kernel_refusal(
    device: torch.device, pool_dtype: torch.dtype, dtype: torch.dtype, widths: tuple[int, int]
) -> str | None:
    if _kernel() is None:
        return "there is no mla_fp8_operator.py that imports beside mla_fp8_dispatch.py"
    if pool_dtype != torch.float8_e4m3fn or dtype not in (torch.bfloat16, torch.float16):
        return f"it reads float8_e4m3fn with a 16-bit query, not {pool_dtype} with {dtype}"
    if widths != (_LATENT, _ROPE):
        return f"it is made for latent 512 and rope 64, not {widths[0]} and {widths[1]}"
    if device.type != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else f"it runs on NVIDIA GPUs, not on {device.type}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "it runs on NVIDIA GPUs from SM80"
    # Here, because each plan and each eager read comes by, and nothing can be loaded once a graph is being captured.
    slower = _kernel().prepare(device)
    if slower is not None:
        _warn(f"the Triton kernel in place of Hopper's own, which is faster: {slower}")
    return None


@cache
def _kernel() -> Any:
    """The kernels' module; None where it is missing or does not import, for want of Triton."""
    try:
        return importlib.import_module(".mla_fp8_operator", __package__)
    except ImportError:
        return None


def _strategies() -> tuple[str, ...]:
    chosen = os.environ.get("MLA_FP8_STRATEGY", STRATEGY).lower()
    if chosen in _STRATEGIES:
        return (chosen,)
    if chosen != "auto":
        _warn(f"MLA_FP8_STRATEGY={chosen}: not one of auto, {', '.join(_STRATEGIES)}; taking auto")
    return ORDER


def _planned(wrapper: Any) -> _Plan:
    plan: _Plan = vars(wrapper).get("mla_fp8_plan", _PLANNED_ELSEWHERE)
    return plan


def _is_fp8(dtype: torch.dtype) -> bool:
    # Not by its size: an FP4 pool's is a byte too, and SGLang hands it out dequantised.
    return str(dtype).startswith("torch.float8_")


def _joined(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The rows that both are views of, without a copy: [..., 512] and [..., 64] to [..., 576]."""
    shape, strides = latent.shape, latent.stride()
    adjacent = rope.data_ptr() == latent.data_ptr() + shape[-1] * latent.element_size()
    # The stride of a dimension of one says nothing, and views give it any value.
    alike = strides == rope.stride() or all(
        size < 2 or strides[dimension] == rope.stride(dimension) for dimension, size in enumerate(shape)
    )
    if not (adjacent and alike):
        raise ValueError("the latent and rope parts of the KV pool are not views of the same rows")
    return latent.as_strided((*shape[:-1], shape[-1] + rope.shape[-1]), strides)


def _cast(pool: torch.Tensor, dtype: torch.dtype, why: str) -> torch.Tensor:
    _warn(f"casting the whole KV pool to {dtype}, as SGLang ships ({why})")
    return pool.to(dtype)


@cache
def _warn(message: str) -> None:
    """Once a message: these run a layer, a step."""
    _log.warning("mla-diag fix: %s", message)
