"""`mla-diag profile` against a real SGLang server on this machine's CPU: its protocol, its profiler, its faults.

The server needs a venv with SGLang (LAB_VENV, else where the lab's build leaves one). Its traces hold no device work,
so what is shown here is that they are taken, whole, and that the server is left as it was.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_diag.bench.agreement import agree, record_logits
from mla_diag.bench.measure import Measured, Plan, Row, measure_rows
from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.server.client import Client
from tests.commands.invoke import run_process

pytestmark = pytest.mark.slow

_START_SECONDS = 420


class CpuServer:
    """The server of the lab, in a process group of its own so that all of it can be ended."""

    def __init__(self, script: Path, venv: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        environment = os.environ | {"LAB_VENV": str(venv), "LAB_DIR": str(folder)}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            ["bash", str(script), str(self.port)],
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while "fired up" not in self.log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(1)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def generate(self, tokens: int) -> None:
        """A request of somebody else's."""
        with Client(self.url) as client:
            client.generate(
                {"input_ids": [[5] * 20], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
            )


def lab_server(shared_traces: Path) -> tuple[Path, Path]:
    """The script that serves and the venv that it needs."""
    script = shared_traces.parent / "lab" / "cpu_server.sh"
    venv = Path(os.environ.get("LAB_VENV", "/tmp/lab-build/venv"))
    if not script.is_file() or not (venv / "bin/python").exists():
        pytest.skip(f"no SGLang to run: {script} and a venv at {venv} (LAB_VENV) are needed")
    return script, venv


@pytest.fixture(scope="module")
def server(shared_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    script, venv = lab_server(shared_traces)
    started = CpuServer(script, venv, tmp_path_factory.mktemp("lab"))
    try:
        started.wait()
        yield started
    finally:
        started.kill()


def command(server: CpuServer, out: Path, *options: str) -> list[str]:
    return ["profile", "--url", server.url, "--out", str(out), "--input-len", "200", *options]


def begin(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "mla_diag", *arguments]
    given = os.environ | environment
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)


def steps(trace: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = (re.match(r"step\[(\w+)", str(event.get("name"))) for event in events)
    return [span[1] for span in spans if span]


def until_profiling(server: CpuServer, times: int) -> None:
    deadline = time.monotonic() + 60
    while server.log.read_text(errors="replace").count("Profiling starts") < times:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def profiles_so_far(server: CpuServer) -> int:
    return server.log.read_text(errors="replace").count("Profiling starts")


def assert_kept(result: subprocess.CompletedProcess[str], out: Path, stages: dict[str, int]) -> None:
    """Nothing to rank, said in one line, and whole traces kept."""
    said = [line for line in result.stderr.splitlines() if "the load runs" not in line]
    assert (result.returncode, len(said)) == (3, 1), result.stderr
    assert "this server runs on its CPU: they hold no device work" in result.stderr
    recorded = [step for trace in (out / "traces").iterdir() for step in steps(trace)]
    assert {stage: recorded.count(stage) for stage in stages} == stages
    assert "no device work" in (out / "report.txt").read_text()
    assert json.loads((out / "server_info.json").read_text())["version"]


def test_both_stages_in_one_command(server: CpuServer, tmp_path: Path):
    result = run_process(*command(server, tmp_path / "out"), timeout=120)
    assert_kept(result, tmp_path / "out", {"EXTEND": 1, "DECODE": 5})


def test_a_second_profile_is_refused_and_the_first_is_not_disturbed(server: CpuServer, tmp_path: Path):
    before = profiles_so_far(server)
    first = begin(command(server, tmp_path / "first", "--steps", "100", "--batch", "8"))
    until_profiling(server, before + 1)
    second = begin(command(server, tmp_path / "second"))
    # From another host there is no lock: the server's own refusal has to do.
    elsewhere = begin(command(server, tmp_path / "third", "--cached-len", "0"), TMPDIR=str(tmp_path))
    refused = second.communicate(timeout=60)[1], elsewhere.communicate(timeout=60)[1]
    assert (second.returncode, elsewhere.returncode) == (4, 4)
    assert "another `mla-diag profile` of it runs here" in refused[0]
    assert "refused to start its profiler" in refused[1]
    assert not (tmp_path / "second").exists()
    said = first.communicate(timeout=120)
    result = subprocess.CompletedProcess([], first.returncode, *said)
    assert_kept(result, tmp_path / "first", {"EXTEND": 1, "DECODE": 100})


def test_ctrl_c_stops_the_profiler_and_a_following_profile_works(server: CpuServer, tmp_path: Path):
    before = profiles_so_far(server)
    process = begin(command(server, tmp_path / "out", "--steps", "100"))
    until_profiling(server, before + 1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "written by then" in said
    server.generate(12)
    assert profiles_so_far(server) == before + 1  # nothing was left armed
    result = run_process(*command(server, tmp_path / "next"), timeout=120)
    assert_kept(result, tmp_path / "next", {"EXTEND": 1, "DECODE": 5})


def test_somebody_elses_traffic(server: CpuServer, tmp_path: Path):
    before = server.log.read_text(errors="replace").count("POST /start_profile")
    process = begin(command(server, tmp_path / "out", "--no-load", "--steps", "6"))
    while server.log.read_text(errors="replace").count("POST /start_profile") == before:
        assert process.poll() is None
        time.sleep(0.1)
    user = threading.Thread(target=server.generate, args=(30,))
    user.start()
    said = process.communicate(timeout=120)
    user.join()
    assert_kept(
        subprocess.CompletedProcess([], process.returncode, *said), tmp_path / "out", {"EXTEND": 1, "DECODE": 5}
    )


def test_two_passes_through_the_same_tokens_say_the_same(server: CpuServer):
    with Client(server.url) as client:
        info = parse_server_info(client.server_info())
        first, second = record_logits(client, info), record_logits(client, info)
        cached = record_logits(client, info, again=True)
    for stage in (first.decode, first.prefill):
        assert stage.sampled.shape == (512, 256)
        assert stage.sampled.std(axis=1).min() > 0
        assert len(set(stage.top)) > 1
    for found in (*agree(first, second), *agree(first, cached)):
        assert found.cosine > 0.999
        assert found.max_error < 1e-4  # the weights are a thousandth, so logits are too
    for found in agree(first, second):
        assert (found.max_error, found.top1) == (0.0, 1.0)


def test_a_prompt_of_which_one_token_is_cached_is_told_and_an_emptied_cache_has_none(
    server: CpuServer, monkeypatch: pytest.MonkeyPatch
):
    """Of fewer first tokens than there are, because this server's pool forgets by itself before those repeat."""
    firsts = range(10, 50)
    monkeypatch.setattr("mla_diag.bench.measure.TOKENS", firsts)
    monkeypatch.setattr("mla_diag.server.load._first_tokens", itertools.cycle(firsts))
    plan = Plan([Row(20, 5)], new_tokens=3, repeats=5, warmup=0)
    with Client(server.url) as client:
        info = parse_server_info(client.server_info())
        client.flush_cache()  # of what other tests sent
        (ours,) = measure_rows(client, info, plan, lambda _: None, ours=True)
        (others,) = measure_rows(client, info, plan, lambda _: None)
    assert isinstance(ours, Measured), ours
    assert isinstance(others, Measured), others
    assert ours.cached_prompts == 0
    assert others.cached_prompts == 4 * 20  # the first wave's tokens went when the cache was last emptied


def test_a_server_killed_under_a_capture_is_one_line(server: CpuServer, tmp_path: Path):
    """The last one: there is no server after it."""
    before = profiles_so_far(server)
    process = begin(command(server, tmp_path / "out", "--steps", "100"))
    until_profiling(server, before + 1)
    server.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 4
    lines = [line for line in said.splitlines() if "the load runs" not in line]
    assert [line for line in lines if "written by then" not in line] == lines[-1:]
    assert server.url in lines[-1]
