"""Every recording in traces/ holds what its manifest says, to the microsecond a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import mla_diag
from mla_diag.diagnose.kernel_names import short_kernel_name

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
        kinds = {finding.kind for finding in diagnosis.findings if finding.stage is stage.stage}
        assert ("whole-pool-copy" in kinds) is expect["pool_copy"]

        first, wanted = stage.ops[0], expect["first"]
        assert first.op == wanted.get("op")
        assert first.launches_per_step == wanted["launches"]
        assert first.ms_per_step == pytest.approx(wanted["ms"], abs=0.001)
        assert first.bytes_per_launch == wanted.get("bytes_per_launch")
        if "kernel" in wanted:
            assert short_kernel_name(first.kernel) == wanted["kernel"]
        source = first.source
        assert (source and source.file, source and source.function) == (wanted.get("file"), wanted.get("function"))


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
