"""config.json in the spellings of its families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_diag.errors import UnreadableInputError
from mla_diag.server.model_config import parse_model_config, read_model_config
from tests.server.models import DEEPSEEK_V3, GLM78, LLAMA


def test_an_mla_model():
    model = parse_model_config(GLM78)
    assert (model.mla, model.layers, model.width) == (True, 78, 576)
    assert (model.quantization, model.weight_bytes) == (None, 2.0)


def test_a_model_that_is_not_mla():
    model = parse_model_config(LLAMA)
    assert (model.mla, model.width, model.layers) == (False, None, 4)
    assert parse_model_config(GLM78 | {"use_mla": False}).mla is False


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_a_model_within_a_multimodal_one(name: str):
    inner = {name: value for name, value in GLM78.items() if name != "architectures"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], name: inner}
    model = parse_model_config(outer)
    assert (model.architecture, model.layers, model.width) == ("KimiK25ForConditionalGeneration", 78, 576)


def test_only_the_mla_layers_of_a_hybrid_have_a_pool():
    hybrid = GLM78 | {"num_hidden_layers": 27, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}}
    assert parse_model_config(hybrid).layers == 7


@pytest.mark.parametrize(
    ("quantization", "served", "bits"),
    [
        ({}, None, 16),
        ({"quant_method": "fp8"}, None, 8),
        ({}, "fp8", 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, 4.125),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            None,
            4,
        ),
    ],
)
def test_bits_of_a_weight(quantization: dict[str, Any], served: str | None, bits: float):
    model = parse_model_config(GLM78 | {"quantization_config": quantization}, served)
    assert 8 * model.weight_bytes == pytest.approx(bits, abs=0.01)


def test_attention_that_a_checkpoint_leaves_out_is_not_quantised():
    left_out = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0.self_attn*", "lm_head"]}
    assert parse_model_config(GLM78 | {"quantization_config": left_out}).attention_quantized is False
    assert parse_model_config(DEEPSEEK_V3).attention_quantized is True


def test_the_quantisation_beside_a_config_counts(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GLM78))
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = read_model_config(tmp_path)
    assert (model.fp8_kv, model.quantization) == (True, "nvfp4")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"[1]", "no model's config"),
        (b"{}", "names no architecture"),
        (b'{"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"}', "names no architecture"),
        (b"\xff", "not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=words):
        read_model_config(file)
    with pytest.raises(UnreadableInputError, match="--model-config"):
        read_model_config(tmp_path / "missing.json")
