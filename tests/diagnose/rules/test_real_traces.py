"""Every recorded trace has the findings that it should have, and no other: a false alarm is worse than silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.explain import explain

RECORDINGS = {
    "base-eager-decode": {"whole-pool-copy", "host-bound"},
    "base-eager-decode-stack": {"whole-pool-copy", "host-bound"},
    "base-eager-extend-stack": {"host-bound"},
    "base-prefix-extend-stack": {"whole-pool-copy", "host-bound"},
    "base-graph-decode": {"whole-pool-copy"},
    "fa3-graph-decode": {"whole-pool-copy"},
    "native-graph-decode": {"underfilled-kernel", "small-op-storm"},
    "bf16kv-graph-decode": {"underfilled-kernel"},
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


def test_what_the_profiler_itself_costs_does_not_stand_above_what_the_server_does(recordings: Path):
    """Recording stacks makes the host wait longest of all, and says nothing of the server."""
    first = explain(recordings / "base-eager-decode-stack.trace.json.gz").findings[0]
    assert first.kind == "whole-pool-copy"
