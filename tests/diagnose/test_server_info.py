"""What a server says of itself, in the spellings of its releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.server_info import ServerInfo, parse_server_info, read_server_info
from mla_diag.errors import UnreadableInputError


def test_the_recorded_server(recordings: Path):
    info = read_server_info(recordings / "base.server_info.json")
    assert info == ServerInfo("0.5.17", 495_552, 1, "fp8_e4m3", "flashinfer", None, None, False)
    assert info.pool_rows == 495_553
    assert info.fp8_pool is True


@pytest.mark.parametrize(
    "answer",
    [
        {"max_total_num_tokens": 1000, "page_size": 64},  # 0.4.6: flat
        {"internal_states": [{"max_total_num_tokens": 1000, "page_size": 64}], "max_total_tokens": None},
        {"internal_states": [{"memory_usage": {"token_capacity": 1000}}], "page_size": 64, "max_total_tokens": 7},
    ],
)
def test_the_pool_in_each_spelling(answer: dict[str, Any]):
    info = parse_server_info(answer)
    assert (info.pool_tokens, info.pool_rows) == (1000, 1064)


@pytest.mark.parametrize("answer", [{}, {"internal_states": []}, {"internal_states": [None], "page_size": True}])
def test_what_a_server_does_not_say_is_unknown(answer: dict[str, Any]):
    assert parse_server_info(answer) == ServerInfo(None, None, None, None, None, None, None, None)


@pytest.mark.parametrize(
    ("dtype", "fp8"), [("fp8_e4m3", True), ("fp8_e5m2", True), ("bfloat16", False), ("auto", None)]
)
def test_fp8_pool(dtype: str, fp8: bool | None):
    assert parse_server_info({"kv_cache_dtype": dtype}).fp8_pool is fp8


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "not JSON"), (b"[1]", "not a server's answer"), (b"\xff", "not JSON")]
)
def test_a_file_that_is_no_answer_is_one_line(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "info.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=words):
        read_server_info(path)
    with pytest.raises(UnreadableInputError, match="--server-info"):
        read_server_info(tmp_path / "missing.json")
