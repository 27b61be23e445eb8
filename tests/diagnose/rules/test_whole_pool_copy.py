"""whole-pool-copy: every way to copy a pool is found, and nothing that only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from tests.trace_builder import TraceBuilder

KIND = "whole-pool-copy"
ROWS = 100_001
LAYERS = 4
STEPS = 2
BF16, FP8 = "c10::BFloat16", "c10::Float8_e4m3fn"
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, 4, "
    "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int)"
)
ATTENTION = "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<int>()"
ELEMENTS_A_BLOCK = 128 * 4
SERVER = parse_server_info({"max_total_num_tokens": ROWS - 1, "page_size": 1})


def strides(shape: list[int]) -> list[int]:
    result = [1]
    for extent in reversed(shape[1:]):
        result.insert(0, result[0] * extent)
    return result


def tensor_arguments(*tensors: tuple[list[int], str]) -> dict[str, Any]:
    return {
        "dims": [shape for shape, _ in tensors],
        "types": [kind for _, kind in tensors],
        "strides": [strides(shape) for shape, _ in tensors],
    }


def decode(path: Path, layer: Callable[[TraceBuilder, float], None], name: str = "step[DECODE bs=1]") -> Path:
    """Two steps of four layers; `layer` adds one layer's work at a time."""
    builder = TraceBuilder()
    for step in range(STEPS):
        at = 10_000 * step
        builder.span(name, at, 9_000)
        for number in range(LAYERS):
            start = at + 10 + 2_000 * number
            layer(builder, start)
            builder.dispatch(
                "aten::mm",
                start + 1_500,
                [("gemm", start + 1_510, 50)],
                **tensor_arguments(([1, 2048], BF16), ([2048, 4096], BF16)),
            )
    return builder.write(path)


def found(path: Path, **options: Any) -> list[Finding]:
    return [finding for finding in explain(path, **options).findings if finding.kind == KIND]


def one_op(op: str, kernels: int = 1, kernel: str = "copy", **arguments: Any) -> Callable[[TraceBuilder, float], None]:
    def add(builder: TraceBuilder, start: float) -> None:
        runs = [(kernel, start + 50 + 100 * part, 90) for part in range(kernels)]
        builder.dispatch(op, start, runs, **arguments)

    return add


def in_order(*layers: Callable[[TraceBuilder, float], None]) -> Callable[[TraceBuilder, float], None]:
    """One layer's work of several ops."""

    def add(builder: TraceBuilder, start: float) -> None:
        for number, layer in enumerate(layers):
            layer(builder, start + 300 * number)

    return add


POOL_COPIES = {
    "cast": one_op("aten::copy_", **tensor_arguments(([ROWS, 1, 576], BF16), ([ROWS, 1, 576], FP8))),
    "contiguous of the same type": one_op(
        "aten::copy_", **tensor_arguments(([ROWS, 1, 576], BF16), ([ROWS, 1, 576], BF16))
    ),
    "clone": one_op("aten::clone", **tensor_arguments(([ROWS, 1, 576], FP8))),
    "one cast in four kernels": one_op(
        "aten::copy_", kernels=4, **tensor_arguments(([ROWS, 1, 576], BF16), ([ROWS, 1, 576], FP8))
    ),
    "an MHA pool": one_op("aten::copy_", **tensor_arguments(([ROWS, 8, 128], BF16), ([ROWS, 8, 128], FP8))),
    "index_select of every row": one_op(
        "aten::index_select", **tensor_arguments(([ROWS, 1, 576], FP8), ([ROWS], "long int"))
    ),
    "cat of two pools": one_op(
        "aten::cat",
        dims=[[[ROWS, 1, 512], [ROWS, 1, 64]], []],
        types=["TensorList", "Scalar"],
        kernel="void at::native::CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<2u>, unsigned int, 3>()",
    ),
    "a paged pool of vLLM's": one_op(
        "aten::copy_", **tensor_arguments(([6_250, 16, 1, 576], BF16), ([6_250, 16, 1, 576], FP8))
    ),
    "advanced index of every row": one_op(
        "aten::index",
        kernel="void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
        **tensor_arguments(([ROWS, 1, 576], FP8)),
    ),
}


REORDERED = {
    "flat": ([ROWS * 1024], [ROWS * 1024]),
    "heads as rows": ([ROWS * 8, 128], [ROWS * 8, 128]),
    "heads first": ([8, ROWS, 128], [8, ROWS, 128]),
}


@pytest.mark.parametrize("server", [None, SERVER], ids=["recurrence", "server"])
@pytest.mark.parametrize("shapes", REORDERED.values(), ids=REORDERED.keys())
def test_a_pool_that_is_copied_in_another_order_is_found(
    tmp_path: Path, shapes: tuple[list[int], list[int]], server: ServerInfo | None
):
    attention = one_op("aiter::mha_batch_prefill", **tensor_arguments(([ROWS, 8, 128], FP8), ([ROWS, 8, 128], FP8)))
    copy = one_op("aten::copy_", **tensor_arguments((shapes[0], BF16), (shapes[1], FP8)))
    (finding,) = found(decode(tmp_path / "t.json", in_order(attention, copy)), server=server)
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS, 1024)
    assert finding.evidence["elements_per_call"] == ROWS * 1024


def test_a_copy_without_the_page_of_padding_is_found_by_the_servers_tokens(tmp_path: Path):
    attention = one_op("aiter::mla_decode_fwd", **tensor_arguments(([ROWS, 1, 576], FP8)))
    copy = one_op("aten::copy_", **tensor_arguments(([ROWS - 1, 1, 576], BF16), ([ROWS - 1, 1, 576], FP8)))
    (finding,) = found(decode(tmp_path / "t.json", in_order(attention, copy)), server=SERVER)
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS - 1, 576)


@pytest.mark.parametrize("layer", POOL_COPIES.values(), ids=POOL_COPIES.keys())
def test_every_way_to_copy_the_pool_is_found(tmp_path: Path, layer: Callable[[TraceBuilder, float], None]):
    if layer is POOL_COPIES["advanced index of every row"]:
        original = layer

        def layer(builder: TraceBuilder, start: float) -> None:
            original(builder, start)
            builder.events[-1]["args"]["grid"] = [ROWS, 1, 1]

    (finding,) = found(decode(tmp_path / "t.json", layer))
    assert finding.severity == "high"
    assert finding.evidence["calls_per_step"] == LAYERS
    assert finding.cost_ms_per_step == pytest.approx(finding.evidence["launches_per_step"] * 0.090)
    assert finding.evidence["pool_rows"] in (ROWS, 100_000)
    assert finding.evidence["elements_per_call"] == finding.evidence["pool_rows"] * finding.evidence["pool_width"]


def test_evidence_of_a_cast(tmp_path: Path):
    (finding,) = found(decode(tmp_path / "t.json", POOL_COPIES["cast"]))
    evidence = finding.evidence
    assert evidence["shapes"] == [[ROWS, 1, 576], [ROWS, 1, 576]]
    assert evidence["dtypes"] == ["BFloat16", "Float8_e4m3fn"]
    assert (evidence["pool_rows"], evidence["pool_width"], evidence["pool_source"]) == (ROWS, 576, "recurrence")
    assert evidence["bytes_per_launch"] == ROWS * 576 * 3
    assert evidence["bytes_per_step"] == ROWS * 576 * 3 * LAYERS
    assert evidence["bytes_per_second"] == pytest.approx(ROWS * 576 * 3 / 90e-6, rel=1e-6)
    assert evidence["peak_bytes_per_second"] == 4.8e12
    assert "mla-diag fix --apply" in finding.remedy
    assert "from Float8_e4m3fn to BFloat16 4 times a step" in finding.title


def test_the_account_of_another_server_does_not_hide_the_pool(tmp_path: Path):
    server = parse_server_info({"max_total_num_tokens": 7 * ROWS, "page_size": 1})
    (finding,) = found(decode(tmp_path / "t.json", POOL_COPIES["cast"]), server=server)
    assert (finding.evidence["pool_rows"], finding.evidence["pool_source"]) == (ROWS, "recurrence")


def one_layer(path: Path, steps: int) -> Path:
    builder = TraceBuilder()
    for step in range(steps):
        builder.span("step[DECODE bs=1]", 1_000 * step, 900)
        POOL_COPIES["cast"](builder, 1_000 * step + 10)
    return builder.write(path)


def test_a_pool_recurs_over_steps_where_there_is_one_layer(tmp_path: Path):
    (finding,) = found(one_layer(tmp_path / "two.json", 2))
    assert finding.evidence["calls_per_step"] == 1


def test_one_copy_of_one_step_recurs_nowhere(tmp_path: Path):
    """It may be anything; only the server can tell that it is the pool."""
    path = one_layer(tmp_path / "one.json", 1)
    assert found(path) == []
    assert len(found(path, server=parse_server_info({"max_total_num_tokens": ROWS - 1, "page_size": 1}))) == 1


NEAR_MISSES = {
    "a weight cast of the same bytes": one_op(
        "aten::copy_", **tensor_arguments(([18_000, 3_200], BF16), ([18_000, 3_200], FP8))
    ),
    "the cast of a batch of expert weights": one_op(
        "aten::copy_", **tensor_arguments(([256, 2_048, 512], BF16), ([256, 2_048, 512], FP8))
    ),
    "a transposed weight of the latent's width": one_op(
        "aten::copy_", **tensor_arguments(([7_168, 576], BF16), ([7_168, 576], BF16))
    ),
    "index_put of a row": one_op(
        "aten::index_put_", dims=[[ROWS, 1, 576], [], [1, 1, 576], []], types=[FP8, "", FP8, "Scalar"]
    ),
    "index_select of a few rows": one_op(
        "aten::index_select", **tensor_arguments(([ROWS, 1, 576], FP8), ([2_000], "long int"))
    ),
    "gather of a few rows' elements": one_op(
        "aten::gather", **tensor_arguments(([ROWS, 1, 576], FP8), ([2_000, 1, 576], "long int"))
    ),
    "a copy of as many scales as the pool has rows": one_op(
        "aten::copy_", **tensor_arguments(([ROWS, 1], "float"), ([ROWS, 1], "float"))
    ),
    "keys of a cached prefix, after a product in FP8": in_order(
        one_op("sgl_kernel::fp8_scaled_mm", **tensor_arguments(([20_000, 512], FP8), ([512, 4_096], FP8))),
        one_op("aten::cat", dims=[[[20_000, 16, 128], [20_000, 16, 64]], []], types=["TensorList", "Scalar"]),
    ),
    "keys of a cached prefix beside the pool": in_order(
        one_op("aiter::mla_decode_fwd", **tensor_arguments(([ROWS, 1, 576], FP8))),
        one_op("aten::copy_", **tensor_arguments(([20_000, 128, 128], BF16), ([20_000, 128, 128], BF16))),
    ),
    "the queries of drafts that are verified": one_op(
        "aten::copy_", **tensor_arguments(([256, 128, 576], BF16), ([256, 128, 576], BF16))
    ),
    "advanced index of a few rows": one_op(
        "aten::index",
        kernel="void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
        **tensor_arguments(([ROWS, 1, 576], FP8)),
    ),
    "a fill of the pool": one_op("aten::fill_", **tensor_arguments(([ROWS, 1, 576], FP8))),
    "attention over the pool": one_op(
        "aiter::mla_decode_fwd", **tensor_arguments(([1, 16, 576], BF16), ([ROWS, 1, 576], FP8), ([1, 16, 512], BF16))
    ),
}


@pytest.mark.parametrize("layer", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_what_only_looks_like_a_pool_copy_is_not_one(tmp_path: Path, layer: Callable[[TraceBuilder, float], None]):
    assert found(decode(tmp_path / "t.json", layer)) == []


@pytest.mark.parametrize("layer", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_nor_when_the_server_tells_the_size_of_its_pool(tmp_path: Path, layer: Callable[[TraceBuilder, float], None]):
    server = parse_server_info({"max_total_num_tokens": ROWS - 1, "page_size": 1, "kv_cache_dtype": "fp8_e4m3"})
    assert found(decode(tmp_path / "t.json", layer), server=server) == []


def test_a_prefill_activation_of_as_many_rows_as_the_pool_is_none(tmp_path: Path):
    """The rows of an activation are the step's tokens, whatever the pool's size."""
    layer = one_op("aten::copy_", **tensor_arguments(([16_384, 16, 192], BF16), ([16_384, 16, 192], BF16)))
    path = decode(tmp_path / "t.json", layer, name="step[EXTEND bs=2 toks=16384]")
    assert found(path) == []
    assert found(path, server=parse_server_info({"max_total_num_tokens": 16_384, "page_size": 1})) == []


def test_an_activation_that_is_multiplied_with_weights_is_none(tmp_path: Path):
    def layer(builder: TraceBuilder, start: float) -> None:
        one_op("aten::copy_", **tensor_arguments(([8_944, 16, 64], BF16), ([8_944, 16, 64], BF16)))(builder, start)
        builder.dispatch(
            "aten::mm",
            start + 300,
            [("gemm", start + 310, 9)],
            **tensor_arguments(([8_944, 64], BF16), ([64, 64], BF16)),
        )

    assert found(decode(tmp_path / "t.json", layer, name="ProfilerStep#3")) == []


def test_a_memset_of_the_pool_at_start_up_is_none(tmp_path: Path):
    builder = TraceBuilder()
    call = builder.launch(-1000, name="cudaMemsetAsync")
    builder.memset(-900, 300, call, size=ROWS * 576)
    builder.span("step[DECODE bs=1]", 0, 1000)
    builder.dispatch("aten::mm", 10, [("gemm", 20, 60)], **tensor_arguments(([1, 64], BF16), ([64, 64], BF16)))
    assert found(builder.write(tmp_path / "t.json")) == []


def test_an_index_is_not_what_the_pool_is_converted_from(tmp_path: Path):
    """Its type is another than the pool's, and no cast is made."""
    (finding,) = found(decode(tmp_path / "t.json", POOL_COPIES["index_select of every row"]))
    assert "576, is copied 4 times a step" in finding.title


def test_each_pool_that_is_copied_has_its_own_finding(tmp_path: Path):
    """The BF16 pool of a draft model beside the FP8 pool of the model; keys wider than values are two pools too."""
    draft = one_op("aten::clone", **tensor_arguments(([ROWS, 8, 128], BF16)))
    path = decode(tmp_path / "t.json", in_order(POOL_COPIES["cast"], draft))
    for server in (None, SERVER):
        findings = {finding.evidence["pool_width"]: finding for finding in found(path, server=server)}
        assert set(findings) == {576, 1024}
        assert [findings[width].evidence["calls_per_step"] for width in (576, 1024)] == [LAYERS, LAYERS]
        assert findings[576].evidence["elements_per_call"] == ROWS * 576
        assert findings[1024].evidence["elements_per_call"] == ROWS * 1024
        assert "converted from Float8_e4m3fn to BFloat16" in findings[576].title
        assert "is copied" in findings[1024].title


def test_a_flat_index_of_the_pools_rows_that_is_copied_is_found(tmp_path: Path):
    """Sparse attention keeps 132 bytes for each token beside the latents."""
    latents = one_op("aiter::mla_decode_fwd", **tensor_arguments(([1, 16, 576], BF16), ([ROWS, 1, 576], FP8)))
    copy = one_op("aten::clone", **tensor_arguments(([ROWS, 132], "unsigned char")))
    path = decode(tmp_path / "t.json", in_order(latents, copy))
    for server in (None, SERVER):
        (finding,) = found(path, server=server)
        assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS, 132)


def test_a_copy_of_every_rows_rope_is_found_and_called_a_slice(tmp_path: Path):
    """Its cost grows with the pool's rows, though it is a ninth of the elements."""
    view = {
        "dims": [[ROWS, 1, 64], [ROWS, 1, 64]],
        "types": [BF16, BF16],
        "strides": [[64, 64, 1], [576, 576, 1]],
    }
    path = decode(tmp_path / "t.json", one_op("aten::copy_", **view))
    for server in (None, SERVER):
        (finding,) = found(path, server=server)
        assert f"a slice of 64 of the whole KV pool, {ROWS:,} rows of 576, is copied" in finding.title
        assert finding.evidence["elements_per_call"] == ROWS * 64


def test_a_batch_of_as_many_tokens_as_the_server_has_rows_is_no_pool(tmp_path: Path):
    layer = one_op("aten::copy_", **tensor_arguments(([ROWS, 16, 192], BF16), ([ROWS, 16, 192], BF16)))
    path = decode(tmp_path / "t.json", layer, name=f"step[EXTEND bs=2 toks={ROWS}]")
    assert found(path) == []
    assert found(path, server=SERVER) == []


# Under CUDA graphs: no shapes, only kernels, their launches and their order.


def blocks(elements: int) -> tuple[int, int, int]:
    return (-(-elements // ELEMENTS_A_BLOCK), 1, 1)


def replayed(path: Path, copies: list[int], bs: int = 1, *, attention: bool = True, steps: int = STEPS) -> Path:
    """Steps that replay a graph of 20 layers: the copies of so many elements, then attention, then fillers."""
    builder = TraceBuilder()
    for step in range(steps):
        at = 20_000 * step
        builder.span(f"step[DECODE bs={bs}]", at, 9_000)
        kernels, clock = [], at + 100
        for _ in range(20):
            for elements in copies:
                kernels.append((COPY, clock, 80, blocks(elements)))
                clock += 81
            kernels.append((ATTENTION if attention else "nvjet_gemm", clock, 20, (1, 132, 1)))
            clock += 21
            for number in range(4):
                kernels.append((f"nvjet_{number}", clock, 5, (32, 1, 1)))
                clock += 6
        builder.replay(at + 10, kernels)
    return builder.write(path)


def test_under_graphs_the_copy_before_each_attention_is_the_pool(tmp_path: Path):
    (finding,) = found(replayed(tmp_path / "t.json", [ROWS * 576]))
    assert finding.evidence["pool_rows"] == ROWS
    assert finding.evidence["elements_source"] == "geometry"
    assert 0 <= finding.evidence["elements_per_call"] - ROWS * 576 < ELEMENTS_A_BLOCK
    assert finding.cost_ms_per_step == pytest.approx(20 * 0.080)
    assert finding.confidence == "medium"
    assert finding.cause is not None
    assert finding.cause.inferred
    assert (finding.cause.file, finding.cause.function) == (
        "sglang/srt/layers/attention/flashinfer_mla_backend.py",
        "forward_decode",
    )


def test_under_graphs_the_server_confirms_the_pool(tmp_path: Path):
    server = parse_server_info({"max_total_num_tokens": ROWS - 1, "page_size": 1, "attention_backend": "fa3"})
    (finding,) = found(replayed(tmp_path / "t.json", [ROWS * 576]), server=server)
    assert (finding.evidence["pool_source"], finding.confidence) == ("server-info", "high")
    assert finding.evidence["pool_rows"] == ROWS


def test_under_graphs_the_server_tells_the_width_of_a_pool_that_is_not_mlas(tmp_path: Path):
    (finding,) = found(replayed(tmp_path / "t.json", [ROWS * 8 * 128]), server=SERVER)
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS, 1024)
    assert (finding.evidence["pool_source"], finding.confidence) == ("server-info", "high")


def test_under_graphs_the_account_of_another_server_does_not_hide_the_pool(tmp_path: Path):
    server = parse_server_info({"max_total_num_tokens": 7 * ROWS, "page_size": 1})
    (finding,) = found(replayed(tmp_path / "t.json", [ROWS * 576]), server=server)
    assert (finding.evidence["pool_rows"], finding.evidence["pool_source"]) == (ROWS, "geometry")


def test_under_graphs_a_pool_of_over_2_gib_is_copied_in_several_kernels(tmp_path: Path):
    """TensorIterator splits what 32-bit offsets cannot reach: seen as four kernels a layer with SGLang 0.5.9."""
    rows = 4_000_000
    (finding,) = found(replayed(tmp_path / "t.json", [rows * 576 // 4] * 4))
    assert finding.evidence["pool_rows"] == rows
    assert finding.evidence["elements_per_call"] == rows * 576
    assert (finding.evidence["calls_per_step"], finding.evidence["launches_per_step"]) == (20, 80)
    assert finding.cost_ms_per_step == pytest.approx(20 * 4 * 0.080)


def both_stages(path: Path, shapes: Callable[[TraceBuilder, float], None], copies: list[int]) -> Path:
    """A prefill without a graph, which shows a pool's shape, before the decode steps of `replayed`."""
    replayed(path, copies)
    decode_events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    builder = TraceBuilder()
    builder.span("step[EXTEND bs=1 toks=64]", -50_000, 40_000)
    for layer in range(LAYERS):
        shapes(builder, -49_000 + 2_000 * layer)
    for event in decode_events:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] += 1_000
    builder.events += decode_events
    return builder.write(path)


def test_under_graphs_keys_and_values_are_a_copy_each(tmp_path: Path):
    attention = one_op("sgl_kernel::fwd", **tensor_arguments(([ROWS, 8, 128], BF16), ([ROWS, 8, 128], BF16)))
    (finding,) = found(both_stages(tmp_path / "t.json", attention, [ROWS * 1024] * 2))
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS, 1024)
    assert 0 <= finding.evidence["elements_per_call"] - ROWS * 1024 < ELEMENTS_A_BLOCK
    assert (finding.evidence["calls_per_step"], finding.confidence) == (40, "high")


def test_under_graphs_a_pool_of_the_same_rows_that_no_shape_showed_is_told_by_its_size(tmp_path: Path):
    """Decode copies the pool of a draft model, prefill shows the model's own."""
    attention = one_op("sgl_kernel::fwd", **tensor_arguments(([ROWS, 1, 576], BF16)))
    (finding,) = found(both_stages(tmp_path / "t.json", attention, [ROWS * 1024]))
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"]) == (ROWS, 1024)
    assert (finding.evidence["pool_source"], finding.confidence) == ("geometry", "medium")


def test_under_graphs_a_pool_far_narrower_than_the_first_is_told_by_its_size(tmp_path: Path):
    models = one_op("sgl_kernel::fwd", **tensor_arguments(([ROWS, 1, 576], BF16)))
    drafts = one_op("sgl_kernel::fwd", **tensor_arguments(([ROWS, 2, 64], BF16), ([ROWS, 2, 64], BF16)))
    (finding,) = found(both_stages(tmp_path / "t.json", in_order(models, drafts), [ROWS * 128]))
    assert (finding.evidence["pool_rows"], finding.evidence["pool_width"], finding.confidence) == (ROWS, 128, "high")


def test_under_graphs_a_copy_of_no_pools_size_is_hardly_sure(tmp_path: Path):
    attention = one_op("sgl_kernel::fwd", **tensor_arguments(([ROWS, 1, 576], BF16)))
    (finding,) = found(both_stages(tmp_path / "t.json", attention, [ROWS * 1024 + ROWS // 2]))
    assert (finding.evidence["pool_width"], finding.confidence) == (576, "low")


@pytest.mark.parametrize(
    ("copies", "bs", "attention"),
    [
        pytest.param([128 * 576 * 256], 256, True, id="the cast of the queries of a large batch"),
        pytest.param([16 * 576], 1, True, id="the cast of one query"),
        pytest.param([ROWS * 576], 1, False, id="a weight cast, before a matrix product"),
    ],
)
def test_under_graphs_what_follows_the_batch_or_precedes_no_attention_is_none(
    tmp_path: Path, copies: list[int], bs: int, attention: bool
):
    assert found(replayed(tmp_path / "t.json", copies, bs, attention=attention)) == []
