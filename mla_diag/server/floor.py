"""The floor of a decode step: what one rank must read for it, over the card's bandwidth.

Weights that a token touches and the KV rows of its context cannot be avoided; everything above that is overhead, a
copy, or communication. Projections as DeepSeek-V2 has them (arXiv:2405.04434, section 2.1), absorbed for decode.
"""

from __future__ import annotations

from mla_diag.diagnose.gap import Floor
from mla_diag.diagnose.gpu import Gpu
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.server.model_config import ModelConfig

_MS_PER_SECOND = 1e3


def floor_of_decode(
    model: ModelConfig, server: ServerInfo, gpu: Gpu, *, kv_bytes: float, batch: int, context: int
) -> Floor | None:
    """The floor of a decode step; None where the model is not MLA or the card is not known.

    Args:
        model: What it computes.
        server: Over how many ranks.
        gpu: On what.
        kv_bytes: Bytes of an element of the pool.
        batch: Requests in a step on one rank.
        context: Tokens of each.
    """
    if model.width is None or not model.layers or gpu.bandwidth is None or gpu.bandwidth_source is None:
        return None
    weights, experts = _weights(model, server, batch)
    if weights is None:
        return None
    rows = batch * context * model.width * kv_bytes * model.layers
    return Floor(
        ms=(weights + rows) / gpu.bandwidth * _MS_PER_SECOND,
        weight_bytes=round(weights),
        kv_bytes=round(rows),
        bandwidth=gpu.bandwidth,
        bandwidth_source=gpu.bandwidth_source,
        batch=batch,
        context=context,
        experts_read=experts,
        weight_bits=8 * model.weight_bytes,
        quantization=model.quantization,
    )


def _weights(model: ModelConfig, server: ServerInfo, batch: int) -> tuple[float | None, float | None]:
    """Bytes of the weights that a step reads on one rank, and the experts a layer among them."""
    size = model.sizes
    try:
        hidden, heads, layers = size["hidden_size"], size["num_attention_heads"], size["num_hidden_layers"]
        attention = _attention(size, hidden, heads, _attention_ranks(server))
        dense = 3 * hidden * size["intermediate_size"] / server.tensor_parallel
    except KeyError:
        return None, None
    experts = size.get("n_routed_experts") or size.get("num_experts") or 0
    dense_layers = min(size.get("first_k_dense_replace", 0), layers) if experts else layers
    touched, moe = None, 0.0
    if dense_layers < layers:
        chosen = size.get("num_experts_per_tok") or size.get("num_experts_per_token") or 1
        width = size.get("moe_intermediate_size", size["intermediate_size"])
        touched = experts * (1 - (1 - chosen / experts) ** batch)
        read = touched + size.get("n_shared_experts", size.get("num_shared_experts", 0))
        moe = 3 * hidden * width * read / server.tensor_parallel
    attention_bytes = model.weight_bytes if model.attention_quantized else model.dtype_bytes
    head = hidden * size.get("vocab_size", 0) / server.tensor_parallel * model.dtype_bytes
    mlp = dense * dense_layers + moe * (layers - dense_layers)
    return attention * layers * attention_bytes + mlp * model.weight_bytes + head, touched


def _attention_ranks(server: ServerInfo) -> float:
    """Ranks that share the heads: with DP attention each replica has its own part of the ranks."""
    shared = server.data_parallel if server.dp_attention else 1
    return max(server.tensor_parallel / shared, 1)


def _attention(size: dict[str, int], hidden: int, heads: int, ranks: float) -> float:
    """Weights of one layer's attention on one rank. The down projections are not split over ranks."""
    latent, rope = size["kv_lora_rank"], size["qk_rope_head_dim"]
    nope, value = size["qk_nope_head_dim"], size["v_head_dim"]
    query = heads * (nope + rope) / ranks
    down = size.get("q_lora_rank") or 0
    query_weights = hidden * down + down * query if down else hidden * query
    up = latent * heads * (nope + value) / ranks
    return query_weights + hidden * (latent + rope) + up + heads * value * hidden / ranks
