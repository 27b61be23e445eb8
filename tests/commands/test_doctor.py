"""`mla-diag doctor` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.invoke import Invoke
from tests.server.models import GLM78
from tests.server.stand_in import INFO, StandIn


@pytest.fixture
def glm78(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM78))
    return path


def test_a_saved_answer_of_a_server_that_copies(run: Invoke, recordings: Path, glm78: Path):
    saved = recordings / "base.server_info.json"
    result = run("doctor", "--server-info", saved, "--model-config", glm78, "--gpu", "NVIDIA H200")
    assert result.returncode == 1
    assert result.stdout.startswith("EXPOSED: this server copies its whole KV pool in every layer, 66.8 ms a step")
    assert "floor       0.93 ms a decode step" in result.stdout
    assert "99% of it the copy" in result.stdout
    assert result.stderr == "mla-diag: this server copies its whole KV pool in decode and prefill steps\n"


def test_json(run: Invoke, recordings: Path):
    result = run("doctor", "--server-info", recordings / "base.server_info.json", "--format", "json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["exposed"], report["schema_version"]) == (1, True, 1)
    assert report["copy"]["bytes_per_step"] == 495_553 * 576 * 3 * 78
    assert report["facts"]["layers"]["value"] == 78
    assert (report["floor"], report["gap"]) == (None, None)  # without the model's config


def test_json_has_the_gap_with_its_inputs(run: Invoke, recordings: Path, glm78: Path):
    saved = recordings / "base.server_info.json"
    options = ("--model-config", glm78, "--gpu", "NVIDIA H200", "--batch", "2", "--format", "json")
    report = json.loads(run("doctor", "--server-info", saved, *options).stdout)
    floor, gap, copy = report["floor"], report["gap"], report["copy"]
    assert floor["ms"] == pytest.approx((floor["weight_bytes"] + floor["kv_bytes"]) / floor["bandwidth"] * 1e3)
    assert (floor["batch"], floor["context"], floor["bandwidth"]) == (2, 2000, 4.8e12)
    assert gap["step_ms"] == pytest.approx(floor["ms"] + copy["ms_per_step"])
    assert (gap["gap_ms"], gap["copy_ms"]) == (copy["ms_per_step"], copy["ms_per_step"])
    assert (gap["measured"], gap["wall_ms"], gap["trace"]) == (False, None, None)


def test_no_gap_is_predicted_of_decode_where_only_prefill_copies(run: Invoke, tmp_path: Path, glm78: Path):
    answer = INFO | {"attention_backend": None, "decode_attention_backend": "flashmla", "internal_states": []}
    saved = tmp_path / "info.json"
    saved.write_text(json.dumps(answer | {"prefill_attention_backend": "fa3"}))
    result = run("doctor", "--server-info", saved, "--model-config", glm78, "--gpu", "H200", "--format", "json")
    report = json.loads(result.stdout)
    assert [stage["copies"] for stage in report["stages"]] == [False, True]
    assert report["copy"] is not None
    assert report["gap"] is None


def test_a_live_server_is_asked_and_neither_loaded_nor_profiled(run: Invoke, glm78: Path):
    with StandIn() as server:
        result = run("doctor", "--url", server.url, "--model-config", glm78)
        assert (result.returncode, result.stdout.split(":")[0]) == (1, "EXPOSED")
        assert {method for method, *_ in server.requests} == {"GET"}
        server.info |= {"kv_cache_dtype": "bf16"}
        result = run("doctor", "--url", server.url)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("NOT EXPOSED")


def test_a_live_server_says_its_card_and_its_model(run: Invoke):
    with StandIn() as server:
        server.info |= {"internal_states": []}
        server.answers["model_info"] = (200, '{"architectures": ["DeepseekV3ForCausalLM"]}')
        server.answers["v1/loads"] = (200, '{"accelerator": "NVIDIA H100 80GB HBM3"}')
        result = run("doctor", "--url", server.url, "--format", "json")
        report = json.loads(result.stdout)
        assert report["facts"]["mla"]["value"] is True
        assert report["facts"]["gpu"]["value"] == "NVIDIA H100 80GB HBM3"


def test_the_key_comes_from_the_environment_and_is_not_shown(run: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_DIAG_API_KEY", "sk-0123456789abcdef")
    with StandIn(key="sk-0123456789abcdef") as server:
        result = run("doctor", "--url", server.url)
        assert result.returncode == 1
        assert "sk-" not in result.stdout + result.stderr
    assert "sk-" not in run("doctor", "--help").stdout


def test_a_server_that_says_too_little_is_not_taken_for_harmless(run: Invoke, tmp_path: Path):
    answer = tmp_path / "info.json"
    answer.write_text(json.dumps({"version": "0.5.17", "kv_cache_dtype": "auto", "attention_backend": "fa3"}))
    result = run("doctor", "--server-info", answer)
    assert result.returncode == 2
    assert result.stdout.startswith("UNKNOWN")
    assert "--model-config" in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, "--url, or its saved answer"),
        (["--url", "x:1", "--server-info", "y"], 2, "one of the two"),
        (["--server-info", "/nonexistent"], 3, "cannot be read"),
        (["--url", "127.0.0.1:1"], 4, "nothing answers there"),
    ],
)
def test_what_is_wrong_is_one_line(run: Invoke, options: list[str], code: int, words: str):
    result = run("doctor", *options)
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (code, "")
    assert words in line


@pytest.mark.parametrize(("columns", "widest"), [("80", 80), ("200", 120)])
def test_lines_fit_a_narrow_terminal(
    run: Invoke, recordings: Path, glm78: Path, monkeypatch: pytest.MonkeyPatch, columns: str, widest: int
):
    monkeypatch.setenv("COLUMNS", columns)
    result = run("doctor", "--server-info", recordings / "base.server_info.json", "--model-config", glm78)
    lines = [line for line in result.stdout.splitlines() if " " in line.strip()]  # a path is not broken
    assert widest - 10 < max(map(len, lines)) <= widest


def test_the_stand_in_answers_as_the_recorded_server_does(recordings: Path):
    """So that what these tests show holds for the real one."""
    recorded = json.loads((recordings / "base.server_info.json").read_text())
    for name in ("kv_cache_dtype", "attention_backend", "max_total_num_tokens", "page_size", "version", "device"):
        assert INFO[name] == recorded[name]
