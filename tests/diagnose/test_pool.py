"""The pool's rows and width, whatever of it the ops of an attention backend are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_diag.diagnose.pool import Pool, find_pools
from mla_diag.diagnose.ranking import RankedOp, rank_ops
from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.diagnose.steps import find_steps
from mla_diag.trace.decode import read_trace
from mla_diag.trace.link import link
from tests.trace_builder import TraceBuilder

ROWS, PAGES, PAGE = 409_600, 6_400, 64
LAYERS = 4
BF16, FP8 = "c10::BFloat16", "c10::Float8_e4m3fn"

Given = tuple[list[int], list[int]]  # a tensor's shape and strides


def whole(*shape: int) -> Given:
    """A contiguous tensor."""
    return list(shape), [int(np.prod(shape[axis + 1 :], initial=1)) for axis in range(len(shape))]


def rows_of(width: int, *, whole_width: int = 576) -> Given:
    """A view of some columns of each row: `pool[..., :width]`."""
    return [ROWS, 1, width], [whole_width, whole_width, 1]


def pages_of(width: int) -> Given:
    """The same by pages, as FlashInfer's paged attention takes it."""
    return [PAGES, PAGE, width], [PAGE * 576, 576, 1]


FA3 = ([ROWS, 1, 1, 64], [576, 64, 64, 1]), ([ROWS, 1, 1, 512], [576, 512, 512, 1])
FLASHINFER = rows_of(512), rows_of(64)
# What attention is given of an MLA pool, after a cast of the whole pool or without one.
MLA = {
    "fa3": FA3,
    "flashinfer": FLASHINFER,
    "flashinfer, by pages": (pages_of(512), pages_of(64)),
    "flashmla and cutlass_mla": (whole(PAGES, PAGE, 1, 576),),
    "trtllm_mla": (whole(PAGES, 1, PAGE, 576),),
    "triton": (whole(ROWS, 1, 576), rows_of(512)),
    "rows only": (whole(ROWS, 1, 576),),
}
OTHERS = {
    "keys and values": ((whole(ROWS, 8, 128), whole(ROWS, 8, 128)), 1024),
    "by pages": ((whole(PAGES, PAGE, 8, 128), whole(PAGES, PAGE, 8, 128)), 1024),
    "halves of vLLM's blocks": ((([PAGES, PAGE, 8, 128], [2 * PAGE * 1024, 1024, 128, 1]),), 2048),
    "vLLM's blocks": ((whole(PAGES, 2, PAGE, 8, 128),), 2048),
    "the halves of one buffer": ((whole(2, PAGES, PAGE, 8, 128),), 2048),
}
# SGLang adds a page of padding to what the server says.
SERVERS = {
    "recurrence": None,
    "server-info": parse_server_info({"max_total_num_tokens": ROWS - PAGE, "page_size": PAGE}),
}


def ranked(
    path: Path, *ops: tuple[str, int, tuple[Given, ...]], kind: str = BF16, strides: bool = True
) -> list[RankedOp]:
    """A decode step whose layers run some ops, each of so many kernels on such tensors."""
    builder = TraceBuilder()
    builder.span("step[DECODE bs=1]", 0, 9_000)
    for layer in range(LAYERS):
        for number, (name, kernels, tensors) in enumerate(ops):
            start = 10 + 2_000 * layer + 300 * number
            arguments: dict[str, Any] = {
                "dims": [shape for shape, _ in tensors],
                "types": [kind for _ in tensors],
                "strides": [steps for _, steps in tensors] if strides else None,
            }
            runs = [("kernel", start + 50 + 100 * part, 90) for part in range(kernels)]
            builder.dispatch(name, start, runs, **arguments)
    trace = read_trace(builder.write(path))
    links = link(trace)
    steps = find_steps(trace, links, 0)
    return rank_ops(trace, links, np.flatnonzero(steps.inside >= 0), 1)


def pools(ops: list[RankedOp], source: str) -> list[Pool]:
    found = find_pools(ops, ["step[DECODE bs=1]"], SERVERS[source])
    assert {pool.source for pool in found} == {source}
    return found


CAST = ("aten::copy_", 1, (whole(ROWS, 1, 576), whole(ROWS, 1, 576)))


@pytest.mark.parametrize("source", SERVERS)
@pytest.mark.parametrize("kind", [BF16, FP8])
@pytest.mark.parametrize("strides", [True, False], ids=["strides", "no strides"])
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "healthy"])
@pytest.mark.parametrize("given", MLA.values(), ids=MLA.keys())
def test_the_width_of_mla_is_that_of_whole_rows(
    tmp_path: Path, given: tuple[Given, ...], copied: bool, strides: bool, kind: str, source: str
):
    """FlashAttention-3's latent and rope were given to twice as many launches as the copies, and won."""
    ops = [*([CAST] if copied else []), ("sgl_kernel::fwd", 2, given)]
    (pool,) = pools(ranked(tmp_path / "t.json", *ops, kind=kind, strides=strides), source)
    assert (pool.rows, pool.width, pool.confidence) == (ROWS, 576, "high")


@pytest.mark.parametrize("source", SERVERS)
@pytest.mark.parametrize(("given", "width"), OTHERS.values(), ids=OTHERS.keys())
def test_the_width_of_heads_is_that_of_one_buffers_rows(
    tmp_path: Path, given: tuple[Given, ...], width: int, source: str
):
    (pool,) = pools(ranked(tmp_path / "t.json", ("aiter::mha_batch_prefill", 2, given)), source)
    assert (pool.rows, pool.width) == (ROWS, width)


def test_pages_that_keep_their_heads_apart_are_known_by_the_servers_rows(tmp_path: Path):
    """`[pages, heads, page size, width]`: without the server the elements are right, and the rows may be heads."""
    ops = ranked(tmp_path / "t.json", ("trtllm", 2, (whole(PAGES, 8, PAGE, 128), whole(PAGES, 8, PAGE, 128))))
    (pool,) = pools(ops, "server-info")
    assert (pool.rows, pool.width) == (ROWS, 1024)
    (pool,) = pools(ops, "recurrence")
    assert pool.elements == ROWS * 1024


@pytest.mark.parametrize("source", SERVERS)
@pytest.mark.parametrize("strides", [True, False], ids=["strides", "no strides"])
def test_a_contiguous_latent_is_not_the_pool_that_it_is_copied_from(tmp_path: Path, strides: bool, source: str):
    """Attention is given the copy more often than the copy is made."""
    copy = ("aten::copy_", 1, (whole(ROWS, 1, 512), rows_of(512)))
    attention = ("sgl_kernel::fwd", 3, (whole(ROWS, 1, 512), rows_of(64)))
    (pool,) = pools(ranked(tmp_path / "t.json", copy, attention, strides=strides), source)
    assert (pool.rows, pool.width, pool.columns) == (ROWS, 576, {512, 64})


@pytest.mark.parametrize("source", SERVERS)
def test_contiguous_keys_are_not_the_blocks_that_they_are_copied_from(tmp_path: Path, source: str):
    keys = [PAGES, PAGE, 8, 128], [2 * PAGE * 1024, 1024, 128, 1]
    copy = ("aten::copy_", 1, (whole(PAGES, PAGE, 8, 128), keys))
    attention = ("vllm::unified_attention", 5, (whole(PAGES, PAGE, 8, 128),))
    (pool,) = pools(ranked(tmp_path / "t.json", copy, attention), source)
    assert (pool.rows, pool.width, pool.columns) == (ROWS, 2048, {1024})


def test_the_servers_rows_are_not_looked_for_in_a_batch_of_as_many_tokens():
    assert find_pools([], [f"step[EXTEND bs=1 toks={ROWS}]"], SERVERS["server-info"]) == []


@pytest.mark.parametrize("source", SERVERS)
def test_a_draft_models_pool_and_an_index_come_after_the_models_own(tmp_path: Path, source: str):
    ops = [
        ("sgl_kernel::fwd", 3, FA3),
        ("draft::attention", 1, (whole(ROWS, 8, 128), whole(ROWS, 8, 128))),
        ("index::logits", 1, (whole(ROWS, 132),)),
        ("scales", 9, (whole(ROWS, 1),)),
    ]
    assert [pool.width for pool in pools(ranked(tmp_path / "t.json", *ops), source)] == [576, 1024, 132]


def test_a_view_of_the_pool_is_held_and_another_width_only_spans_it():
    pool = Pool(ROWS, 576, "recurrence", "high", frozenset({512, 64}))
    assert pool.held_by([ROWS, 1, 576]) == 576
    assert pool.held_by([PAGES, PAGE, 1, 576]) == 576
    assert pool.held_by([PAGES, 1, PAGE, 576]) == 576
    assert pool.held_by([PAGES, PAGE, 512]) == 512
    assert pool.held_by([ROWS, 1, 1, 64]) == 64
    assert pool.held_by([ROWS, 1, 128]) is None
    assert pool.held_by([ROWS]) is None
    assert pool.spanned_by([ROWS, 1, 128])
    assert not pool.spanned_by([ROWS - 1, 1, 576])
