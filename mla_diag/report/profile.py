"""What follows the report of a profile: a step beside its floor, and how to name what CUDA graphs replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.step_spans import Stage
from mla_diag.report.exposure import floor_lines, gap_lines


def measured_gap_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A recorded decode step beside its floor, or how to have it; nothing without a decode step."""
    if diagnosis.floor is not None and diagnosis.gap is not None:
        yield "gap"
        yield from floor_lines(diagnosis.floor)
        yield from gap_lines(diagnosis.gap)
    elif any(stage.stage is Stage.DECODE for stage in diagnosis.stages):
        yield "gap: the floor of a decode step is not known; give the model's config.json with --model-config"


def graph_guidance(diagnosis: Diagnosis, url: str, out: Path, *, graphs: bool | None, mapped: bool) -> Iterator[str]:
    """How a capture with CUDA graphs and one without make up for each other.

    Args:
        diagnosis: What was recorded.
        url: The server's address.
        out: The directory that the profile is in.
        graphs: Whether its decode steps replay CUDA graphs; None if that is not known, or none was asked for.
        mapped: Whether another trace named what they replay.
    """
    again = f"mla-diag profile --url {quote(url)} --stage decode"
    traces, server_info = quote(str(out / "traces")), quote(str(out / "server_info.json"))
    if graphs is False:
        yield "This server decodes without CUDA graphs: its trace names what they replay on the same server with them:"
        yield f"  {again} --mapping {traces}/NAME"
    replayed = any(op.launched_by == "graph" and not op.mapped for stage in diagnosis.stages for op in stage.ops)
    if not replayed or mapped:
        return
    yield "CUDA graphs record no ops, shapes or stacks. To name what they replay, record one of these as well:"
    yield f"  the same server with --disable-cuda-graph: {again} --stacks"
    yield "  the graphs' capture: start the server with --enable-profile-cuda-graph and SGLANG_TORCH_PROFILER_DIR=DIR;"
    yield "  it writes DIR/capture_traces/bs_BATCH_rankN.json.gz"
    yield "and explain this recording with it, without another capture:"
    yield f"  mla-diag explain {traces} --server-info {server_info} --mapping THAT_TRACE"
