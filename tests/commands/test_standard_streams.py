"""Standard output and error that are closed, full, narrow or not read: never a traceback, never another status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BASE, NATIVE = (f"{{recordings}}/{name}-graph-decode.trace.json.gz" for name in ("base", "native"))
# Each way of printing, and the exit status: a report, JSON, help, a line, a report that exits with 1.
COMMANDS = {
    "explain": (f"explain {BASE}", 0),
    "explain --fail-on": (f"explain {BASE} --fail-on any", 1),
    "explain --format json": (f"explain {BASE} --format json", 0),
    "compare": (f"compare {BASE} {NATIVE}", 0),
    "doctor": ("doctor --server-info {recordings}/base.server_info.json", 1),
    "demo": ("demo", 0),
    "--help": ("--help", 0),
    "--version": ("--version", 0),
}


def shell(command: str, recordings: Path, streams: str) -> subprocess.CompletedProcess[str]:
    line = f"set -o pipefail; {sys.executable} -m mla_diag {command.format(recordings=recordings)} {streams}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away_changes_no_status(recordings: Path, name: str):
    command, status = COMMANDS[name]
    result = shell(command, recordings, "| head -c 1")
    assert result.returncode == status
    assert len(result.stdout) == 1
    assert len(result.stderr.splitlines()) == status  # what the status is for


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_behind_standard_output_is_one_line(recordings: Path, name: str):
    result = shell(COMMANDS[name][0], recordings, "> /dev/full")
    assert result.returncode == 2
    assert result.stderr == "mla-diag: standard output: cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_standard_output_is_silence(recordings: Path, name: str):
    command, status = COMMANDS[name]
    result = shell(command, recordings, ">&-")
    assert (result.returncode, len(result.stderr.splitlines())) == (status, status)


@pytest.mark.parametrize("streams", ["2> /dev/full", "2>&-"])
def test_without_a_standard_error_the_status_still_tells(recordings: Path, streams: str):
    result = shell("explain nowhere.json", recordings, streams)
    assert (result.returncode, result.stdout, result.stderr) == (3, "", "")


def test_what_an_encoding_cannot_say_is_replaced(recordings: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = shell("explain {recordings}/base-graph-decode.trace.json.gz", recordings, "")
    assert (result.returncode, result.stderr) == (0, "")
    assert r"NVIDIA H200 \xb7 rank 0" in result.stdout
