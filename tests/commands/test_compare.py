"""`mla-diag compare` as its users run it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.commands.invoke import Invoke

BASE, NATIVE, BF16 = (f"{name}-graph-decode.trace.json.gz" for name in ("base", "native", "bf16kv"))
BOTH = "shipped-both-stages.trace.json.gz"


def test_terminal(run: Invoke, recordings: Path):
    result = run("compare", recordings / BASE, recordings / NATIVE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "72.44 to 6.960 ms of device time, 10.4 times as fast" in result.stdout
    assert "fixed: whole-pool-copy" in result.stdout
    assert "19.5 to 37.6  grew    BatchMLAPageAttentionHopperKernel" in result.stdout


def test_kernels_that_are_launched_early_do_not_make_a_step_slower(run: Invoke, recordings: Path):
    """Their rows hold what they wait: 5.23 to 5.36 ms of device time, and the device is done sooner."""
    result = run(
        "compare", recordings / BF16, recordings / "fa3-kernel-both-stages.trace.json.gz", "--fail-on-slower", "0%"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "busy 5.006 to 4.724 ms, 1.06 times as fast; 5.232 to 5.364 ms of device time" in result.stdout
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


def cut(recording: Path, part: float, target: Path) -> Path:
    """The beginning of a recording's text, as a copy that was made while it was written."""
    text = gzip.decompress(recording.read_bytes())
    target.write_bytes(text[: int(part * len(text))])
    return target


def test_a_side_without_a_whole_step_is_no_speed_up(run: Invoke, recordings: Path, tmp_path: Path):
    """A fifth of a file has the start of a step: 72.44 to 0.023 ms looked 3,150 times as fast, and the copy fixed."""
    after = cut(recordings / BASE, 0.2, tmp_path / "cut.json")
    result = run("compare", recordings / BASE, after, "--fail-on-slower", "5%")
    doubt = "after: the file is cut off before its end: 0 of its 5 steps are whole"
    assert f"dropped-events {doubt}" in result.stdout
    assert "72.44 to 0.023 ms of device time, not to be compared" in result.stdout
    assert "fixed" not in result.stdout
    assert (result.returncode, result.stderr.count("\n")) == (3, 1)
    assert f"--fail-on-slower 5% cannot be judged for decode: {doubt}" in result.stderr


def test_whole_steps_of_a_cut_file_are_compared(run: Invoke, recordings: Path, tmp_path: Path):
    before = cut(recordings / BASE, 0.5, tmp_path / "cut.json")
    result = run("compare", before, recordings / NATIVE, "--fail-on-slower", "5%")
    assert result.returncode == 0
    assert "dropped-events before: the file is cut off before its end: 2 of its 5 steps are whole" in result.stdout
    assert "10.4 times as fast" in result.stdout


def test_lost_kernels_are_no_speed_up(run: Invoke, recordings: Path, tmp_path: Path):
    """Every second copy without its device event is half the step, and nothing that was fixed."""
    trace = json.loads(gzip.decompress((recordings / "base-eager-decode.trace.json.gz").read_bytes()))
    copies = [event for event in trace["traceEvents"] if "direct_copy_kernel" in event.get("name", "")]
    lost = {id(event) for event in copies[::2]}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if id(event) not in lost]
    (tmp_path / "lost.json").write_text(json.dumps(trace))
    result = run("compare", recordings / "base-eager-decode.trace.json.gz", tmp_path / "lost.json")
    assert "launches have no device event: device times are too low" in result.stdout
    assert "73.68 to 39.85 ms of device time, not to be compared" in result.stdout
    assert "fixed" not in result.stdout


def test_what_is_lost_in_steps_that_do_not_count_hides_no_ratio(run: Invoke, recordings: Path, tmp_path: Path):
    """A prefill step without its device events is left out; the decode steps beside it are whole."""
    trace = json.loads(gzip.decompress((recordings / BOTH).read_bytes()))
    events = trace["traceEvents"]
    (step,) = (e for e in events if e["name"].startswith("step[EXTEND") and e["cat"] == "user_annotation")
    inside = (e for e in events if e.get("ph") == "X" and step["ts"] <= e["ts"] < step["ts"] + step["dur"])
    launched = {e["args"]["correlation"] for e in inside if "correlation" in e.get("args", {})}
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    trace["traceEvents"] = [
        e for e in events if e.get("cat") not in device or e["args"].get("correlation") not in launched
    ]
    (tmp_path / "lost.json").write_text(json.dumps(trace))
    result = run("compare", tmp_path / "lost.json", recordings / NATIVE)
    assert "dropped-events before: 1,424 of 1,522 launches have no device event" in result.stdout
    assert "10.4 times as fast" in result.stdout


def test_a_stage_that_is_gone_is_no_pass(run: Invoke, recordings: Path):
    result = run("compare", recordings / BOTH, recordings / NATIVE, "--fail-on-slower", "5%")
    assert result.returncode == 3
    assert result.stderr == "mla-diag: --fail-on-slower 5% cannot be judged: prefill is only before\n"
    assert run("compare", recordings / NATIVE, recordings / BOTH, "--fail-on-slower", "1000%").returncode == 0


@pytest.mark.parametrize(("after_ms", "status"), [(105, 0), (105.1, 1), (104, 0)])
def test_longer_by_just_the_limit_is_not_longer_by_more(
    run: Invoke, recordings: Path, tmp_path: Path, after_ms: float, status: int
):
    sides = [report_of(run, recordings, tmp_path / f"{ms}.json", device_ms=ms) for ms in (100, after_ms)]
    assert run("compare", *sides, "--fail-on-slower", "5%").returncode == status


def report_of(run: Invoke, recordings: Path, target: Path, device_ms: float) -> Path:
    """A report of a step that takes so long, the device being busy all the time."""
    run("explain", recordings / BASE, "--format", "json", "-o", target)
    fields = json.loads(target.read_text())
    fields["stages"][0] |= {"device_ms_per_step": device_ms, "busy_ms_per_step": device_ms}
    target.write_text(json.dumps(fields))
    return target


def test_the_slowest_rank_is_chosen_by_what_is_compared(run: Invoke, recordings: Path, tmp_path: Path):
    """Of two ranks with overlapping kernels the one with more device time can be done sooner."""
    reports = {}
    for name, ranks in {"before": [(7.0, 5.6), (7.0, 5.6)], "after": [(7.0, 5.6), (6.8, 6.6)]}.items():
        run("explain", recordings / BASE, "--format", "json", "-o", tmp_path / "one.json")
        fields = json.loads((tmp_path / "one.json").read_text())
        (stage,) = fields["stages"]
        fields["stages"] = [stage | {"device_ms_per_step": d, "busy_ms_per_step": b} for d, b in ranks]
        reports[name] = tmp_path / f"{name}.json"
        reports[name].write_text(json.dumps(fields))
    result = run("compare", reports["before"], reports["after"], "--fail-on-slower", "5%")
    assert "busy 5.600 to 6.600 ms, 1.18 times as slow" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize("form", ["gzip", "byte order mark"])
def test_a_report_is_read_as_it_was_kept(run: Invoke, recordings: Path, tmp_path: Path, form: str):
    report = tmp_path / "report.json"
    run("explain", recordings / BASE, "--format", "json", "-o", report)
    text = report.read_bytes()
    report.write_bytes(gzip.compress(text) if form == "gzip" else b"\xef\xbb\xbf" + text)
    result = run("compare", report, recordings / NATIVE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "10.4 times as fast" in result.stdout


def test_a_directory_may_hold_its_report_too(run: Invoke, recordings: Path, tmp_path: Path):
    shutil.copy(recordings / BASE, tmp_path)
    run("explain", tmp_path, "--format", "json", "-o", tmp_path / "report.json")
    for command in (("explain", tmp_path), ("compare", tmp_path, recordings / NATIVE)):
        result = run(*command)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("change", [{"kernels": []}, {"launches_per_step": 0.0}])
def test_a_report_that_cannot_be_worked_with_is_one_line(
    run: Invoke, recordings: Path, tmp_path: Path, change: dict[str, object]
):
    report = tmp_path / "report.json"
    run("explain", recordings / BASE, "--format", "json", "-o", report)
    fields = json.loads(report.read_text())
    fields["stages"][0]["ops"][0] |= change
    report.write_text(json.dumps(fields))
    result = run("compare", report, recordings / NATIVE)
    assert (result.returncode, result.stderr.count("\n")) == (3, 1)
    assert "not a report of mla-diag's (decode has an op without kernels or launches" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"findings": [{"trace": 99}]}, "is of trace 99, and there are 1"),
        ({"findings": [{"trace": -1}]}, "is of trace -1, and there are 1"),
        ({"stages": [{"steps": -1}]}, "decode has steps or times below zero"),
        ({"stages": [{"device_ms_per_step": -5.0}]}, "decode has steps or times below zero"),
    ],
)
def test_a_report_of_what_cannot_be_is_one_line(
    run: Invoke, recordings: Path, tmp_path: Path, change: dict[str, list[dict[str, object]]], words: str
):
    report = tmp_path / "report.json"
    run("explain", recordings / BASE, "--format", "json", "-o", report)
    fields = json.loads(report.read_text())
    for name, (values,) in change.items():
        fields[name][0] |= values
    report.write_text(json.dumps(fields))
    result = run("compare", report, recordings / NATIVE)
    assert (result.returncode, result.stderr.count("\n")) == (3, 1)
    assert words in result.stderr


def test_a_report_of_half_the_ranks_is_no_side(run: Invoke, recordings: Path, tmp_path: Path):
    """A rank's trace could not be read: the directory was refused, its report compared as if it were whole."""
    shutil.copy(recordings / BASE, tmp_path)
    (tmp_path / "other.json").write_text("")
    report = tmp_path / "report.json"
    assert run("explain", tmp_path, "--format", "json", "-o", report).returncode == 3
    for side in (report, tmp_path):
        result = run("compare", recordings / NATIVE, side, "--fail-on-slower", "5%")
        assert (result.returncode, result.stdout) == (3, "")
        assert "other.json" in result.stderr


def test_a_side_without_a_step_says_why(run: Invoke, recordings: Path, tmp_path: Path):
    result = run("compare", cut(recordings / BASE, 0.01, tmp_path / "a.json"), recordings / NATIVE)
    assert result.returncode == 3
    assert "no step of it can be compared" in result.stderr
    assert "cut off" in result.stderr


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
