"""Configs of models: the recordings' own, and small ones of other families."""

from __future__ import annotations

from typing import Any

GLM78: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 78,
    "num_attention_heads": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 78,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
# DeepSeek-V3 as published: 671 B parameters, 37 B of them for a token, weights in FP8.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
