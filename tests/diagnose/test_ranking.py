"""The ranking: what is one row, what a row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.diagnose.diagnosis import Op, Source
from mla_diag.diagnose.explain import explain
from tests.trace_builder import TraceBuilder

POOL = [[495553, 1, 576], [495553, 1, 576], []]
POOL_TYPES = ["c10::BFloat16", "c10::Float8_e4m3fn", "Scalar"]
POOL_STRIDES = [[576, 576, 1], [576, 576, 1], []]


def ops_of(builder: TraceBuilder, path: Path) -> list[Op]:
    (stage,) = explain(builder.write(path)).stages
    return stage.ops


def test_one_cast_in_several_kernels_is_one_row(tmp_path: Path):
    """Above 2^31 bytes PyTorch splits one .to() into several kernels (seen with SGLang 0.5.9: four a layer)."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    for layer in range(2):
        kernels = [("direct_copy_kernel_cuda", 100 + 400 * layer + 90 * part, 80) for part in range(4)]
        builder.dispatch("aten::copy_", 10 + 400 * layer, kernels, dims=POOL, types=POOL_TYPES, strides=POOL_STRIDES)
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert (op.launches_per_step, op.calls_per_step) == (8, 2)
    assert op.ms_per_step == pytest.approx(0.64)
    assert op.bytes_per_launch == 495553 * 576 * 3 // 4
    assert [kernel.kernel for kernel in op.kernels] == ["direct_copy_kernel_cuda"]


def test_an_op_with_two_kernels_names_the_slower_and_lists_both(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.dispatch("aten::mm", 10, [("splitK_reduce", 200, 5), ("gemm_splitK", 100, 80)])
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert op.kernel == "gemm_splitK"
    assert [(kernel.kernel, kernel.ms_per_step) for kernel in op.kernels] == [
        ("gemm_splitK", pytest.approx(0.080)),
        ("splitK_reduce", pytest.approx(0.005)),
    ]


def test_the_same_op_on_other_shapes_or_from_another_function_is_another_row(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    for number, (rows, function) in enumerate([(1, "qkv"), (1, "qkv"), (2, "qkv"), (1, "gate")]):
        at = 100 * number
        builder.frame(f"sglang/srt/models/deepseek.py(10): {function}", at, 90)
        builder.dispatch("aten::mm", at + 1, [("gemm", at + 30, 10)], dims=[[rows, 8]], types=["float"])
    ops = ops_of(builder, tmp_path / "t.json")
    assert sorted((op.shapes, op.source.function, op.launches_per_step) for op in ops if op.source) == [
        ([[1, 8]], "gate", 1),
        ([[1, 8]], "qkv", 2),
        ([[2, 8]], "qkv", 1),
    ]


def test_graph_kernels_are_told_apart_by_geometry(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.replay(
        10,
        [
            ("copy", 20, 5, (557498, 1, 1)),
            ("copy", 30, 5, (557498, 1, 1)),
            ("copy", 40, 1, (4, 1, 1)),
        ],
    )
    large, small = ops_of(builder, tmp_path / "t.json")
    assert (large.op, large.launched_by, large.launches_per_step) == (None, "graph", 2)
    assert large.kernels[0].grid == [557498, 1, 1]
    assert (large.shapes, large.dtypes, large.bytes_per_launch, large.source) == (None, None, None, None)
    assert small.launches_per_step == 1


def test_the_innermost_serving_frame_is_the_source_whatever_is_below_it(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.frame("/opt/venv/lib/python3.12/site-packages/sglang/srt/models/deepseek.py(900): forward", 0, 900)
    builder.frame("/sgl-workspace/sglang/python/sglang/srt/layers/attention/b.py(616): forward_decode", 1, 800)
    builder.frame("torch/_tensor.py(1): to", 2, 700)
    builder.frame("<built-in method to of Tensor object at 0x7f0000000000>", 3, 600)
    builder.dispatch("aten::copy_", 10, [("copy", 100, 10)])
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert op.source == Source("sglang/srt/layers/attention/b.py", 616, "forward_decode")


def test_a_launch_outside_any_op_is_direct_and_named_by_its_kernel(tmp_path: Path):
    """Triton, FlashInfer and aiter launch without the dispatcher (sglang#25787)."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    call = builder.launch(10, name="cuLaunchKernelEx", category="cuda_driver")
    builder.kernel("_fwd_grouped_kernel_stage1", 30, 10, call)
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert (op.op, op.kernel, op.launched_by, op.calls_per_step) == (None, "_fwd_grouped_kernel_stage1", "direct", 1)


def test_memcpys_give_their_own_bytes_twice_within_the_device(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    copies = [("Memcpy DtoD (Device -> Device)", 100), ("Memcpy DtoH (Device -> Pinned)", 30)]
    for number, (name, size) in enumerate(copies):
        builder.op(f"op{number}", 100 * number, 50)
        call = builder.launch(100 * number + 10, name="cudaMemcpyAsync")
        builder.memcpy(100 * number + 40, 5, call, size=size, name=name)
    moved = {op.op: (op.bytes_per_launch, op.bytes_source) for op in ops_of(builder, tmp_path / "t.json")}
    assert moved == {"op0": (200, "memcpy"), "op1": (30, "memcpy")}


def test_a_broadcast_source_counts_the_memory_it_occupies(tmp_path: Path):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.dispatch(
        "aten::copy_",
        10,
        [("copy", 100, 10)],
        dims=[[1000, 8], [1000, 8], []],
        types=["float", "float", "Scalar"],
        strides=[[8, 1], [0, 1], []],
    )
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert op.bytes_per_launch == 1000 * 8 * 4 + 8 * 4


@pytest.mark.parametrize(
    ("dims", "types", "shapes", "dtypes"),
    [
        ([[3, 4], [], []], ["float", "Scalar", ""], [[3, 4]], ["float"]),
        ([[3, 4], []], ["float", "long int"], [[3, 4], []], ["float", "long int"]),
        ([[[2, 3], [4, 3]], []], ["TensorList", "Scalar"], [[2, 3], [4, 3]], [None, None]),
        ([], [], [], []),
        (None, None, None, None),
        ([[1]], ["float", "float"], None, None),
        ("[[1]]", ["float"], None, None),
    ],
)
def test_shapes_are_those_of_tensors(tmp_path: Path, dims: object, types: object, shapes: object, dtypes: object):
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.dispatch("aten::op", 10, [("kernel", 100, 10)], dims=dims, types=types)
    (op,) = ops_of(builder, tmp_path / "t.json")
    assert (op.shapes, op.dtypes) == (shapes, dtypes)
