"""whole-pool-copy in real recordings: the copy, its function and its pool, and none where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.server_info import ServerInfo
from tests.diagnose.rules.test_whole_pool_copy import found


def facts(finding: Finding) -> tuple[Any, ...]:
    cause = finding.cause
    assert cause is not None
    return finding.evidence["calls_per_step"], cause.file.rpartition("/")[2], cause.function, cause.inferred


@pytest.mark.parametrize(
    ("recording", "cost", "file", "function", "inferred"),
    [
        ("base-eager-decode", 67.66, "flashinfer_mla_backend.py", "forward_decode", True),
        ("base-eager-decode-stack", 67.65, "flashinfer_mla_backend.py", "forward_decode", False),
        ("base-prefix-extend-stack", 66.32, "flashinfer_mla_backend.py", "forward_extend", False),
        ("base-graph-decode", 66.45, "flashinfer_mla_backend.py", "forward_decode", True),
        ("fa3-graph-decode", 66.22, "flashattention_backend.py", "forward_decode", True),
    ],
)
def test_recordings_with_the_defect(
    recordings: Path, recording: str, cost: float, file: str, function: str, inferred: bool
):
    (finding,) = found(recordings / f"{recording}.trace.json.gz")
    assert facts(finding) == (78, file, function, inferred)
    assert finding.cost_ms_per_step == pytest.approx(cost, abs=0.01)
    assert finding.evidence["bytes_per_step"] == pytest.approx(66.79e9, rel=1e-3)
    assert finding.evidence["pool_rows"] == 495_553
    assert finding.evidence["bandwidth_share"] == pytest.approx(0.21, abs=0.01)


@pytest.mark.parametrize("recording", ["native-graph-decode", "bf16kv-graph-decode", "base-eager-extend-stack"])
def test_recordings_without_it(recordings: Path, recording: str):
    path = recordings / f"{recording}.trace.json.gz"
    server = ServerInfo("0.5.17", 495_552, 1, "fp8_e4m3", "flashinfer", None, None, True)
    assert found(path) == []
    assert found(path, server=server) == []


def test_no_public_trace_has_it(shared_traces: Path):
    for path in sorted((shared_traces / "public").glob("*.json.gz")):
        if path.name not in ("hta-cpu-only.json.gz", "hta-rank-not-found.json.gz"):
            assert found(path) == [], path.name


@pytest.mark.parametrize("server", [False, True])
def test_a_mapping_gives_a_replay_its_line(recordings: Path, server: bool):
    info = ServerInfo("0.5.17", 495_552, 1, "fp8_e4m3", "flashinfer", None, None, True) if server else None
    (finding,) = found(
        recordings / "base-graph-decode.trace.json.gz",
        mapping=recordings / "base-eager-decode-stack.trace.json.gz",
        server=info,
    )
    assert facts(finding) == (78, "flashinfer_mla_backend.py", "forward_decode", False)
    assert finding.cause is not None
    assert finding.cause.line == 616
    assert finding.evidence["dtypes"] == ["BFloat16", "Float8_e4m3fn"]
    assert finding.confidence == "high"
