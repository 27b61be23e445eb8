"""A path that the system refuses, in any option that takes one, is one line and the documented status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECORDING, ANSWER = "base-graph-decode.trace.json.gz", "base.server_info.json"
TOO_LONG = "x" * 300
# Each option that takes a path, and the status where the path at PATH cannot be used.
OPTIONS = [
    ("explain PATH", 3),
    ("explain PATH*", 3),
    (f"explain {RECORDING} -o PATH", 2),
    (f"explain {RECORDING} --server-info PATH", 3),
    (f"explain {RECORDING} --mapping PATH", 3),
    (f"compare PATH {RECORDING}", 3),
    (f"compare {RECORDING} PATH", 3),
    (f"compare {RECORDING} {RECORDING} -o PATH", 2),
    ("doctor --server-info PATH", 3),
    (f"doctor --server-info {ANSWER} --model-config PATH", 3),
    ("doctor --url http://127.0.0.1:1 --ca-file PATH", 2),
    ("fix --sglang PATH", 2),
    ("bench kernel --from PATH", 3),
    ("bench server --url http://127.0.0.1:1 --json PATH", 2),
    ("bench server --serve true --no-fix --out PATH", 2),
    ("bench server --serve true --sglang PATH", 2),
]


def run(command: str, path: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [word.replace("PATH", path) for word in command.split()]
    package = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "mla_diag", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": package, "COLUMNS": "300"},
    )


@pytest.fixture
def folder(recordings: Path, tmp_path: Path) -> Path:
    for name in (RECORDING, ANSWER):
        shutil.copy(recordings / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("options", ["", " --format json", " -o report.txt", " --format json -o report.txt"])
def test_a_name_that_is_no_text(folder: Path, options: str):
    """Linux has names of any bytes; Python holds those that are no UTF-8 as surrogates, which no encoding takes."""
    name = os.fsdecode(b"of\xfftoday.json.gz")
    (folder / RECORDING).rename(folder / name)
    result = run(f"explain PATH{options}", name, folder)
    assert (result.returncode, result.stderr) == (0, "")
    said = (folder / "report.txt").read_text() if "-o" in options else result.stdout
    path = json.loads(said)["traces"][0]["path"] if "json" in options else said.splitlines()[0]
    assert path.startswith(r"of\udcfftoday.json.gz")


@pytest.mark.parametrize(("command", "status"), OPTIONS)
def test_a_name_that_is_too_long(folder: Path, command: str, status: int):
    result = run(command, TOO_LONG, folder)
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("mla-diag: ")
