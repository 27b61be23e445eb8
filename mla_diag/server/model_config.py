"""What a model's config.json says that decides what a decode step must read: attention, experts, quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_diag.errors import UnreadableInputError

_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
# Bytes a weight with the scales that come with it: FP8 has one FP32 scale for 128 x 128, NVFP4 an FP8 one for 16.
_METHOD_BYTES = {
    "fp8": 1 + 4 / 128**2,
    "modelopt": 1.0,
    "modelopt_fp8": 1.0,
    "w8a8_fp8": 1.0,
    "w8a8_int8": 1.0,
    "modelopt_fp4": 0.5 + 1 / 16,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
# Where multimodal models keep their language model, as sglang/srt/utils/hf_transformers_utils.py looks for it.
_OF_TEXT = ("text_config", "language_config", "thinker_config", "llm_config")
# One of these says what the model is.
_SAYS_WHAT: dict[str, type[Any]] = {"architectures": list, "model_type": str, "num_hidden_layers": int}


@dataclass(frozen=True)
class ModelConfig:
    """A model as its config.json has it; widths in elements.

    Attributes:
        architecture: The first architecture that the file names.
        layers: Layers with attention over the KV pool; of a hybrid model those only.
        mla: Whether attention is MLA.
        latent: `kv_lora_rank`.
        rope: `qk_rope_head_dim`.
        fp8_kv: Whether the checkpoint asks for an FP8 pool, which `--kv-cache-dtype auto` follows.
        dtype_bytes: Bytes of a weight that is not quantised.
        weight_bytes: Bytes of one that is, with its scales.
        quantization: The method's name; None if there is none.
        attention_quantized: Whether attention's weights are among those quantised.
        sizes: The other widths and counts, by the names of the file.
    """

    architecture: str | None
    layers: int | None
    mla: bool
    latent: int | None
    rope: int | None
    fp8_kv: bool
    dtype_bytes: float
    weight_bytes: float
    quantization: str | None
    attention_quantized: bool
    sizes: dict[str, int]

    @property
    def width(self) -> int | None:
        """Elements of one token's row in the pool of one MLA layer."""
        return self.latent + self.rope if self.mla and self.latent and self.rope is not None else None


def read_model_config(path: Path, served_quantization: str | None = None) -> ModelConfig:
    """Read a config.json, or the one in a model's directory, and the hf_quant_config.json beside it.

    Args:
        path: The file or the directory.
        served_quantization: `--quantization` of the server, which counts where the checkpoint has none.

    Raises:
        UnreadableInputError: The file cannot be read or is no model's config.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    if not _is_config(config):
        raise UnreadableInputError(f"{file}: no model's config: it names no architecture; give the model's config.json")
    beside = file.with_name("hf_quant_config.json")
    if beside.is_file() and "quantization_config" not in config:
        quantization = _read_object(beside).get("quantization")
        if isinstance(quantization, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return parse_model_config(config, served_quantization)


def parse_model_config(config: dict[str, Any], served_quantization: str | None = None) -> ModelConfig:
    """What the members of a config.json say."""
    text: dict[str, Any] = next((config[name] for name in _OF_TEXT if isinstance(config.get(name), dict)), {})
    model = {**config, **text}
    sizes = {name: value for name, value in model.items() if type(value) is int}
    quantization = config.get("quantization_config") or model.get("quantization_config") or {}
    method = _method(quantization) or served_quantization
    dtype_bytes = _DTYPE_BYTES.get(str(model.get("dtype") or model.get("torch_dtype")), 2.0)
    architectures = config.get("architectures")
    algorithm = quantization.get("kv_cache_quant_algo")
    return ModelConfig(
        architecture=architectures[0] if isinstance(architectures, list) and architectures else None,
        layers=_attention_layers(model),
        mla="kv_lora_rank" in sizes and model.get("use_mla", True) is not False,
        latent=sizes.get("kv_lora_rank"),
        rope=sizes.get("qk_rope_head_dim"),
        fp8_kv=isinstance(algorithm, str) and algorithm.upper() == "FP8",
        dtype_bytes=dtype_bytes,
        weight_bytes=_weight_bytes(method, quantization, dtype_bytes),
        quantization=method,
        attention_quantized=method is not None and not _leaves_out_attention(quantization),
        sizes=sizes,
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise UnreadableInputError(f"{file}: cannot be read: {error.strerror}; check --model-config") from error
    except msgspec.DecodeError as error:
        raise UnreadableInputError(f"{file}: not JSON ({error}); give the model's config.json") from error
    if not isinstance(config, dict):
        raise UnreadableInputError(f"{file}: no model's config, which is an object; give the model's config.json")
    return config


def _is_config(config: dict[str, Any]) -> bool:
    """Whether it says what the model is; any other JSON would pass for a model without MLA, which copies nothing."""
    return any(isinstance(config.get(name), kind) for name, kind in _SAYS_WHAT.items())


def _attention_layers(model: dict[str, Any]) -> int | None:
    hybrid = model.get("linear_attn_config")  # Kimi-Linear: MLA in every fourth layer
    full = hybrid.get("full_attn_layers") if isinstance(hybrid, dict) else None
    if isinstance(full, list):
        return len(full)
    layers = model.get("num_hidden_layers")
    return layers if type(layers) is int else None


def _method(quantization: dict[str, Any]) -> str | None:
    """The method's name, with ModelOpt's algorithm where that decides the width."""
    method = quantization.get("quant_method")
    algorithm = quantization.get("quant_algo")
    if isinstance(algorithm, str) and "FP4" in algorithm.upper():
        return "nvfp4"
    return method if isinstance(method, str) else None


def _weight_bytes(method: str | None, quantization: dict[str, Any], dtype_bytes: float) -> float:
    if method is None:
        return dtype_bytes
    if method in _METHOD_BYTES:
        return _METHOD_BYTES[method]
    bits, group = (_first_of(quantization, name) for name in ("bits", "group_size"))
    if bits is None:
        bits = _first_of(quantization, "num_bits")
    if bits is None:
        return dtype_bytes
    return bits / 8 + (2 / group if group and group > 0 else 0)


def _first_of(value: Any, name: str) -> int | None:
    """The first integer of that name, at any depth: compressed-tensors has them within groups."""
    if isinstance(value, dict):
        if type(value.get(name)) is int:
            return int(value[name])
        value = list(value.values())
    if isinstance(value, list):
        return next((found for inner in value if (found := _first_of(inner, name)) is not None), None)
    return None


def _leaves_out_attention(quantization: dict[str, Any]) -> bool:
    names = [quantization.get(key) for key in ("exclude_modules", "modules_to_not_convert", "ignore")]
    return any("self_attn" in str(name) for listed in names if isinstance(listed, list) for name in listed)
