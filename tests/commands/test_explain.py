"""`mla-diag explain` as its users run it: output, exit codes, one line for whatever is wrong."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.invoke import Invoke


def test_json_to_standard_output(run: Invoke, recordings: Path):
    result = run("explain", recordings / "base-graph-decode.trace.json.gz", "--format", "json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["stages"][0]["steps"] == 5


def test_output_goes_to_a_file(run: Invoke, recordings: Path, tmp_path: Path):
    target = tmp_path / "report.json"
    result = run("explain", recordings / "base-graph-decode.trace.json.gz", "--format", "json", "-o", target)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert json.loads(target.read_text())["traces"][0]["device"] == "NVIDIA H200"


def test_terminal_report_names_the_copy(run: Invoke, recordings: Path):
    result = run("explain", recordings / "base-eager-decode-stack.trace.json.gz", "--top", "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "attention/flashinfer_mla_backend.py:616 forward_decode" in result.stdout


BAD_INPUTS = {
    "missing": None,
    "empty": b"",
    "white space": b"  \n",
    "text": b"hello",
    "other json": b'{"a": 1}',
    "no json": b'{"traceEvents',
    "an array of numbers": b"[1, 2]",
    "no events": b'{"traceEvents": []}',
    "binary": bytes(range(256)),
    "gzip of nothing": gzip.compress(b""),
    "a cut gzip header": b"\x1f\x8b\x08",
    "gzip of noise": b"\x1f\x8b\x08\x00" + bytes(range(200)),
    "host events only": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}',
}


@pytest.mark.parametrize("content", BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input_is_one_line_and_exit_3(run: Invoke, tmp_path: Path, content: bytes | None):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    result = run("explain", path)
    assert (result.returncode, result.stdout) == (3, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"mla-diag: {path}: ")
    assert len(line) > len(f"mla-diag: {path}: ") + 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stage", "decoding"], "--stage decoding: not one of decode, prefill, mixed, other"),
        (["--format", "xml"], "--format xml: not one of terminal, json"),
        (["--rank", "3"], "no trace of rank 3"),
        (["--stage", "prefill"], "no prefill steps"),
        (["-o", "/nonexistent/report.json"], "no directory /nonexistent"),
        (["-o", "/dev/full"], "No space left on device"),
        (["-o", "/tmp"], "/tmp: is a directory; name a file in it"),
        (["-o", ""], "-o: nothing is given for it; is a shell variable not set?"),
        (["--server-info="], "--server-info: nothing is given for it"),
        ([""], "an argument: nothing is given for it"),
        (["--stage", "decode", "--warmup", "9"], "no decode steps in these traces that --warmup 9 leaves"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(run: Invoke, recordings: Path, options: list[str], words: str):
    result = run("explain", recordings / "base-graph-decode.trace.json.gz", *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_guard_does_not_pass_where_no_step_was_measured(run: Invoke, recordings: Path, tmp_path: Path):
    """A trace that was cut off before its device events, say: none of its findings is no all-clear."""
    whole = recordings / "base-graph-decode.trace.json.gz"
    cut = tmp_path / "cut.trace.json.gz"
    cut.write_bytes(whole.read_bytes()[:2_000])
    for given in ([cut], [whole, "--warmup", "5"]):
        assert run("explain", *given).returncode == 0
        result = run("explain", *given, "--fail-on", "whole-pool-copy")
        assert result.returncode == 3
        assert result.stderr == (
            f"mla-diag: {given[0]}: no step could be measured, so --fail-on cannot be judged; see the notes\n"
        )


def test_a_file_that_cannot_be_explained_fails_after_the_others_were(run: Invoke, recordings: Path, tmp_path: Path):
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"hello")
    result = run("explain", recordings / "base-graph-decode.trace.json.gz", bad)
    assert result.returncode == 3
    assert "DECODE" in result.stdout
    assert result.stderr.startswith(f"mla-diag: {bad}: not JSON")


def test_demo_tells_the_story(run: Invoke):
    result = run("demo")
    assert (result.returncode, result.stderr) == (0, "")
    assert "HIGH whole-pool-copy (92.1%)" in result.stdout
    assert "flashinfer_mla_backend.py:616 forward_decode" in result.stdout
    assert "busy 72.07 to 4.585 ms, 15.7 times as fast; 72.33 to 5.219 ms of device time" in result.stdout
    assert "busy 84.29 to 18.77 ms, 4.49 times as fast; 84.29 to 25.75 ms of device time" in result.stdout
    assert result.stdout.endswith("On your own server: mla-diag doctor --url http://localhost:30000\n")


def test_version_and_help(run: Invoke):
    import mla_diag  # noqa: PLC0415

    assert run("--version").stdout == f"mla-diag {mla_diag.__version__}\n"
    assert "explain" in run("--help").stdout


def test_help_does_not_load_what_only_a_command_needs():
    code = "import sys, mla_diag.cli; print([m for m in ('numpy', 'pandas', 'msgspec', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
