"""`mla-diag compare` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.invoke import Invoke

BASE, NATIVE, BF16 = (f"{name}-graph-decode.trace.json.gz" for name in ("base", "native", "bf16kv"))


def test_terminal(run: Invoke, recordings: Path):
    result = run("compare", recordings / BASE, recordings / NATIVE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "72.44 to 6.960 ms of device time, 10.4 times as fast" in result.stdout
    assert "fixed: whole-pool-copy" in result.stdout
    assert "19.5 to 37.6  grew    BatchMLAPageAttentionHopperKernel" in result.stdout


def test_kernels_that_are_launched_early_do_not_make_a_step_slower(run: Invoke, recordings: Path):
    """Their rows hold what they wait: 5.23 to 5.39 ms of device time, and the device is done sooner."""
    result = run(
        "compare", recordings / BF16, recordings / "kernel-both-stages.trace.json.gz", "--fail-on-slower", "0%"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "busy 5.006 to 4.732 ms, 1.06 times as fast; 5.232 to 5.393 ms of device time" in result.stdout
    assert "kernels overlap" in result.stdout


def test_a_step_that_did_not_change_is_as_fast(run: Invoke, recordings: Path):
    result = run("compare", recordings / BASE, recordings / BASE, "--fail-on-slower", "0%")
    assert result.returncode == 0
    assert "72.44 to 72.44 ms of device time, as fast; wall time" in result.stdout


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_step_without_device_time_has_no_ratio(run: Invoke, recordings: Path, tmp_path: Path, side: str):
    report = tmp_path / "report.json"
    run("explain", recordings / BASE, "--format", "json", "-o", report)
    fields = json.loads(report.read_text())
    fields["stages"][0] |= {"device_ms_per_step": 0.0, "ops": []}
    report.write_text(json.dumps(fields))
    sides = [report, recordings / BASE]
    result = run("compare", *(sides if side == "before" else sides[::-1]))
    assert (result.returncode, result.stderr) == (0, "")
    assert "ms of device time, not to be compared; wall time" in result.stdout


def test_reports_stand_for_their_traces(run: Invoke, recordings: Path, tmp_path: Path):
    report = tmp_path / "before.json"
    run("explain", recordings / BASE, "--format", "json", "-o", report)
    of_report = run("compare", report, recordings / NATIVE, "--format", "json")
    of_traces = run("compare", recordings / BASE, recordings / NATIVE, "--format", "json")
    assert of_report.returncode == 0
    assert json.loads(of_report.stdout) == json.loads(of_traces.stdout)


@pytest.mark.parametrize(
    ("before", "after", "status"), [(BF16, NATIVE, 1), (NATIVE, BF16, 0), (BASE, NATIVE, 0), (BASE, BASE, 0)]
)
def test_fail_on_slower(run: Invoke, recordings: Path, before: str, after: str, status: int):
    result = run("compare", recordings / before, recordings / after, "--fail-on-slower", "5%")
    assert result.returncode == status
    assert ("a step takes 33.0% longer than before" in result.stderr) is (status == 1)
    assert "of device time" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((BASE, NATIVE, "--fail-on-slower", "5"), 2, "no percentage"),
        ((BASE, "missing.json"), 3, "cannot be read"),
        ((BASE, "base-eager-extend-stack.trace.json.gz"), 2, "no stage in common: decode against prefill"),
        ((BASE, "base.server_info.json"), 3, "not a profiler trace"),
    ],
)
def test_bad_input_is_one_line(run: Invoke, recordings: Path, arguments: tuple[str, ...], status: int, words: str):
    paths = [recordings / name if name.endswith((".gz", ".json")) else name for name in arguments]
    result = run("compare", *paths)
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema_version": 99, "traces": []}', "schema version 99"),
        ('{"schema_version": 1, "traces": 5}', "not a report"),
        ('{"schema_version": 1', "not a report"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_line(
    run: Invoke, recordings: Path, tmp_path: Path, content: str, words: str
):
    path = tmp_path / "report.json"
    path.write_text(content)
    result = run("compare", path, recordings / BASE)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert words in line
