"""Every recorded trace has the findings that it should have, and no other: a false alarm is worse than silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.explain import explain
from tests.trace_builder import TraceBuilder

RECORDINGS = {
    "base-eager-decode": ["whole-pool-copy", "host-bound"],
    "base-eager-decode-stack": ["whole-pool-copy", "host-bound"],
    "base-eager-extend-stack": ["host-bound"],
    "base-prefix-extend-stack": ["whole-pool-copy", "host-bound"],
    "base-graph-decode": ["whole-pool-copy"],
    "fa3-graph-decode": ["whole-pool-copy"],
    "native-graph-decode": ["underfilled-kernel", "small-op-storm"],
    "bf16kv-graph-decode": ["underfilled-kernel"],
    "shipped-both-stages": ["whole-pool-copy", "whole-pool-copy", "host-bound"],  # copies of decode and of prefill
    "kernel-both-stages": ["underfilled-kernel", "small-op-storm", "host-bound"],
    "fa3-shipped-both-stages": ["whole-pool-copy", "whole-pool-copy", "host-bound"],
    "fa3-kernel-both-stages": ["underfilled-kernel", "small-op-storm", "host-bound"],
}
PUBLIC: dict[str, set[str]] = {
    "hta-alexnet": set(),
    "hta-ns-resolution": set(),
    "hta-sampled-rank-0": {"exposed-communication"},
    "hta-sampled-rank-1": {"exposed-communication"},
    "hta-triton-example": set(),
    "tracelens-gpu-only-mi210": set(),
    "tracelens-qwen1.5-0.5b-h100": {"slow-copy", "dropped-events"},
    "tracelens-sglang-qwen3-8b-capture-bs32-mi300x": set(),
    "tracelens-sglang-qwen3-8b-decode-graph-mi300x": {"host-sync"},
    "tracelens-sglang-qwen3-8b-prefill-mi300x": set(),
    "tracelens-vllm-eager-b200": {"host-bound", "exposed-communication"},
    "tracelens-vllm-piecewise": set(),
}


def kinds(path: Path) -> list[str]:
    return sorted(finding.kind for finding in explain(path, sources=False).findings)


def test_every_trace_is_listed(recordings: Path):
    assert {path.name for path in recordings.glob("*.gz")} == {f"{name}.trace.json.gz" for name in RECORDINGS}


@pytest.mark.parametrize("name", RECORDINGS)
def test_our_recordings(recordings: Path, name: str):
    assert kinds(recordings / f"{name}.trace.json.gz") == sorted(RECORDINGS[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_traces_of_others(shared_traces: Path, name: str):
    assert kinds(shared_traces / "public" / f"{name}.json.gz") == sorted(PUBLIC[name])


@pytest.mark.parametrize("kernels", [0, 1])
def test_a_step_that_hardly_runs_anything_is_no_error(tmp_path: Path, kernels: int):
    """An idle data-parallel rank steps along with the others."""
    builder = TraceBuilder()
    for number in range(2):
        builder.span("step[IDLE bs=0]", 1_000 * number, 900)
        for _ in range(kernels):
            builder.memcpy(1_000 * number + 50, 0, builder.launch(1_000 * number + 10, name="cudaMemcpyAsync"), size=0)
    builder.span("step[DECODE bs=1]", 3_000, 900)
    builder.kernel("gemm", 3_100, 100, builder.launch(3_010))
    assert kinds(builder.write(tmp_path / "a.json")) == []


def test_what_the_profiler_itself_costs_does_not_stand_above_what_the_server_does(recordings: Path):
    """Recording stacks makes the host wait longest of all, and says nothing of the server."""
    first = explain(recordings / "base-eager-decode-stack.trace.json.gz").findings[0]
    assert first.kind == "whole-pool-copy"
