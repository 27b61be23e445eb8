"""What a server says of itself at `/server_info` (older releases: `/get_server_info`), in the words of this project.

The answer is the server's arguments and more, flat; the scheduler's own view of the same stands in `internal_states`,
one for each data-parallel rank (sglang/srt/entrypoints/http_server.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_diag.errors import UnreadableInputError

_GIB = 1 << 30
# Releases before 0.5.17 round to a hundredth of a GiB, later ones to a thousandth.
POOL_BYTES_ERROR = _GIB // 200


@dataclass(frozen=True)
class ServerInfo:
    """The facts of a server that findings rest on; None where the server does not say.

    Attributes:
        version: SGLang's release.
        pool_tokens: Tokens that the KV pool holds, without the page of padding that SGLang adds.
        page_size: Tokens a page.
        kv_cache_dtype: As given to the server, such as `fp8_e4m3` or `auto`.
        attention_backend: For both stages, unless one of the next two is given.
        prefill_backend: The prefill's own.
        decode_backend: The decode's own.
        cuda_graphs: Whether decode runs from CUDA graphs.
        model_path: Where the server has its model.
        quantization: Of the weights, as given to the server.
        tensor_parallel: Ranks that share each layer.
        data_parallel: Replicas, of the model or, with `dp_attention`, of its attention only.
        pipeline_parallel: Ranks that the layers are split over.
        expert_parallel: Ranks that the experts are split over.
        dp_attention: Whether data parallelism is among the ranks of tensor parallelism.
        nodes: Hosts that the ranks run on.
        pool_bytes: Of the KV pool on one rank, all layers, right to within `POOL_BYTES_ERROR`.
        weight_bytes: Of the weights on one rank.
        chunked_prefix_cache: The scheduler's own word; it turns this off for models that are not MLA.
        radix_cache: Whether prefixes are kept.
        disaggregation: `prefill` or `decode` for servers that do one of the two only, else `null`.
        longest_input: Tokens that a prompt can have.
        chunked_prefill_size: Tokens that a forward pass prefills at most; None for any number.
        draft_tokens: Tokens that a decode step can yield at most: more than 1 with speculative decoding.
    """

    version: str | None
    pool_tokens: int | None
    page_size: int | None
    kv_cache_dtype: str | None
    attention_backend: str | None
    prefill_backend: str | None
    decode_backend: str | None
    cuda_graphs: bool | None
    model_path: str | None = None
    quantization: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    dp_attention: bool = False
    nodes: int = 1
    pool_bytes: int | None = None
    weight_bytes: int | None = None
    chunked_prefix_cache: bool | None = None
    radix_cache: bool | None = None
    disaggregation: str | None = None
    longest_input: int | None = None
    chunked_prefill_size: int | None = None
    draft_tokens: int = 1

    @property
    def pool_rows(self) -> int | None:
        """Rows of each layer's KV buffer: the tokens and one page, to which padded writes go."""
        return None if self.pool_tokens is None else self.pool_tokens + (self.page_size or 1)

    @property
    def fp8_pool(self) -> bool | None:
        """Whether the pool is FP8; None if that depends on the model."""
        if self.kv_cache_dtype is None or self.kv_cache_dtype == "auto":
            return None
        return self.kv_cache_dtype.startswith("fp8")

    def backend(self, *, decode: bool) -> str | None:
        """The attention backend of a stage."""
        return (self.decode_backend if decode else self.prefill_backend) or self.attention_backend


def parse_server_info(answer: dict[str, Any]) -> ServerInfo:
    """The facts in a server's answer, whatever the release: what the scheduler says wins over the arguments."""
    states = answer.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    usage = state.get("memory_usage")
    memory = usage if isinstance(usage, dict) else {}

    def first(name: str, kind: type[Any], *more: Any) -> Any:
        for value in (*more, state.get(name), answer.get(name)):
            # Every number here is a size or a count, and one that is not above 0 stands for none, as -1 does.
            if isinstance(value, kind) and not (kind is int and (isinstance(value, bool) or value <= 0)):
                return value
        return None

    def enabled(disable: Any) -> bool | None:
        return None if not isinstance(disable, bool) else not disable

    return ServerInfo(
        version=first("version", str),
        pool_tokens=first(
            "max_total_num_tokens",
            int,
            memory.get("token_capacity"),
            answer.get("max_total_num_tokens"),
            state.get("max_total_num_tokens"),
            state.get("max_total_tokens"),
        ),
        page_size=first("page_size", int),
        kv_cache_dtype=first("kv_cache_dtype", str),
        attention_backend=first("attention_backend", str),
        prefill_backend=first("prefill_attention_backend", str),
        decode_backend=first("decode_attention_backend", str),
        cuda_graphs=_decode_graphs(first),
        model_path=first("model_path", str),
        quantization=first("quantization", str),
        tensor_parallel=first("tp_size", int) or 1,
        data_parallel=first("dp_size", int) or 1,
        pipeline_parallel=first("pp_size", int) or 1,
        expert_parallel=first("ep_size", int) or 1,
        dp_attention=bool(first("enable_dp_attention", bool)),
        nodes=first("nnodes", int) or 1,
        pool_bytes=_gibibytes(memory.get("kvcache")),
        weight_bytes=_gibibytes(memory.get("weight")),
        chunked_prefix_cache=enabled(state.get("disable_chunked_prefix_cache")),
        radix_cache=enabled(first("disable_radix_cache", bool)),
        disaggregation=first("disaggregation_mode", str),
        longest_input=first("max_req_input_len", int),
        chunked_prefill_size=first("chunked_prefill_size", int),
        draft_tokens=first("speculative_num_draft_tokens", int) or 1,
    )


def _decode_graphs(first: Callable[..., Any]) -> bool | None:
    """Whether decode runs from CUDA graphs: as newer releases resolved it, else by the flags."""
    config = first("cuda_graph_config", dict)
    decode = config.get("decode") if config is not None else None
    if isinstance(decode, dict) and isinstance(decode.get("backend"), str):
        return bool(decode["backend"] != "disabled")
    flags = [first(name, bool) for name in ("disable_cuda_graph", "disable_decode_cuda_graph")]
    return False if True in flags else None if flags[0] is None else True


def _gibibytes(value: Any) -> int | None:
    return round(value * _GIB) if isinstance(value, (int, float)) and value > 0 else None


def read_server_info(path: Path) -> ServerInfo:
    """The facts in a saved answer.

    Raises:
        UnreadableInputError: The file cannot be read or is no answer of a server.
    """
    try:
        answer = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UnreadableInputError(f"{path}: cannot be read: {error.strerror}; check --server-info") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableInputError(f"{path}: not JSON ({error}); save what GET /server_info answers") from error
    if not isinstance(answer, dict):
        raise UnreadableInputError(f"{path}: not a server's answer, which is an object; save GET /server_info")
    return parse_server_info(answer)
