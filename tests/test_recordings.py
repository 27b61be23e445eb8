"""Every recording in traces/ holds what its manifest says, to the microsecond a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import mla_diag
from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.kernel_names import short_kernel_name
from mla_diag.diagnose.server_info import read_server_info
from mla_diag.diagnose.step_spans import Stage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRACES = Path(__file__).parents[1] / "traces"
MANIFEST = tomllib.loads((TRACES / "manifest.toml").read_text())["recording"]
MEGABYTE = 1024 * 1024


def test_every_recording_is_in_the_manifest():
    assert {entry["file"] for entry in MANIFEST} == {path.name for path in TRACES.glob("*.trace.json.gz")}


def test_recordings_stay_small_enough_for_a_checkout():
    sizes = [path.stat().st_size for path in TRACES.iterdir()]
    assert max(sizes) <= 4 * MEGABYTE
    assert sum(sizes) <= 20 * MEGABYTE


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"].split(".")[0])
def test_recording_holds_what_its_manifest_says(entry: dict[str, Any]):
    diagnosis = mla_diag.explain(TRACES / entry["file"])
    assert [stage.stage.value for stage in diagnosis.stages] == [expect["stage"] for expect in entry["expect"]]
    for stage, expect in zip(diagnosis.stages, entry["expect"], strict=True):
        assert stage.steps == expect["steps"]
        assert stage.step_source.value == expect["step_source"]
        assert stage.device_ms_per_step == pytest.approx(expect["device_ms"], abs=0.001)
        assert stage.busy_ms_per_step == pytest.approx(expect["busy_ms"], abs=0.001)
        assert pools_copied(diagnosis, stage.stage) == ([expect["pool_copy"]] if expect["pool_copy"] else [])

        first, wanted = stage.ops[0], expect["first"]
        assert first.op == wanted.get("op")
        assert first.launches_per_step == wanted["launches"]
        assert first.ms_per_step == pytest.approx(wanted["ms"], abs=0.001)
        assert first.bytes_per_launch == wanted.get("bytes_per_launch")
        if "kernel" in wanted:
            assert short_kernel_name(first.kernel) == wanted["kernel"]
        source = first.source
        assert (source and source.file, source and source.function) == (wanted.get("file"), wanted.get("function"))


def pools_copied(diagnosis: Diagnosis, stage: Stage) -> list[dict[str, int]]:
    """The pool of each whole-pool-copy of a stage; the elements of one call must be those of the pool."""
    copies = [finding for finding in diagnosis.findings if (finding.kind, finding.stage) == ("whole-pool-copy", stage)]
    for evidence in (copy.evidence for copy in copies):
        pool = evidence["pool_rows"] * evidence["pool_width"]
        # Launch geometry is right to within a block.
        assert 0 <= evidence["elements_per_call"] - pool < (1 if evidence["elements_source"] == "shapes" else 512)
    return [{"rows": copy.evidence["pool_rows"], "width": copy.evidence["pool_width"]} for copy in copies]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"].split(".")[0])
def test_the_servers_account_changes_nothing_about_the_pool(entry: dict[str, Any]):
    server = read_server_info(TRACES / "base.server_info.json")
    diagnosis = mla_diag.explain(TRACES / entry["file"], server=server, sources=False)
    for expect in entry["expect"]:
        copied = pools_copied(diagnosis, Stage(expect["stage"]))
        assert copied == ([expect["pool_copy"]] if expect["pool_copy"] else [])
    assert {finding.confidence for finding in diagnosis.findings if finding.kind == "whole-pool-copy"} <= {"high"}


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"].split(".")[0])
def test_all_device_time_is_accounted_for(entry: dict[str, Any]):
    """In steps, between them, before them, or unattributed: the parts add up to the whole."""
    diagnosis = mla_diag.explain(TRACES / entry["file"])
    (trace,) = diagnosis.traces
    in_steps = sum(
        stage.steps * (stage.device_ms_per_step + stage.between_steps_ms_per_step) for stage in diagnosis.stages
    )
    apart = trace.before_first_step_ms + trace.left_out_ms + trace.unattributed_ms
    assert in_steps + apart == pytest.approx(trace.device_ms, rel=1e-9)
    for stage in diagnosis.stages:
        assert sum(op.ms_per_step for op in stage.ops) == pytest.approx(stage.device_ms_per_step, rel=1e-9)
        assert sum(op.share for op in stage.ops) == pytest.approx(1.0)
