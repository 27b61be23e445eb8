"""Attention by CSR indices, in the shape of SGLang's backend of this name: written for the tests, and it runs."""

from dataclasses import dataclass
from functools import partial

import torch


@dataclass
class DecodeMetadata:
    decode_wrapper: object


@dataclass
class PrefillMetadata:
    prefill_wrapper: object
    use_ragged: bool


class FlashInferMLAAttnBackend:
    def __init__(self, model_runner, make_wrapper):
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.indices_updater_decode = FlashInferMLAIndicesUpdaterDecode(model_runner, self)
        self.indices_updater_prefill = FlashInferMLAIndicesUpdaterPrefill(model_runner, self)
        self.make_wrapper = make_wrapper
        self.forward_metadata = None

    def init_forward_metadata(self, batch):
        wrapper = self.make_wrapper()
        if batch.is_decode:
            self.indices_updater_decode.call_begin_forward(wrapper, batch.kv_indptr, batch.kv_indices, batch.q_indptr)
            self.forward_metadata = DecodeMetadata(wrapper)
        else:
            self.indices_updater_prefill.call_begin_forward(None, wrapper, batch, batch.kv_indptr, False)
            self.forward_metadata = PrefillMetadata(wrapper, False)

    def capture(self, batch, buffers):
        wrapper = self.make_wrapper(**buffers)
        self.indices_updater_decode.call_begin_forward(wrapper, batch.kv_indptr, batch.kv_indices, batch.q_indptr)
        self.forward_metadata = DecodeMetadata(wrapper)
        wrapper.plan = partial(fast_mla_decode_plan, wrapper)
        return wrapper

    def replay(self, wrapper, batch):
        self.indices_updater_decode.call_begin_forward(
            wrapper,
            batch.kv_indptr,
            batch.kv_indices,
            batch.q_indptr,
            init_metadata_replay=True,
            qo_indptr_cpu=batch.q_indptr.cpu(),
            kv_indptr_cpu=batch.kv_indptr.cpu(),
            kv_len_arr_cpu=batch.kv_indptr.cpu().diff(),
        )

    def forward_extend(self, q, k, v, layer, forward_batch, q_rope=None, k_rope=None):
        prefill_wrapper_paged = self.forward_metadata.prefill_wrapper
        if k_rope is not None:
            k = torch.cat([k, k_rope], dim=-1)
        if self.forward_metadata.use_ragged:
            return self.prefill_wrapper_ragged.forward(q, k.view(-1, 1, layer.head_dim).to(q.dtype), v.to(q.dtype))
        if forward_batch.attn_dcp_metadata is not None and forward_batch.attn_dcp_metadata.dcp_kv_buffer is not None:
            k_buf = forward_batch.attn_dcp_metadata.dcp_kv_buffer.to(q.dtype)
        else:
            k_buf = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        if q_rope is None:
            q, q_rope = q[:, :, : layer.v_head_dim], q[:, :, layer.v_head_dim :]
        o = prefill_wrapper_paged.run(
            q,
            q_rope,
            k_buf[:, :, : layer.v_head_dim],
            k_buf[:, :, layer.v_head_dim :],  # the rope part
        )
        return o.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(self, q, k, v, layer, forward_batch, q_rope=None, k_rope=None):
        decode_wrapper = self.forward_metadata.decode_wrapper
        q_nope = q[:, :, : layer.v_head_dim]
        q_rope = q[:, :, layer.v_head_dim :]
        # The whole pool, every layer, every step.
        k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        return decode_wrapper.run(
            q_nope,
            q_rope,
            k_buffer[:, :, : layer.v_head_dim],
            k_buffer[:, :, layer.v_head_dim :],
            return_lse=forward_batch.return_lse,
        )


class FlashInferMLAIndicesUpdaterDecode:
    def __init__(self, model_runner, attn_backend):
        self.scaling = model_runner.scaling
        self.data_type = model_runner.dtype
        self.attn_backend = attn_backend

    def call_begin_forward(
        self, wrapper, kv_indptr, kv_indices, q_indptr, init_metadata_replay=False, **fast_decode_kwargs
    ):
        kv_lens = kv_indptr[1:] - kv_indptr[:-1]
        if not init_metadata_replay:
            wrapper.plan(
                q_indptr,
                kv_indptr,
                kv_indices,
                kv_lens,
                16,
                512,
                64,
                1,
                False,
                self.scaling,
                self.data_type,
                self.data_type,
            )
        else:
            wrapper.plan(
                fast_decode_kwargs["qo_indptr_cpu"],
                fast_decode_kwargs["kv_indptr_cpu"],
                kv_indices,
                fast_decode_kwargs["kv_len_arr_cpu"],
                16,
                512,
                64,
                1,
                False,
                self.scaling,
                self.data_type,
                self.data_type,
            )


class FlashInferMLAIndicesUpdaterPrefill:
    def __init__(self, model_runner, attn_backend):
        self.scaling = model_runner.scaling
        self.data_type = model_runner.dtype
        self.q_data_type = model_runner.dtype

    def call_begin_forward(self, wrapper_ragged, wrapper_paged, batch, kv_indptr, use_ragged, fast_plan=None):
        if use_ragged:
            wrapper_ragged.begin_forward(qo_indptr=batch.q_indptr, q_data_type=self.q_data_type, causal=True)
        elif fast_plan is not None:
            fast_mla_decode_plan(
                wrapper_paged,
                fast_plan["qo_indptr_cpu"],
                fast_plan["kv_indptr_cpu"],
                batch.kv_indices,
                fast_plan["kv_len_arr_cpu"],
                16,
                512,
                64,
                1,
                True,
                self.scaling,
                self.q_data_type,
                self.data_type,
            )
        else:
            wrapper_paged.plan(
                qo_indptr=batch.q_indptr,
                kv_indptr=kv_indptr,
                kv_indices=batch.kv_indices,
                kv_len_arr=kv_indptr[1:] - kv_indptr[:-1],
                num_heads=16,
                head_dim_ckv=512,
                head_dim_kpe=64,
                page_size=1,
                causal=True,
                sm_scale=self.scaling,
                q_data_type=self.q_data_type,
                kv_data_type=self.data_type,
            )


def fast_mla_decode_plan(
    self,
    qo_indptr_cpu,
    kv_indptr_cpu,
    kv_indices,
    kv_len_arr_cpu,
    num_heads,
    head_dim_ckv,
    head_dim_kpe,
    page_size,
    causal,
    sm_scale,
    q_data_type,
    kv_data_type,
):
    self._causal = causal
    self._sm_scale = sm_scale
