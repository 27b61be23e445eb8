"""`mla-diag profile` as its users run it: what it leaves, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.invoke import Invoke
from tests.server.models import GLM78
from tests.server.stand_in import INFO, StandIn
from tests.sftp_server import user_of_sftp

pytestmark = pytest.mark.usefixtures("_impatient")

KEY = "sk-0123456789abcdef"
# Profiled by stage: a file a stage, as the recordings are.
BY_STAGE = INFO | {"version": "0.5.11"}


@pytest.fixture
def traces(recordings: Path) -> dict[str, Path]:
    """What a server that copies its pool in both stages would write."""
    return {
        "TP-0-EXTEND": recordings / "base-prefix-extend-stack.trace.json.gz",
        "TP-0-DECODE": recordings / "base-eager-decode-stack.trace.json.gz",
    }


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_whole_story_in_one_command(run: Invoke, tmp_path: Path, traces: dict[str, Path]):
    out, config = tmp_path / "out", tmp_path / "config.json"
    config.write_text(json.dumps(GLM78))
    with StandIn(info=dict(BY_STAGE), traces=traces, key=KEY) as server:
        result = run(
            *("profile", "--url", server.url, "--api-key", KEY, "--out", out, "--model-config", config, "--stacks"),
            *("--trace-root", tmp_path),
        )
        (request,) = server.asked("start_profile")
    assert (result.returncode, result.stderr) == (0, "")
    assert request["with_stack"] is True
    assert files(out) == ["report.json", "report.txt", "server_info.json", "traces"]
    assert len(files(out / "traces")) == 2
    report = json.loads((out / "report.json").read_text())
    copies = {finding["stage"]: finding for finding in report["findings"] if finding["kind"] == "whole-pool-copy"}
    assert copies["decode"]["cause"]["function"] == "forward_decode"
    assert copies["prefill"]["cause"]["function"] == "forward_extend"
    decode = next(stage for stage in report["stages"] if stage["stage"] == "decode")
    assert (report["floor"]["batch"], report["floor"]["context"]) == (1, 2000)
    assert report["gap"] == {
        "step_ms": decode["device_ms_per_step"],
        "measured": True,
        "wall_ms": decode["wall_ms_per_step"],
        "gap_ms": decode["device_ms_per_step"] - report["floor"]["ms"],
        "copy_ms": copies["decode"]["cost_ms_per_step"],
        "copy_by_flags_ms": pytest.approx(copies["decode"]["cost_ms_per_step"], rel=0.15),
        "trace": decode["trace"],
    }
    text = (out / "report.txt").read_text()
    for shown in (result.stdout, text):
        assert "recorded are 1 prefill step and 5 decode steps" in shown
        assert "flashinfer_mla_backend.py:616" in shown
        assert "floor       0.93 ms a decode step" in shown
        cost = copies["decode"]["cost_ms_per_step"]
        assert f"ms above the floor, {cost:.2f} of them the copy of the pool" in " ".join(shown.split())
    everything = result.stdout + "".join(
        file.read_text(errors="replace") for file in out.rglob("*") if file.is_file() and file.suffix != ".gz"
    )
    assert KEY not in everything
    assert "sk-of-the-server" not in everything
    # The server's own copies are gone.
    assert files(tmp_path) == ["config.json", "out"]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16"])
def test_a_measured_step_without_the_copy_says_that_the_server_is_fixed(
    run: Invoke, tmp_path: Path, recordings: Path, dtype: str
):
    """By its flags it copies, and doctor can say no more; the step that was measured disproves that."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GLM78))
    traces = {"TP-0-DECODE": recordings / "native-graph-decode.trace.json.gz"}
    with StandIn(info=BY_STAGE | {"kv_cache_dtype": dtype}, traces=traces) as server:
        options = ("--trace-root", tmp_path, "--out", tmp_path / "out", "--model-config", config)
        result = run("profile", "--url", server.url, "--stage", "decode", *options)
    gap = json.loads((tmp_path / "out/report.json").read_text())["gap"]
    shown = " ".join(result.stdout.split())
    assert gap["copy_ms"] == 0
    assert "ms above the floor, none of them a copy of the pool" in shown
    assert "takes at least" not in shown
    flags = "a server with these flags copies its pool for 66.8 ms a step, and no copy was measured"
    assert (f"{flags}: this SGLang was fixed" in shown) == (dtype == "fp8_e4m3")
    assert gap["copy_by_flags_ms"] == (pytest.approx(66.8, abs=0.1) if dtype == "fp8_e4m3" else None)


def test_releases_that_name_their_steps_are_recorded_into_one_file(
    run: Invoke, tmp_path: Path, traces: dict[str, Path]
):
    """By stage, 0.5.17 ends one profile and starts the next within one recorded function, and crashed of it."""
    with StandIn(traces={"TP-0": traces["TP-0-DECODE"]}) as server:
        server.info |= {"chunked_prefill_size": 512}
        result = run(
            *("profile", "--url", server.url, "--trace-root", tmp_path, "--out", tmp_path / "out"),
            *("--input-len", "2000", "--cached-len", "1000", "--batch", "2"),
        )
        (request,) = server.asked("start_profile")
    assert result.returncode == 0
    assert (request["start_step"], request["num_steps"]) == (1, 4 + 5)  # 2,000 fresh tokens in chunks of 512
    assert "profile_by_stage" not in request
    assert "recorded are 4 prefill steps and 5 decode steps" in result.stdout


def test_one_stage_can_be_asked_for_and_failed_on(run: Invoke, tmp_path: Path, traces: dict[str, Path]):
    with StandIn(info=dict(BY_STAGE), traces=traces) as server:
        result = run(
            *("profile", "--url", server.url, "--stage", "decode", "--trace-root", tmp_path, "--out", tmp_path / "out"),
            *("--fail-on", "whole-pool-copy:10%"),
        )
    assert result.returncode == 1
    assert result.stderr.startswith("mla-diag: --fail-on whole-pool-copy")
    assert {stage["stage"] for stage in json.loads((tmp_path / "out/report.json").read_text())["stages"]} == {"decode"}


def test_graphs_come_with_how_to_see_into_them(run: Invoke, tmp_path: Path, traces: dict[str, Path], recordings: Path):
    traces["TP-0-DECODE"] = recordings / "base-graph-decode.trace.json.gz"
    arguments = ["--stage", "decode", "--trace-root", tmp_path]
    with StandIn(info=dict(BY_STAGE), traces=traces) as server:
        plain = run("profile", "--url", server.url, *arguments, "--out", tmp_path / "a")
        mapping = recordings / "base-eager-decode-stack.trace.json.gz"
        mapped = run("profile", "--url", server.url, *arguments, "--out", tmp_path / "b", "--mapping", mapping)
    assert f"--disable-cuda-graph: mla-diag profile --url {server.url} --stage decode --stacks" in plain.stdout
    assert "--enable-profile-cuda-graph" in plain.stdout
    command = next(line for line in plain.stdout.splitlines() if "--mapping THAT_TRACE" in line)
    explained = run(*command.replace("THAT_TRACE", str(mapping)).split()[1:])
    assert explained.returncode == 0
    assert "forward_decode" in explained.stdout
    assert "--enable-profile-cuda-graph" not in mapped.stdout
    assert "forward_decode" in mapped.stdout


def test_commands_to_run_next_bear_a_blank_in_a_path(
    run: Invoke, tmp_path: Path, traces: dict[str, Path], recordings: Path
):
    traces["TP-0-DECODE"] = recordings / "base-graph-decode.trace.json.gz"
    with StandIn(info=dict(BY_STAGE), traces=traces) as server:
        options = ("--stage", "decode", "--trace-root", tmp_path, "--out", tmp_path / "of today")
        result = run("profile", "--url", server.url, *options)
    command = next(line for line in result.stdout.splitlines() if "--mapping THAT_TRACE" in line)
    mapping = recordings / "base-eager-decode-stack.trace.json.gz"
    assert run(*shlex.split(command.replace("THAT_TRACE", str(mapping)))[1:]).returncode == 0


def test_what_cuda_graphs_hide_is_said_before_it_is_recorded(run: Invoke, tmp_path: Path, traces: dict[str, Path]):
    arguments = ["--trace-root", tmp_path, "--stacks"]
    with StandIn(info=BY_STAGE | {"disable_cuda_graph": False}, traces=traces) as server:
        graphs = run("profile", "--url", server.url, *arguments, "--out", tmp_path / "a")
        prefill = run("profile", "--url", server.url, *arguments, "--out", tmp_path / "b", "--stage", "prefill")
    assert "  graphs   on: decode steps come without ops, shapes and stacks" in graphs.stdout
    assert "  graphs   " not in prefill.stdout


def test_a_server_without_cuda_graphs_names_what_one_with_them_replays(
    run: Invoke, tmp_path: Path, traces: dict[str, Path]
):
    with StandIn(info=BY_STAGE | {"disable_cuda_graph": True}, traces=traces) as server:
        result = run("profile", "--url", server.url, "--trace-root", tmp_path, "--out", tmp_path / "out")
    assert f"mla-diag profile --url {server.url} --stage decode --mapping {tmp_path}/out/traces/NAME" in result.stdout


def test_missing_ranks_are_named(run: Invoke, tmp_path: Path, traces: dict[str, Path]):
    with StandIn(info=dict(BY_STAGE), traces=traces) as server:
        server.info |= {"tp_size": 2}
        result = run("profile", "--url", server.url, "--trace-root", tmp_path, "--out", tmp_path / "out")
    assert result.returncode == 0
    assert "note: no decode trace of TP-1 (1 of 2 ranks)" in result.stdout


def test_traces_out_of_reach_come_with_the_command_to_run_there(run: Invoke, tmp_path: Path, traces: dict[str, Path]):
    """A container's /tmp is not this host's: here the server writes elsewhere than where it is looked for."""
    (tmp_path / "here").mkdir()
    out = tmp_path / "out"
    with StandIn(info=dict(BY_STAGE), traces=traces) as server:
        root = f"{tmp_path}/container={tmp_path}/here"
        result = run("profile", "--url", server.url, "--trace-root", root, "--out", out)
    assert result.returncode == 4
    first, second = result.stderr.splitlines()
    assert "a container has a disk of its own" in first
    assert f"mla-diag explain {tmp_path}/container/mla-diag-" in second
    assert str(out / "server_info.json") in second


def test_traces_of_a_server_on_another_host_come_over_sftp(
    run: Invoke, tmp_path: Path, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    root, out = tmp_path / "there", tmp_path / "out"
    (root / "traces").mkdir(parents=True)
    with (
        StandIn(info=dict(BY_STAGE), traces=traces) as server,
        user_of_sftp(root, tmp_path / "home", monkeypatch) as sftp,
    ):
        where = f"{root}/traces={sftp.url('/traces')}"
        result = run("profile", "--url", server.url, "--trace-root", where, "--out", out)
        (request,) = server.asked("start_profile")
    assert (result.returncode, result.stderr) == (0, "")
    assert request["output_dir"].startswith(f"{root}/traces/mla-diag-")
    assert len(files(out / "traces")) == 2
    assert {stage["stage"] for stage in json.loads((out / "report.json").read_text())["stages"]} == {
        "decode",
        "prefill",
    }
    assert [file.read_bytes() for file in sorted((out / "traces").iterdir())] == [
        traces[name].read_bytes() for name in ("TP-0-DECODE", "TP-0-EXTEND")
    ]


@pytest.mark.parametrize(
    ("path", "key", "words"),
    [
        ("/elsewhere", True, "there is no such directory; check the path"),
        ("/traces", False, "cannot be reached (No authentication methods available); check the user in the URL"),
    ],
)
def test_another_host_is_tried_before_the_server_is_profiled(
    run: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, key: bool, words: str
):
    (tmp_path / "there/traces").mkdir(parents=True)
    with StandIn() as server, user_of_sftp(tmp_path / "there", tmp_path / "home", monkeypatch) as sftp:
        if not key:
            (tmp_path / "home/.ssh/id_ed25519").unlink()
        result = run("profile", "--url", server.url, "--trace-root", sftp.url(path), "--out", tmp_path / "out")
        assert server.asked("start_profile") == []
    (line,) = result.stderr.splitlines()
    assert (result.returncode, line.startswith(f"mla-diag: --trace-root {sftp.url(path)}: ")) == (2, True)
    assert words in line


@pytest.mark.parametrize(
    ("behaviour", "options", "code", "words"),
    [
        ({"answers": {"server_info": (404, "")}}, [], 4, "neither /server_info nor"),
        ({"answers": {"start_profile": (500, "Internal Server Error")}}, [], 4, "refused to start its profiler"),
        ({"answers": {"generate": (500, "boom")}}, [], 4, "HTTP 500: boom"),
        ({"dies_in": "generate"}, [], 4, "the connection broke"),
        ({"key": KEY}, ["--api-key", "wrong"], 4, "refuses this API key"),
        ({}, ["--batch", "1000"], 2, "this server's pool has 495,552"),
        ({}, ["--stage", "decoding"], 2, "--stage decoding"),
        ({"info": INFO | {"version": "0.4.9"}}, ["--no-load"], 2, "--no-load: SGLang 0.4.9 cannot profile from a"),
        ({}, ["--trace-root", "/nonexistent"], 2, "no such directory"),
        ({}, ["--out", "/dev/null/x"], 2, "cannot be made"),
        ({}, ["--fail-on", "nothing"], 2, "--fail-on nothing"),
        ({}, ["--model-config", "/nonexistent"], 3, "check --model-config"),
    ],
)
def test_what_goes_wrong_is_one_line(
    run: Invoke, tmp_path: Path, behaviour: dict[str, object], options: list[str], code: int, words: str
):
    with StandIn(**behaviour) as server:
        result = run("profile", "--url", server.url, "--out", tmp_path / "out", "--trace-root", tmp_path, *options)
    (line,) = result.stderr.splitlines()
    assert result.returncode == code
    assert words in line
    assert "wrong" not in line


def test_help_can_be_shown(run: Invoke):
    """Its texts are markup to typer: a bracket in one of them was an error once."""
    for command in ("profile", "doctor"):
        result = run(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "--api-key" in result.stdout


def test_an_out_that_holds_another_profile_is_not_mixed_up(run: Invoke, tmp_path: Path):
    (tmp_path / "out/traces").mkdir(parents=True)
    (tmp_path / "out/traces/1-TP-0.trace.json.gz").touch()
    with StandIn() as server:
        result = run("profile", "--url", server.url, "--out", tmp_path / "out", "--trace-root", tmp_path)
        assert server.asked("start_profile") == []
    assert result.returncode == 2
    assert "another profile" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_profiler_and_keeps_what_was_written(
    tmp_path: Path, traces: dict[str, Path], number: signal.Signals, status: int
):
    with StandIn(info=dict(BY_STAGE), traces={"TP-0-EXTEND": traces["TP-0-EXTEND"]}, lingers=True) as server:
        command = [sys.executable, "-m", "mla_diag", "profile", "--url", server.url]
        places = ["--out", str(tmp_path / "out"), "--trace-root", str(tmp_path)]
        process = subprocess.Popen([*command, *places], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("mla-diag-*/*.gz")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == status
        assert server.asked("stop_profile")
        assert server.asked("start_profile")[-1]["start_step"] > 1 << 32
        assert server.asked("abort_request")
    assert "Traceback" not in said
    assert "written by then: 1 trace" in said
    assert len(files(tmp_path / "out/traces")) == 1
