"""The floor of a decode step, against counts that others have published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_diag.diagnose.gap import Floor
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from mla_diag.server.floor import floor_of_decode
from mla_diag.server.model_config import parse_model_config
from tests.server.models import DEEPSEEK_V3, GLM78, LLAMA

ONE_RANK = parse_server_info({"tp_size": 1})


def floor(config: dict[str, object], server: ServerInfo = ONE_RANK, **load: int) -> Floor:
    found = floor_of_decode(
        parse_model_config(config),
        server,
        gpu_named("NVIDIA H200"),
        kv_bytes=1,
        **({"batch": 1, "context": 2000} | load),
    )
    assert found is not None
    return found


def test_a_token_of_deepseek_v3_touches_37_billion_parameters():
    """Its report says 37 B; of them the input embedding's 0.9 B are one row here, and FP8 weights take a byte each."""
    head = 7168 * 129_280
    parameters = floor(DEEPSEEK_V3).weight_bytes - head  # the output head is BF16
    assert parameters == pytest.approx(37e9 - head, rel=0.02)


def test_the_lab_model_on_one_card():
    found = floor(GLM78)
    assert found.weight_bytes == 2 * (78 * (27_918_336) + 2048 * 4096)
    assert found.kv_bytes == 2000 * 576 * 78
    assert found.ms == pytest.approx((found.weight_bytes + found.kv_bytes) / 4.8e12 * 1e3)
    assert found.ms < 5.29  # the time per token that its BF16 pool was measured to take


def test_kv_grows_with_batch_and_context():
    assert floor(GLM78, batch=16, context=8000).kv_bytes == 64 * floor(GLM78).kv_bytes


def test_a_large_batch_touches_every_expert_once():
    one, many = floor(DEEPSEEK_V3), floor(DEEPSEEK_V3, batch=4096)
    assert one.experts_read == pytest.approx(8)
    assert many.experts_read == pytest.approx(256)


def test_ranks_share_what_tensor_parallelism_splits():
    whole = floor(GLM78)
    split = floor(GLM78, replace(ONE_RANK, tensor_parallel=8))
    down = 78 * 2 * (2048 * 1536 + 2048 * 576)  # the down projections are on every rank
    assert split.weight_bytes == pytest.approx(down + (whole.weight_bytes - down) / 8)


def test_attention_is_whole_on_every_rank_of_dp_attention():
    server = replace(ONE_RANK, tensor_parallel=8, data_parallel=8, dp_attention=True)
    assert floor(GLM78, server).weight_bytes > floor(GLM78, replace(server, dp_attention=False)).weight_bytes


@pytest.mark.parametrize("config", [LLAMA, GLM78 | {"num_attention_heads": None}])
def test_no_floor_is_made_up(config: dict[str, object]):
    model = parse_model_config(config)
    assert floor_of_decode(model, ONE_RANK, gpu_named("NVIDIA H200"), kv_bytes=1, batch=1, context=1) is None


def test_no_floor_on_a_card_whose_bandwidth_is_unknown():
    model = parse_model_config(GLM78)
    assert floor_of_decode(model, ONE_RANK, gpu_named("Some GPU"), kv_bytes=1, batch=1, context=1) is None
