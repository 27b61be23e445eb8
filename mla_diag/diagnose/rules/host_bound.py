"""host-bound: the device has nothing to do inside steps because the host has not launched it yet.

An eager decode step of an MLA model is some 1,400 launches, which take the host longer than the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.idle import gaps, inside_steps, launched_late, records_stacks
from mla_diag.diagnose.step_spans import Stage, StepSource
from mla_diag.diagnose.thresholds import HOST_BOUND_IDLE, HOST_BOUND_OF_IDLE
from mla_diag.trace.columns import NANOS_PER_MS

KIND = "host-bound"


def find(case: StageCase) -> Iterator[Finding]:
    """One finding for the stage, if its steps wait for the host."""
    # Where nothing marks steps the capture counts as one, and its gaps may be those between steps.
    if case.steps.spans.source is StepSource.CAPTURE or not case.report.wall_ms_per_step:
        return
    idle = inside_steps(gaps(case.trace.device_events), case.trace, case.steps, case.chosen)
    late = launched_late(idle, case.trace, case.links)
    steps = len(case.chosen)
    waits, other = (float(idle.length[rows].sum()) / steps / NANOS_PER_MS for rows in (late, ~late))
    share = min(1.0, waits / case.report.wall_ms_per_step)
    if share < HOST_BOUND_IDLE or waits < HOST_BOUND_OF_IDLE * (waits + other):
        return
    delay = idle.end[late] - case.trace.launches.start[case.links.launch[idle.before[late]]]
    graph = bool(case.links.graph[case.events].any())
    stacks = records_stacks(case.trace)
    yield case.finding(
        KIND,
        f"the device waits for the host {waits:.1f} of {case.report.wall_ms_per_step:.1f} ms a step, "
        + _circumstance(graph, stacks),
        detail=f"busy for {case.report.busy_ms_per_step:.1f} ms; {late.sum() / steps:,.0f} of "
        f"{len(case.events) / steps:,.0f} device events a step start on an empty queue, as soon as they are launched",
        # With stacks recorded the trace does not tell how much of this is the profiler's own doing.
        cost_ms=None if stacks else waits,
        share=None if stacks else share,
        evidence={
            "waits_for_host_ms_per_step": waits,
            "other_idle_ms_per_step": other,
            "busy_ms_per_step": case.report.busy_ms_per_step,
            "wall_ms_per_step": case.report.wall_ms_per_step,
            "busy_share": min(1.0, case.report.busy_ms_per_step / case.report.wall_ms_per_step),
            "device_events_per_step": len(case.events) / steps,
            "late_launches_per_step": int(late.sum()) / steps,
            "launch_to_start_us_median": float(np.median(delay)) / 1e3,
            "cuda_graphs": graph,
            "python_stacks": stacks,
        },
        remedy=_remedy(case.report.stage, graph, stacks),
        confidence=_confidence(case, stacks),
    )


def _circumstance(graph: bool, stacks: bool) -> str:
    if stacks:
        return "in part because the profiler recorded Python stacks"
    return "although it runs from CUDA graphs" if graph else "which launches each kernel by itself, without CUDA graphs"


def _remedy(stage: Stage, graph: bool, stacks: bool) -> str:
    if graph:
        remedy = "find what the host does between its graphs: record Python stacks and look before the late launches"
    elif stage is Stage.DECODE:
        remedy = (
            "CUDA graphs remove this: serve without `--disable-cuda-graph` (vLLM: `--enforce-eager`), "
            "and capture graphs up to the batch size that you serve"
        )
    elif stage in (Stage.PREFILL, Stage.MIXED):
        remedy = (
            "give a step more tokens (`--chunked-prefill-size`), or run prefill from CUDA graphs if the release can"
        )
    else:
        remedy = "launch less: fuse small ops, or run the steps from CUDA graphs"
    if stacks:
        return f"profile without Python stacks, which slow the host two to three times; if it still waits: {remedy}"
    return remedy


def _confidence(case: StageCase, stacks: bool) -> str:
    """The profiler slows the host as well, most with stacks, somewhat with ops and their shapes."""
    if stacks:
        return "low"
    return "medium" if len(case.trace.ops) else "high"
