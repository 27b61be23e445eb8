"""`mla-diag bench server` with a real SGLang server on this machine's CPU, which it starts and ends itself.

It needs what tests/server/test_cpu_server.py needs. Its model is no MLA model, so nothing of it is to be fixed; where a
fix would go is a small SGLang of our own all the same.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from mla_diag.bench.server import ServerBench
from tests.bench.test_process import free_port, listening
from tests.commands.invoke import run_process
from tests.fix.conftest import contents, install
from tests.server.test_cpu_server import lab_server

pytestmark = pytest.mark.slow


def test_a_real_server_is_started_measured_and_ended(shared_traces: Path, tmp_path: Path):
    script, venv = lab_server(shared_traces)
    root, port, out, output = install(tmp_path / "site"), free_port(), tmp_path / "out", tmp_path / "bench.json"
    originals = contents(root)
    # The script's port stands first; given again, it is where mla-diag looks for it, and SGLang takes the last.
    line = (
        f"LAB_VENV={venv} LAB_DIR={tmp_path / 'lab'} PYTHONPATH= bash {shlex.quote(str(script))} {port} --port {port}"
    )
    result = run_process(
        *("bench", "server", "--serve", line, "--sglang", root, "--out", out, "--json", output),
        *("--shape", "1x200", "--shape", "4x200", "--shape", "1x5000", "--output-len", "17", "--repeats", "2"),
        timeout=480,
    )
    assert result.returncode == 0, result.stderr
    bench = msgspec.json.decode(output.read_bytes(), type=ServerBench)
    assert bench.before is not None
    assert [str(measured.row) for measured in bench.before.rows] == ["1x200", "4x200"]
    for measured in bench.before.rows:
        assert 0 < measured.tpot_ms.least <= measured.tpot_ms.median <= measured.tpot_ms.most
        assert measured.ttft_ms.median > measured.tpot_ms.median  # 200 tokens take longer than one
    assert "left out: this server takes prompts of 4,090 tokens at most" in result.stdout
    assert "does not copy its pool (the model is not MLA): nothing was fixed" in result.stdout
    assert "this server runs on its CPU: they hold no device work" in result.stdout
    assert list((out / "before/traces").iterdir())
    assert bench.after is None
    assert contents(root) == originals
    assert not listening(port)
