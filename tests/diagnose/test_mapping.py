"""Ops, shapes and lines carried over to graph replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.diagnosis import Op
from mla_diag.diagnose.explain import explain
from mla_diag.errors import UnreadableInputError
from tests.trace_builder import TraceBuilder

FILE = "sglang/srt/models/deepseek.py"
LAYERS = 3


def eager(path: Path, *, twice: bool = False) -> Path:
    """Each layer: a copy and two products of one kernel and grid from two functions."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 9_000)
    for layer in range(LAYERS):
        for number, (function, op, kernel) in enumerate(
            [("attend", "aten::copy_", "copy"), ("gate", "aten::mm", "gemm"), ("up", "aten::mm", "gemm")]
        ):
            at = 1_000 * layer + 100 * number
            builder.frame(f"{FILE}({number + 1}): {function}", at, 90)
            kernels = (
                [(kernel, at + 30, 10), (kernel, at + 41, 10)]
                if twice and op == "aten::copy_"
                else [(kernel, at + 30, 10)]
            )
            builder.dispatch(op, at + 1, kernels, dims=[[number + 1, 8]], types=["float"])
    return builder.write(path)


def graph(path: Path, kernels: list[tuple[str, tuple[int, int, int]]]) -> Path:
    builder = TraceBuilder()
    for step in range(2):
        at = 10_000 * step
        builder.span("step[DECODE bs=1]", at, 5_000)
        builder.replay(at + 10, [(name, at + 20 + 20 * n, 10, grid) for n, (name, grid) in enumerate(kernels)])
    return builder.write(path)


LAYER = [("copy", (132, 1, 1)), ("gemm", (132, 1, 1)), ("gemm", (132, 1, 1))]


def named(ops: list[Op]) -> dict[str, tuple[str | None, object, float]]:
    return {op.source.function: (op.op, op.shapes, op.launches_per_step) for op in ops if op.source}


def test_kernels_of_one_name_and_grid_are_told_apart_by_their_order(tmp_path: Path):
    (stage,) = explain(graph(tmp_path / "g.json", LAYER * LAYERS), mapping=eager(tmp_path / "e.json")).stages
    assert named(stage.ops) == {
        "attend": ("aten::copy_", [[1, 8]], 3),
        "gate": ("aten::mm", [[2, 8]], 3),
        "up": ("aten::mm", [[3, 8]], 3),
    }
    assert all(op.mapped and op.launched_by == "graph" for op in stage.ops)


def test_a_call_of_several_kernels_is_one_call(tmp_path: Path):
    layer = [("copy", (132, 1, 1)), *LAYER]
    (stage,) = explain(
        graph(tmp_path / "g.json", layer * LAYERS), mapping=eager(tmp_path / "e.json", twice=True)
    ).stages
    (copy,) = [op for op in stage.ops if op.op == "aten::copy_"]
    assert (copy.launches_per_step, copy.calls_per_step) == (6, 3)


def test_more_kernels_than_the_reference_has_are_mapped_only_where_there_is_one_answer(tmp_path: Path):
    (stage,) = explain(graph(tmp_path / "g.json", LAYER * (LAYERS + 1)), mapping=eager(tmp_path / "e.json")).stages
    assert {(op.op, op.mapped, op.launches_per_step) for op in stage.ops} == {
        ("aten::copy_", True, 4),
        (None, False, 8),
    }


def test_the_same_kernel_on_another_grid_keeps_its_place_but_not_its_shapes(tmp_path: Path):
    layer = [("copy", (264, 1, 1)), *LAYER[1:]]
    (stage,) = explain(graph(tmp_path / "g.json", layer * LAYERS), mapping=eager(tmp_path / "e.json")).stages
    (copy,) = [op for op in stage.ops if op.op == "aten::copy_"]
    assert copy.shapes is None
    assert copy.source is not None
    assert copy.source.function == "attend"


def test_kernels_that_the_reference_never_launches_stay_unnamed(tmp_path: Path):
    (stage,) = explain(
        graph(tmp_path / "g.json", [("other", (1, 1, 1))] * 3), mapping=eager(tmp_path / "e.json")
    ).stages
    (op,) = stage.ops
    assert (op.op, op.mapped, op.source) == (None, False, None)


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernelEx"])
def test_the_launches_of_a_capture_become_the_graphs_kernels_in_order(tmp_path: Path, call: str):
    """SGLang's capture traces hold ops and launches of the capture, and no kernels (sglang#24370).

    FlashInfer launches its MLA attention cooperatively.
    """
    capture = TraceBuilder()
    for number, op in enumerate(["aten::copy_", "aten::mm", "aten::mul"]):
        capture.frame(f"{FILE}({number + 1}): function_{number}", 100 * number, 90)
        external = capture.op(op, 100 * number + 1, 80, dims=[[number + 1, 8]], types=["float"])
        capture.launch(100 * number + 10, id=external, name=call if number == 1 else "cudaLaunchKernel")
    path = capture.write(tmp_path / "bs_1_rank0.json")
    replay = graph(tmp_path / "g.json", [("a", (1, 1, 1)), ("b", (1, 1, 1)), ("c", (1, 1, 1))])
    (stage,) = explain(replay, mapping=path).stages
    assert {op.kernel: (op.op, op.source and op.source.function) for op in stage.ops} == {
        "a": ("aten::copy_", "function_0"),
        "b": ("aten::mm", "function_1"),
        "c": ("aten::mul", "function_2"),
    }


def test_a_capture_recorded_on_amd_names_every_kernel_of_its_replay(shared_traces: Path):
    public = shared_traces / "public"
    (stage,) = explain(
        public / "tracelens-sglang-qwen3-8b-decode-graph-mi300x.json.gz",
        mapping=public / "tracelens-sglang-qwen3-8b-capture-bs32-mi300x.json.gz",
    ).stages
    assert all(op.mapped for op in stage.ops if op.launched_by == "graph")
    first = stage.ops[0]
    assert (first.op, first.shapes, first.launches_per_step) == ("aten::mm", [[32, 4096], [4096, 24576]], 36)
    attention = next(op for op in stage.ops if "paged_attention" in op.kernel)
    assert (attention.launches_per_step, attention.calls_per_step) == (72, 36)


def test_a_trace_without_ops_maps_nothing_and_says_so(tmp_path: Path):
    builder = TraceBuilder()
    builder.kernel("kernel", 0, 10)
    with pytest.raises(UnreadableInputError, match="no CPU ops to map kernels to"):
        explain(graph(tmp_path / "g.json", LAYER), mapping=builder.write(tmp_path / "d.json"))
