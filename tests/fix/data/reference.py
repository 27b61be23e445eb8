"""Absorbed MLA attention in float32, with the interfaces and the checks of the kernels that SGLang calls."""

import itertools
import math

import torch


def attend(q, keys, values, lengths, q_lengths, rows, scale, causal):
    """[T, H, 576] over the rows of each request: [T, H, 512] and natural log-sum-exp [T, H]."""
    out = torch.zeros(*q.shape[:2], values.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf)
    first = 0
    for request, (length, count) in enumerate(zip(lengths, q_lengths, strict=True)):
        own = rows[request][:length].long()
        for token in range(count):
            seen = own[: length - count + token + 1] if causal else own
            if len(seen):
                scores = scale * q[first + token].float() @ keys[seen].float().T
                out[first + token] = scores.softmax(-1) @ values[seen].float()
                lse[first + token] = scores.logsumexp(-1)
        first += count
    return out.to(q.dtype), lse


class Wrapper:
    """FlashInfer's BatchMLAPagedAttentionWrapper before its FP8 MLA: the pool must have the planned dtype."""

    def __init__(self, use_cuda_graph=False, **buffers):
        self.device = torch.device("cpu")
        self._use_cuda_graph = use_cuda_graph
        for name, buffer in buffers.items():
            setattr(self, f"_{name}_buf", buffer)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        self._check_plan(q_data_type, kv_data_type)
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
        for name, value in given.items():
            if self._use_cuda_graph:
                getattr(self, f"_{name}_buf")[: len(value)].copy_(value)
            else:
                setattr(self, f"_{name}_buf", value)
        self._causal, self._sm_scale, self._page_size = causal, sm_scale, page_size
        self._kv_data_type = kv_data_type

    def _check_plan(self, q_data_type, kv_data_type):
        if kv_data_type != q_data_type:
            raise ValueError(f"kv_data_type {kv_data_type} is not supported")

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False):
        return self._run(q_nope, q_pe, ckv_cache, kpe_cache, return_lse)

    def _run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse):
        if ckv_cache.dtype != self._kv_data_type:
            raise ValueError(f"ckv_cache.dtype={ckv_cache.dtype} does not match the plan")
        keys = torch.cat([ckv_cache.float(), kpe_cache.float()], -1).flatten(0, -2)
        pages = self._kv_indices_buf.long() * self._page_size
        rows = (pages[:, None] + torch.arange(self._page_size)).flatten()
        starts = (self._kv_indptr_buf * self._page_size).tolist()
        own = [rows[a:b] for a, b in itertools.pairwise(starts)]
        lengths = [len(each) for each in own]
        out, lse = attend(
            torch.cat([q_nope, q_pe], -1),
            keys,
            keys[:, : ckv_cache.shape[-1]],
            lengths,
            self._qo_indptr_buf.diff().tolist(),
            own,
            self._sm_scale,
            self._causal,
        )
        return (out, lse / math.log(2)) if return_lse else out


class Fp8Wrapper(Wrapper):
    """The same from FlashInfer 0.6.14 on: an e4m3 pool may be planned, and then needs its scales."""

    def _check_plan(self, q_data_type, kv_data_type):
        if kv_data_type not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            raise ValueError(f"MLA kv_data_type {kv_data_type} is not supported")

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        *,
        ckv_scale=None,
        kpe_scale=None,
    ):
        is_fp8 = self._kv_data_type == torch.float8_e4m3fn
        if is_fp8 != (ckv_scale is not None) or is_fp8 != (kpe_scale is not None):
            raise ValueError("ckv_scale and kpe_scale are required when kv_data_type is FP8, and only then")
        self.scales = (ckv_scale, kpe_scale)
        return self._run(q_nope, q_pe, ckv_cache, kpe_cache, return_lse)


class ScaleModeWrapper(Fp8Wrapper):
    """The same from FlashInfer 0.7 on, where the plan must announce the scales of the run."""

    def plan(self, *args, scale_mode="default", **kwargs):
        super().plan(*args, **kwargs)
        self.scale_mode = scale_mode

    def run(self, *args, ckv_scale=None, kpe_scale=None, **kwargs):
        if (self.scale_mode == "kv-per-tensor") != (ckv_scale is not None):
            raise ValueError("MLA planned run argument scale mode mismatch")
        return super().run(*args, ckv_scale=ckv_scale, kpe_scale=kpe_scale, **kwargs)


class Hopperless(Fp8Wrapper):
    """FlashInfer with FP8 MLA, on a GPU that it is not for."""

    def _check_plan(self, q_data_type, kv_data_type):
        if kv_data_type == torch.float8_e4m3fn:
            raise ValueError("FP8 kv_data_type for MLA requires an SM90 (Hopper) device, got SM80.")


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    qv=None,
    page_table=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    softmax_scale=None,
    causal=False,
    return_softmax_lse=False,
    softcap=0.0,
    window_size=(-1, -1),
):
    """FlashAttention 3 over a paged MLA cache: q and cache of one dtype."""
    if not q.dtype == qv.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError("query and cache must have the same dtype")
    page = k_cache.shape[1]
    keys = torch.cat([v_cache, k_cache], -1).flatten(0, 2)
    rows = (page_table.long()[:, :, None] * page + torch.arange(page)).flatten(1)
    out, lse = attend(
        torch.cat([qv, q], -1),
        keys,
        keys[:, : v_cache.shape[-1]],
        cache_seqlens.tolist(),
        cu_seqlens_q.diff().tolist(),
        rows,
        softmax_scale,
        causal,
    )
    return (out, lse.T) if return_softmax_lse else out
