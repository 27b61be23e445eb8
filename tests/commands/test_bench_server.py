"""`mla-diag bench server` as its users run it: the whole story on servers of its own, and none left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_diag.bench.server import ServerBench
from mla_diag.commands import bench_server
from mla_diag.fix import patch
from mla_diag.fix.locate import find_installation
from mla_diag.fix.strategy import Strategy
from mla_diag.server.load import TOKENS
from tests.bench.test_process import free_port, listening
from tests.commands.invoke import Invoke
from tests.fix.conftest import CSR, contents, edit, install
from tests.server import stand_in
from tests.server.stand_in import INFO, StandIn

pytestmark = pytest.mark.usefixtures("_impatient")

QUICK = ("--shape", "1x100", "--output-len", "5", "--repeats", "2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small SGLang that can be fixed."""
    return install(tmp_path / "site")


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no server is left at."""
    chosen = free_port()
    yield chosen
    assert not listening(chosen)


def serving(root: Path, port: int, **attributes: Any) -> str:
    """A command line that serves, with the SGLang in `root`."""
    given = shlex.quote(json.dumps(attributes))
    where = f"PYTHONPATH={root.parent} {sys.executable} {stand_in.__file__}"
    return f"{where} --port {port} --sglang {root} {given}"


def story(recordings: Path) -> dict[str, Any]:
    """A server that a fix makes faster, as in the recordings."""
    before, after = recordings / "base-graph-decode.trace.json.gz", recordings / "native-graph-decode.trace.json.gz"
    return {
        "token_seconds": 0.04,
        "traces": {"TP-0": str(before)},
        "fixed": {"token_seconds": 0.004, "traces": {"TP-0": str(after)}},
    }


def read(path: Path) -> ServerBench:
    return msgspec.json.decode(path.read_bytes(), type=ServerBench)


def test_the_whole_story_in_one_command(run: Invoke, tmp_path: Path, root: Path, port: int, recordings: Path):
    originals = contents(root)
    out, output = tmp_path / "out", tmp_path / "bench.json"
    result = run(
        *("bench", "server", "--serve", serving(root, port, **story(recordings)), *QUICK, "--shape", "2x50"),
        *("--revert", "--out", out, "--json", output),
    )
    assert result.returncode == 0, result.stderr
    assert contents(root) == originals
    bench = read(output)
    assert bench.before is not None
    assert bench.after is not None
    assert [str(measured.row) for measured in bench.before.rows] == ["1x100", "2x50"]
    assert (bench.fixed, bench.strategy, bench.reverted) == (str(root), "auto", True)
    for gain in bench.gains:
        assert gain.tpot > 3
        assert gain.tokens_per_second > 2
    assert bench.comparison is not None
    (decode,) = bench.comparison.stages
    assert 10 < decode.speedup < 11
    for line in ("flashinfer, KV fp8_e4m3, a pool of 495,552 tokens", "before", "10.4 times as fast", "byte for byte"):
        assert line in result.stdout
    for when in ("before", "after"):
        assert "fired up" in (out / when / "server.log").read_text()
        assert (out / when / "report.json").exists()
        assert f"mla-diag: {when}: 1x100: first token after" in result.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fix_that_another_process_makes_or_takes_back_is_not_ours(
    run: Invoke, tmp_path: Path, root: Path, port: int, monkeypatch: pytest.MonkeyPatch, when: str
):
    """Figures of a server that was not what it was taken for were given without a word, and another's fix reverted."""
    visit, installation = bench_server._visit, find_installation(root)

    def meanwhile(command: Any, options: Any, bench: Any, out: Path, api_key: Any) -> Any:
        visited = visit(command, options, bench, out, api_key)
        if out.name == when:
            patch.apply(installation, Strategy.AUTO) if when == "before" else patch.revert(installation)
        return visited

    monkeypatch.setattr(bench_server, "_visit", meanwhile)
    line = serving(root, port, token_seconds=0.01)
    result = run(
        *("bench", "server", "--serve", line, *QUICK, "--no-profile", "--revert", "--out", tmp_path / "out"),
    )
    if when == "before":
        assert result.returncode == 1
        assert "another process fixed it while the server was measured" in result.stderr
        assert patch.is_fixed(installation, Strategy.AUTO)
    else:
        assert result.returncode == 0
        assert "another process took the fix back or changed it" in result.stdout


def test_a_model_config_is_looked_at_before_a_server_is_started(run: Invoke, tmp_path: Path, root: Path, port: int):
    result = run("bench", "server", "--serve", serving(root, port), *QUICK, "--model-config", tmp_path / "none")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"--model-config {tmp_path / 'none'}" in result.stderr


def test_without_revert_the_fix_stays_and_is_said(run: Invoke, tmp_path: Path, root: Path, port: int):
    line = serving(root, port, token_seconds=0.01)
    result = run("bench", "server", "--serve", line, *QUICK, "--no-profile", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert (root / ".mla-diag").is_dir()
    assert f"stays fixed; `mla-diag fix --revert --sglang {root}` ends that" in result.stdout
    assert not (tmp_path / "out/before/traces").exists()
    again = run("bench", "server", "--serve", line, *QUICK, "--out", tmp_path / "again", "--revert")
    assert again.returncode == 2
    assert "fixed already (strategy auto)" in again.stderr
    assert f"`mla-diag fix --revert --sglang {root}`" in again.stderr
    assert (root / ".mla-diag").is_dir()
    assert not (tmp_path / "again").exists()
    measured = run("bench", "server", "--serve", line, *QUICK, "--no-profile", "--no-fix", "--out", tmp_path / "third")
    assert measured.returncode == 0
    assert "measured" in measured.stdout


def test_a_server_that_does_not_copy_its_pool_is_measured_and_left_alone(
    run: Invoke, tmp_path: Path, root: Path, port: int
):
    line = serving(root, port, info=INFO | {"kv_cache_dtype": "bfloat16"})
    result = run("bench", "server", "--serve", line, *QUICK, "--no-profile", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "does not copy its pool (the pool is not FP8" in result.stdout
    assert "tpot ms" in result.stdout
    assert not (root / ".mla-diag").exists()
    assert not (tmp_path / "out/after").exists()


def test_an_sglang_without_casts_is_measured(run: Invoke, tmp_path: Path, root: Path, port: int):
    for path in (root / CSR).parent.glob("*_backend.py"):
        path.unlink()
    result = run(
        *("bench", "server", "--serve", serving(root, port), *QUICK, "--no-profile", "--out", tmp_path / "out")
    )
    assert result.returncode == 0, result.stderr
    assert "no cast of the whole KV pool that could be fixed" in result.stdout


def test_an_sglang_of_another_release_than_the_servers_is_noted(run: Invoke, tmp_path: Path, root: Path, port: int):
    line = serving(root, port, info=INFO | {"version": "0.5.11"})
    result = run("bench", "server", "--serve", line, *QUICK, "--no-profile", "--revert", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert f"the server says it is SGLang 0.5.11, and {root} is 0.5.17" in result.stdout


def test_a_fix_that_falls_back_to_the_cast_is_noted(run: Invoke, tmp_path: Path, root: Path, port: int):
    warning = "[12:00 TP0] mla-diag fix: casting the whole KV pool: no kernel for this card"
    line = serving(root, port, fixed={"says": [warning, warning]})
    result = run("bench", "server", "--serve", line, *QUICK, "--no-profile", "--revert", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    said = "note: after: the server's log: mla-diag fix: casting the whole KV pool: no kernel for this card"
    assert result.stdout.splitlines().count(said) == 1


def test_a_profile_that_fails_loses_no_measurement(run: Invoke, tmp_path: Path, root: Path, port: int):
    line = serving(root, port, answers={"start_profile": [500, "Internal Server Error"]})
    result = run("bench", "server", "--serve", line, *QUICK, "--out", tmp_path / "out", "--revert")
    assert result.returncode == 0, result.stderr
    assert "note: no profile before: " in result.stdout
    assert "note: no profile after: " in result.stdout
    assert "refused to start its profiler" in result.stdout
    assert "tpot ms" in result.stdout


def test_a_fixed_server_that_fails_loses_no_measurement_and_is_reverted(
    run: Invoke, tmp_path: Path, root: Path, port: int
):
    originals = contents(root)
    line = serving(root, port, fixed={"answers": {"generate": [500, "CUDA error: an illegal memory access"]}})
    result = run(
        *("bench", "server", "--serve", line, *QUICK, "--no-profile", "--out", tmp_path / "out", "--revert"),
        *("--json", tmp_path / "bench.json"),
    )
    assert result.returncode == 4
    assert result.stderr.splitlines()[-1].endswith("HTTP 500: CUDA error: an illegal memory access")
    assert contents(root) == originals
    assert "tpot ms" in result.stdout
    bench = read(tmp_path / "bench.json")
    assert bench.before is not None
    assert len(bench.before.rows) == 1
    assert bench.reverted


def test_unknown_code_is_refused_before_a_server_is_started(run: Invoke, tmp_path: Path, root: Path, port: int):
    edit(root, CSR, "        return o.view(-1", "        log(k_buf)\n        return o.view(-1")
    result = run("bench", "server", "--serve", serving(root, port), *QUICK, "--out", tmp_path / "out")
    assert result.returncode == 5
    assert "log() is given the pool" in result.stderr
    assert not (tmp_path / "out").exists()


def test_somebody_elses_server_is_measured_and_nothing_else(run: Invoke, tmp_path: Path):
    with StandIn(key="sk-1", token_seconds=0.01) as server:
        result = run(
            *("bench", "server", "--url", server.url, "--api-key", "sk-1", *QUICK, "--shape", "200x5000"),
            *("--json", tmp_path / "bench.json"),
        )
        assert {path for _, path, _, _ in server.requests} == {"/server_info", "/generate"}
    assert result.returncode == 0, result.stderr
    bench = read(tmp_path / "bench.json")
    assert (bench.command, bench.url, bench.after) == (None, server.url, None)
    assert "left out: takes 1,001,000 tokens of KV" in result.stdout
    assert "sk-1" not in result.stdout + (tmp_path / "bench.json").read_text()


def test_prompts_that_the_server_knew_in_part_are_said(run: Invoke, tmp_path: Path):
    """As of an earlier benchmark: one cached token is enough for another prefill kernel."""
    with StandIn(cached=set(TOKENS)) as server:
        result = run("bench", "server", "--url", server.url, *QUICK, "--json", tmp_path / "bench.json")
        assert server.asked("flush_cache") == []
    assert result.returncode == 0, result.stderr
    note = "1x100: the server had the beginning of 2 of 2 prompts in its prefix cache"
    assert note in " ".join(result.stdout.split())
    bench = read(tmp_path / "bench.json")
    assert bench.before is not None
    assert bench.before.rows[0].cached_prompts == 2
    assert bench.notes[0].endswith(f"`curl -X POST {server.url}/flush_cache` empties the cache for all its users")


def test_the_key_of_the_command_is_used_and_its_secrets_are_shown_nowhere(
    run: Invoke, tmp_path: Path, root: Path, port: int
):
    line = f"HF_TOKEN=hf-1 {serving(root, port)} --api-key sk-1"
    options = ("--no-fix", "--no-profile", "--out", tmp_path / "out", "--json", tmp_path / "bench.json")
    result = run("bench", "server", "--serve", line, *QUICK, *options)
    assert result.returncode == 0, result.stderr
    shown = result.stdout + result.stderr + (tmp_path / "bench.json").read_text()
    assert "HF_TOKEN=... " in shown
    assert "sk-1" not in shown
    assert "hf-1" not in shown


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, "give --serve, what starts a server, or --url"),
        (["--serve", "env", "--url", "x"], 2, "one of the two"),
        (["--url", "x", "--revert"], 2, "--url: nothing is fixed there"),
        (["--url", "127.0.0.1:1"], 4, "nothing answers there"),
        (["--url", "x", "--shape", "1k"], 2, "--shape 1k: not BATCHxCONTEXT"),
        (["--url", "x", "--strategy", "best"], 2, "--strategy best"),
        (["--url", "x", "--json", "/nonexistent/x"], 2, "there is no directory"),
        (["--url", "x", "--json", "/tmp"], 2, "/tmp: is a directory; name a file in it"),
        (["--serve", "no-such-program"], 2, "no-such-program: no such program"),
        (["--serve", "env --port 0"], 2, "--port 0: not a port"),
        (["--serve", f"{sys.executable} -c 1 --port 5", "--sglang", "/nonexistent"], 2, "no such directory"),
        (["--serve", f"{sys.executable} -I -c 1"], 2, "has no SGLang; name the one that the server runs with"),
    ],
)
def test_what_goes_wrong_is_one_line(run: Invoke, options: list[str], code: int, words: str):
    result = run("bench", "server", *options)
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (code, "")
    assert words in line


def test_rows_that_the_server_cannot_run_are_a_usage_error(run: Invoke):
    with StandIn() as server:
        result = run("bench", "server", "--url", server.url, "--shape", "200x5000")
    assert result.returncode == 2
    assert "can run none of the rows (200x5000: takes" in result.stderr.splitlines()[-1]


def test_a_server_that_dies_is_one_line(run: Invoke, tmp_path: Path, root: Path):
    line = f"{sys.executable} -c 'raise RuntimeError(\"no memory\")' --port {free_port()}"
    result = run("bench", "server", "--serve", line, "--sglang", root, "--out", tmp_path / "out")
    (said,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (4, "")
    assert "ended with status 1 before it answered: RuntimeError: no memory" in said
    assert str(tmp_path / "out/before/server.log") in said


def test_an_out_that_holds_another_benchmark_is_not_mixed_up(run: Invoke, tmp_path: Path, root: Path, port: int):
    (tmp_path / "out/before").mkdir(parents=True)
    (tmp_path / "out/before/server.log").touch()
    result = run("bench", "server", "--serve", serving(root, port), *QUICK, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "holds another benchmark" in result.stderr


def test_a_port_in_use_does_not_use_up_its_out(run: Invoke, tmp_path: Path, root: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("bench", "server", "--serve", serving(root, port), *QUICK, "--no-fix", "--no-profile")
        assert "is in use" in run(*command, "--out", tmp_path / "out").stderr
    assert run(*command, "--out", tmp_path / "out").returncode == 0


def hanging(line: str, tmp_path: Path, *before: str) -> subprocess.Popen[str]:
    """A benchmark whose fixed server has been asked for tokens and does not answer."""
    arguments = ["bench", "server", "--serve", line, *QUICK, "--no-profile", "--revert", "--out", str(tmp_path / "out")]
    whole = [*before, sys.executable, "-m", "mla_diag", *arguments]
    process = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "out/after/server.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "POST /generate" in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_server_and_takes_the_fix_back(
    tmp_path: Path, root: Path, port: int, number: signal.Signals, status: int
):
    originals = contents(root)
    process = hanging(serving(root, port, fixed={"hangs": ["generate"]}), tmp_path)
    os.kill(process.pid, number)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in said
    assert "tpot ms" in shown
    assert contents(root) == originals


def test_nohup_keeps_it_running_until_sigterm(tmp_path: Path, root: Path, port: int):
    originals = contents(root)
    process = hanging(serving(root, port, fixed={"hangs": ["generate"]}), tmp_path, "nohup")
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert contents(root) == originals


def test_results_that_cannot_be_written_are_shown(run: Invoke, tmp_path: Path):
    with StandIn() as server:
        result = run("bench", "server", "--url", server.url, *QUICK, "--json", "/dev/full")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "mla-diag: /dev/full: cannot be written: No space left on device"
    assert "tpot ms" in result.stdout
