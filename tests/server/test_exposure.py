"""Whether a server copies its pool, from what it says: each condition, each thing that may be unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.gpu import gpu_named
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info, read_server_info
from mla_diag.diagnose.step_spans import Stage
from mla_diag.server.exposure import Exposure, expose
from mla_diag.server.model_config import parse_model_config
from tests.server.models import GLM78, LLAMA

H200 = gpu_named("NVIDIA H200")
MODEL = parse_model_config(GLM78)


@pytest.fixture
def server(recordings: Path) -> ServerInfo:
    return read_server_info(recordings / "base.server_info.json")


def verdicts(exposure: Exposure) -> dict[Stage, bool | None]:
    return {stage.stage: stage.copies for stage in exposure.stages}


def test_the_recorded_server_copies_its_pool(server: ServerInfo):
    exposure = expose(server, MODEL, gpu=H200)
    assert exposure.exposed is True
    assert [stage.site for stage in exposure.stages] == [
        "sglang/srt/layers/attention/flashinfer_mla_backend.py:660 forward_decode",
        "sglang/srt/layers/attention/flashinfer_mla_backend.py:598 forward_extend",
    ]


@pytest.mark.parametrize(
    "recording",
    ["base-graph-decode.trace.json.gz", "base-eager-decode-stack.trace.json.gz", "fa3-graph-decode.trace.json.gz"],
)
def test_its_predicted_cost_is_the_measured_one(server: ServerInfo, recordings: Path, recording: str):
    backend = "fa3" if recording.startswith("fa3") else "flashinfer"
    (measured,) = [
        finding
        for finding in explain(recordings / recording, sources=False).findings
        if finding.kind == "whole-pool-copy"
    ]
    predicted = expose(replace(server, attention_backend=backend), MODEL, gpu=H200).copy
    assert predicted is not None
    assert predicted.ms_per_step == pytest.approx(measured.cost_ms_per_step, rel=0.15)
    assert predicted.bytes_per_step == 495_553 * 576 * 3 * 78


def test_layers_and_attention_are_read_off_the_pool_without_a_config(server: ServerInfo):
    """The scheduler says how many bytes its pool has, and that it caches chunked prefixes, as only MLA does."""
    exposure = expose(server, gpu=H200)
    assert exposure.exposed is True
    assert (exposure.facts["layers"].value, exposure.facts["mla"].value) == (78, True)


def test_layers_of_a_model_that_does_not_fit_the_pool_stay_unknown(server: ServerInfo):
    exposure = expose(replace(server, pool_bytes=int(20.5 * 495_553 * 576)), gpu=H200)
    assert exposure.facts["layers"].value is None
    assert exposure.copy is not None
    assert exposure.copy.ms_per_step is None
    assert exposure.copy.ms_per_layer == pytest.approx(0.856, rel=0.01)
    assert any("how many layers" in unknown for unknown in exposure.unknown)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "not FP8"),
        ({"attention_backend": "triton"}, "reads the FP8 pool as it is"),
        ({"attention_backend": "flashmla"}, "reads the FP8 pool as it is"),
        ({"version": "0.4.6.post4"}, "this release has no cast"),
        ({"version": "0.4.8", "attention_backend": "fa3"}, "this release has no cast"),
    ],
)
def test_a_server_that_lacks_one_condition_is_not_exposed(server: ServerInfo, change: dict[str, Any], why: str):
    exposure = expose(replace(server, **change), MODEL, gpu=H200)
    assert exposure.exposed is False
    assert all(why in stage.why for stage in exposure.stages)
    assert exposure.copy is None
    assert exposure.unknown == []
    assert exposure.remedies == ["nothing: this server does not copy its pool"]


@pytest.mark.parametrize("version", ["0.4.6.post5", "0.4.8.post1", "0.5.1.post2", "0.5.23", "0.0.0.dev0", None])
def test_every_release_that_casts_is_exposed(server: ServerInfo, version: str | None):
    assert expose(replace(server, version=version), MODEL, gpu=H200).exposed is True


@pytest.mark.parametrize("version", ["0.6.0", "0.0.0.dev0"])
def test_a_release_that_nobody_has_read_is_said(server: ServerInfo, version: str):
    exposure = expose(replace(server, version=version), MODEL, gpu=H200)
    assert any(f"{version} still casts" in unknown for unknown in exposure.unknown)


def test_a_model_that_is_not_mla_is_not_exposed(server: ServerInfo):
    assert expose(server, parse_model_config(LLAMA)).exposed is False
    without = replace(server, chunked_prefix_cache=False)
    assert expose(without, architecture="LlamaForCausalLM").exposed is False


def test_stages_are_judged_by_their_own_backends(server: ServerInfo):
    split = replace(server, decode_backend="flashmla", prefill_backend="fa3")
    assert verdicts(expose(split, MODEL, gpu=H200)) == {Stage.DECODE: False, Stage.PREFILL: True}


@pytest.mark.parametrize(("gpu", "copies"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA B200", True), ("A100", False)])
def test_a_backend_that_nobody_chose_is_sglangs_default(server: ServerInfo, gpu: str, copies: bool):
    exposure = expose(replace(server, attention_backend=None), MODEL, gpu=gpu_named(gpu))
    assert exposure.exposed is copies


def test_auto_follows_the_checkpoint(server: ServerInfo):
    auto = replace(server, kv_cache_dtype="auto", pool_bytes=None)
    fp8 = parse_model_config(GLM78 | {"quantization_config": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}})
    assert expose(auto, MODEL, gpu=H200).exposed is False
    assert expose(auto, fp8, gpu=H200).exposed is True
    assert expose(auto, gpu=H200).exposed is None


def test_auto_is_told_by_the_bytes_of_the_pool(server: ServerInfo):
    auto = replace(server, kv_cache_dtype="auto")
    assert expose(auto, MODEL, gpu=H200).exposed is True
    assert expose(replace(auto, pool_bytes=2 * (auto.pool_bytes or 0)), MODEL, gpu=H200).exposed is False


def test_pipeline_stages_hold_their_share_of_the_layers(server: ServerInfo):
    """A step goes through every stage, so it pays for all layers, whatever one rank's pool holds."""
    half = replace(server, pipeline_parallel=2, pool_bytes=39 * 495_553 * 576)
    assert expose(half, gpu=H200).facts["layers"].value == 78
    assert expose(replace(half, kv_cache_dtype="auto"), MODEL, gpu=H200).exposed is True


def test_a_server_that_says_nothing_is_unknown_and_not_harmless():
    exposure = expose(parse_server_info({}))
    assert exposure.exposed is None
    assert any("--model-config" in unknown for unknown in exposure.unknown)


def test_a_card_that_was_not_measured_is_said(server: ServerInfo):
    a_fifth = expose(server, MODEL, gpu=gpu_named("NVIDIA H100 80GB HBM3")).copy
    unknown = expose(server, MODEL).copy
    gh200 = expose(server, MODEL, gpu=gpu_named("NVIDIA GH200 480GB")).copy
    assert a_fifth is not None
    assert unknown is not None
    assert gh200 is not None
    assert a_fifth.bytes_per_second == pytest.approx(0.67e12)
    assert "a fifth" in a_fifth.rate_source
    assert "--gpu" in unknown.rate_source
    assert "a fifth" in gh200.rate_source
