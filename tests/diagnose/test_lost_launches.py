"""What lost kernels would have taken is told by their like, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_diag.diagnose.lost_launches import LostLaunches, find_lost_launches
from mla_diag.diagnose.steps import find_steps
from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import link
from mla_diag.trace.model import Trace
from tests.diagnose.rules.finding import ALL_REDUCE, CAST, COPY, GEMM
from tests.trace_builder import TraceBuilder

POOL, ROW = [[495553, 1, 576]], [[1, 1, 576]]


def lost_launches(trace: Trace) -> LostLaunches:
    links = link(trace)
    return find_lost_launches(trace, links, find_steps(trace, links).spans)


def lost_in(builder: TraceBuilder, tmp_path: Path) -> LostLaunches:
    (trace,) = read_trace(builder.write(tmp_path / "t.json")).by_rank()
    return lost_launches(trace)


def step_of_copies(builder: TraceBuilder, at: int, *, lost: bool, kernel: str = COPY, op: str | None = None) -> None:
    """A step of a copy of 850 us, which may be lost, and a short one of the same op, each in an op or in none."""
    builder.span("step[DECODE bs=1]", at, 2_000)
    for number, (dims, duration) in enumerate(((POOL, 850), (ROW, 2))):
        if op:
            builder.op(op, at + 100 * number, 90, dims=dims, types=["c10::Float8_e4m3fn"])
        correlation = builder.launch(at + 100 * number + 10)
        if duration == 2 or not lost:
            builder.kernel(kernel, at + 1_000 * number + 20, duration, correlation, grid=[duration, 1, 1])


def test_the_same_launch_of_other_steps_tells(tmp_path: Path):
    builder = TraceBuilder()
    for number in range(3):
        step_of_copies(builder, 10_000 * number, lost=number == 1)
    launches = lost_in(builder, tmp_path)
    assert (len(launches), launches.count, launches.unknown) == (6, 1, 0)
    assert np.nansum(launches.nanoseconds) == 850_000
    assert launches.by_step[launches.lost].all()
    assert launches.time_share(850_000 * 3) == launches.share(850_000 * 3) == pytest.approx(1 / 4)


def test_a_graph_replay_that_is_lost_takes_what_it_took_in_other_steps(tmp_path: Path):
    builder = TraceBuilder()
    for number, kernels in enumerate((3, 0, 3)):
        builder.span("step[DECODE bs=1]", 10_000 * number, 2_000)
        run = (ALL_REDUCE, COPY, GEMM)[:kernels]
        builder.replay(10_000 * number + 10, [(kernel, 10_000 * number + 100, 50) for kernel in run])
    launches = lost_in(builder, tmp_path)
    assert (launches.count, launches.unknown, np.nansum(launches.nanoseconds)) == (1, 0, 150_000)


def layers(tmp_path: Path, *, kernels: tuple[str | None, ...], **shapes: Any) -> LostLaunches:
    """A step in which each layer's op launches a kernel of 40 us, or one that is lost, and then another op's."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 5_000)
    for layer, kernel in enumerate(kernels):
        builder.op("aten::copy_", 100 * layer, 50, **shapes)
        correlation = builder.launch(100 * layer + 10)
        if kernel is not None:
            builder.kernel(kernel, 100 * layer + 20, 40, correlation)
        builder.dispatch("aten::mm", 100 * layer + 60, [(GEMM, 100 * layer + 70, 7)], **shapes)
    return lost_in(builder, tmp_path)


def test_the_same_op_in_other_layers_tells(tmp_path: Path):
    launches = layers(tmp_path, kernels=(COPY, None, COPY), dims=POOL)
    assert np.nansum(launches.nanoseconds) == 40_000
    assert not launches.by_step.any()


@pytest.mark.parametrize(
    ("kernels", "shapes"),
    [
        pytest.param((COPY, None, COPY), {}, id="a copy may be of a row or of the pool: no shapes were recorded"),
        pytest.param((COPY, None, CAST), {"dims": POOL}, id="the op launches one kernel or another"),
        pytest.param((ALL_REDUCE, None, ALL_REDUCE), {"dims": POOL}, id="a collective waits for other ranks"),
        pytest.param((None, None, None), {"dims": POOL}, id="all are lost"),
    ],
)
def test_what_nothing_tells_is_unknown_and_no_guess(
    tmp_path: Path, kernels: tuple[str | None, ...], shapes: dict[str, Any]
):
    launches = layers(tmp_path, kernels=kernels, **shapes)
    assert launches.unknown == launches.count == kernels.count(None)
    assert launches.time_share(80_000) == 0
    assert launches.share(80_000) == pytest.approx(launches.count / len(launches))


def test_an_op_on_other_shapes_is_not_the_like(tmp_path: Path):
    builder = TraceBuilder()
    step_of_copies(builder, 0, lost=True, op="aten::copy_")
    assert lost_in(builder, tmp_path).unknown == 1


@pytest.mark.parametrize(("name", "every"), [("base-eager-decode", 40), ("base-graph-decode", 13)])
def test_the_time_that_a_recording_lost_is_told(recordings: Path, name: str, every: int):
    """Launches of whichever step and layer without their kernels; of the graphs it is one of five."""
    (trace,) = read_trace(recordings / f"{name}.trace.json.gz").by_rank()
    links = link(trace)
    launched = lost_launches(trace).launch[::every]
    gone = np.isin(links.launch, launched)
    launches = lost_launches(replace(trace, device_events=trace.device_events.take(~gone)))
    assert launches.count == len(launched)
    assert np.nansum(launches.nanoseconds) == pytest.approx(trace.device_events.duration[gone].sum(), rel=0.01)
