"""What a server says of itself, in the spellings of its releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.server_info import POOL_BYTES_ERROR, ServerInfo, parse_server_info, read_server_info
from mla_diag.errors import UnreadableInputError


def test_the_recorded_server(recordings: Path):
    info = read_server_info(recordings / "base.server_info.json")
    assert info == ServerInfo(
        "0.5.17",
        495_552,
        1,
        "fp8_e4m3",
        "flashinfer",
        None,
        None,
        False,
        model_path="/tmp/m",
        pool_bytes=info.pool_bytes,
        weight_bytes=info.weight_bytes,
        chunked_prefix_cache=True,
        radix_cache=True,
        disaggregation="null",
        longest_input=163_834,
        chunked_prefill_size=8192,
    )
    assert info.pool_bytes == pytest.approx(495_553 * 576 * 78, abs=POOL_BYTES_ERROR)
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


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"internal_states": []},
        {"internal_states": [None], "page_size": True},
        {"max_total_num_tokens": -1, "page_size": 0, "tp_size": -1, "pp_size": 0, "max_req_input_len": -5},
    ],
)
def test_what_a_server_does_not_say_is_unknown(answer: dict[str, Any]):
    assert parse_server_info(answer) == ServerInfo(None, None, None, None, None, None, None, None)


def test_ranks_and_backends_of_each_stage():
    info = parse_server_info(
        {"tp_size": 8, "dp_size": 4, "pp_size": 2, "ep_size": 8, "enable_dp_attention": True, "nnodes": 2}
        | {"attention_backend": "fa3", "decode_attention_backend": "flashmla", "speculative_num_draft_tokens": 4}
    )
    assert (info.tensor_parallel, info.data_parallel, info.pipeline_parallel, info.expert_parallel) == (8, 4, 2, 8)
    assert (info.dp_attention, info.nodes, info.draft_tokens) == (True, 2, 4)
    assert (info.backend(decode=True), info.backend(decode=False)) == ("flashmla", "fa3")


@pytest.mark.parametrize(
    ("answer", "graphs"),
    [
        ({}, None),
        ({"disable_cuda_graph": False}, True),
        ({"disable_cuda_graph": True}, False),
        ({"disable_cuda_graph": False, "disable_decode_cuda_graph": True}, False),
        # As resolved: graphs can be off for another reason than the flag.
        ({"disable_cuda_graph": False, "cuda_graph_config": {"decode": {"backend": "disabled"}}}, False),
        ({"disable_cuda_graph": False, "cuda_graph_config": {"decode": {"backend": "full"}}}, True),
        ({"disable_cuda_graph": False, "cuda_graph_config": None}, True),
    ],
)
def test_whether_decode_runs_from_cuda_graphs(answer: dict[str, Any], graphs: bool | None):
    assert parse_server_info(answer).cuda_graphs is graphs


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
