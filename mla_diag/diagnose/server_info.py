"""What a server says of itself at `/server_info` (older releases: `/get_server_info`), in the words of this project.

The answer is the server's arguments and more, flat; the scheduler's own view of the same stands in `internal_states`,
one for each data-parallel rank (sglang/srt/entrypoints/http_server.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_diag.errors import UnreadableInputError


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
    """

    version: str | None
    pool_tokens: int | None
    page_size: int | None
    kv_cache_dtype: str | None
    attention_backend: str | None
    prefill_backend: str | None
    decode_backend: str | None
    cuda_graphs: bool | None

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


def parse_server_info(answer: dict[str, Any]) -> ServerInfo:
    """The facts in a server's answer, whatever the release: what the scheduler says wins over the arguments."""
    states = answer.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    memory = state.get("memory_usage")

    def first(name: str, kind: type[Any], *more: Any) -> Any:
        for value in (*more, state.get(name), answer.get(name)):
            if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
                return value
        return None

    disabled = first("disable_cuda_graph", bool)
    return ServerInfo(
        version=first("version", str),
        pool_tokens=first(
            "max_total_num_tokens",
            int,
            memory.get("token_capacity") if isinstance(memory, dict) else None,
            answer.get("max_total_num_tokens"),
            state.get("max_total_num_tokens"),
            state.get("max_total_tokens"),
        ),
        page_size=first("page_size", int),
        kv_cache_dtype=first("kv_cache_dtype", str),
        attention_backend=first("attention_backend", str),
        prefill_backend=first("prefill_attention_backend", str),
        decode_backend=first("decode_attention_backend", str),
        cuda_graphs=None if disabled is None else not disabled,
    )


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
