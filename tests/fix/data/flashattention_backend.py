"""Attention by page table, in the shape of SGLang's backend of this name: written for the tests, and it runs."""

from sglang.srt.layers.attention.reference import flash_attn_with_kvcache


class FlashAttentionBackend:
    def __init__(self, model_runner):
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.use_mla = True

    def forward_extend(self, q, k, v, layer, forward_batch, k_rope=None):
        metadata = forward_batch.metadata
        if k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope.to(q.dtype))
        # Do absorbed attention
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        k_rope = kv_cache[:, :, layer.v_head_dim :]
        c_kv = kv_cache[:, :, : layer.v_head_dim]
        k_rope_cache = k_rope.view(-1, self.page_size, 1, layer.head_dim - layer.v_head_dim)
        c_kv_cache = c_kv.view(-1, self.page_size, 1, layer.v_head_dim)

        def attend(q_chunk, cu_seqlens_q):
            return flash_attn_with_kvcache(
                q=q_chunk[..., layer.v_head_dim :],
                qv=q_chunk[..., : layer.v_head_dim],
                k_cache=k_rope_cache,
                v_cache=c_kv_cache,
                page_table=metadata.page_table,
                cache_seqlens=metadata.cache_seqlens_int32,
                cu_seqlens_q=cu_seqlens_q,
                softmax_scale=layer.scaling,
                causal=True,
            )

        return attend(q, metadata.cu_seqlens_q)

    def forward_decode(self, q, k, v, layer, forward_batch):
        metadata = forward_batch.metadata
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        k_rope, c_kv = kv_cache[:, :, layer.v_head_dim :], kv_cache[:, :, : layer.v_head_dim]
        result = flash_attn_with_kvcache(
            q=q[..., layer.v_head_dim :],
            k_cache=k_rope.view(-1, self.page_size, 1, layer.head_dim - layer.v_head_dim),
            v_cache=c_kv.view(-1, self.page_size, 1, layer.v_head_dim),
            qv=q[..., : layer.v_head_dim],
            page_table=metadata.page_table,
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q,
            softmax_scale=layer.scaling,
            causal=False,
            return_softmax_lse=True,
        )
        return result[0], result[1]
