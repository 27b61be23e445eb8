"""The patched backends give the attention that they gave before, whatever reads the pool.

The two small backends of tests/fix/data run here, unpatched and patched, over an FP8 pool on the CPU. What they call is
attention in float32 with the interfaces and the dtype checks of FlashInfer and FlashAttention (data/reference.py).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mla_diag.fix.locate import find_installation
from mla_diag.fix.patch import apply
from mla_diag.fix.strategy import Strategy
from tests.fix.conftest import install

torch = pytest.importorskip("torch")

HEADS, ROWS, SCALE = 16, 160, 192**-0.5
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LAYER = SimpleNamespace(layer_id=0, head_dim=576, v_head_dim=512, tp_q_head_num=HEADS, scaling=SCALE)


class Sglang:
    """The modules of the small SGLang that is first on the path."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(f"sglang.srt.layers.attention.{name}")


@pytest.fixture(scope="module")
def installations(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """SGLang as it ships (None) and patched with each strategy."""
    directories = {}
    for strategy in (None, "auto", "native", "gather", "kernel"):
        directory = directories[strategy] = tmp_path_factory.mktemp(strategy or "shipped")
        root = install(directory)
        if strategy is not None:
            apply(find_installation(root), Strategy(strategy))
    return directories


@pytest.fixture
def sglang(installations: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give a function that makes one of the installations the one that is imported."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]

    def choose(strategy: str | None) -> Sglang:
        forget()
        monkeypatch.syspath_prepend(installations[strategy])
        return Sglang()

    yield choose
    forget()


def pool_of(dtype: torch.dtype = E4M3, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, 1, 576, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def runner(pool: torch.Tensor, page_size: int = 1) -> SimpleNamespace:
    pools = SimpleNamespace(get_key_buffer=lambda layer_id: pool)
    return SimpleNamespace(
        token_to_kv_pool=pools, dtype=BF16, kv_cache_dtype=pool.dtype, scaling=SCALE, page_size=page_size
    )


def csr_batch(lengths: list[int], q_lengths: list[int] | None = None, *, share: int = 0) -> SimpleNamespace:
    """Requests over scattered rows; the first `share` rows belong to all of them, as a cached prefix does."""
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(ROWS, generator=generator).int()
    own = [
        torch.cat([shuffled[:share], shuffled[share + 40 * i :][: length - share]]) for i, length in enumerate(lengths)
    ]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    counts = q_lengths or [1] * len(lengths)
    return SimpleNamespace(
        is_decode=q_lengths is None,
        kv_indptr=starts,
        # Past the end lie indices of an earlier step, which point outside the pool.
        kv_indices=torch.cat([*own, torch.full((5,), 1 << 30, dtype=torch.int32)]),
        q_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        attn_dcp_metadata=None,
        return_lse=True,
        q=torch.randn(sum(counts), HEADS, 576, generator=generator).to(BF16),
    )


def run_csr(sglang: Sglang, wrapper: str, pool: torch.Tensor, batch: SimpleNamespace) -> Any:
    make_wrapper = getattr(sglang.reference, wrapper)
    backend = sglang.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), make_wrapper)
    backend.init_forward_metadata(batch)
    method = backend.forward_decode if batch.is_decode else backend.forward_extend
    return method(batch.q, None, None, LAYER, batch)


BATCHES = {
    "decode": csr_batch([7, 1, 33]),
    "decode with an empty request": csr_batch([7, 0, 12]),
    "decode of nothing": csr_batch([0, 0]),
    "decode on a shared prefix": csr_batch([21, 25], share=20),
    "extend": csr_batch([17, 30], [17, 4]),
    "extend with an empty request": csr_batch([9, 0, 5], [3, 0, 5]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("wrapper", ["Wrapper", "Hopperless"])
def test_gather_equals_the_cast_bit_for_bit(sglang: Any, wrapper: str, batch: SimpleNamespace) -> None:
    pool = pool_of()
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    gathered = run_csr(sglang("gather"), wrapper, pool, batch)
    for one, other in zip(shipped, gathered, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrapper", ["Fp8Wrapper", "ScaleModeWrapper"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_native_reads_the_pool_itself_with_scale_one(sglang: Any, wrapper: str, batch: SimpleNamespace) -> None:
    pool = pool_of()
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    native = run_csr(sglang("native"), wrapper, pool, batch)
    for one, other in zip(shipped, native, strict=True):
        # Widening e4m3 to BF16 is exact, so in this reference nothing may differ.
        assert torch.equal(one, other)


def test_rows_that_nobody_refers_to_do_not_matter(sglang: Any) -> None:
    batch, pool = csr_batch([7, 1, 33]), pool_of()
    patched = sglang("gather")
    clean = run_csr(patched, "Wrapper", pool, batch)
    unused = torch.ones(ROWS, dtype=torch.bool)
    unused[batch.kv_indices[: batch.kv_indptr[-1]].long()] = False
    poisoned = pool.view(torch.uint8).masked_fill(unused[:, None, None], 0x7F).view(E4M3)
    assert poisoned.float().isnan().any()
    for one, other in zip(clean, run_csr(patched, "Wrapper", poisoned, batch), strict=True):
        assert torch.equal(one, other)


def test_gather_casts_no_more_than_the_referenced_rows(sglang: Any) -> None:
    patched, pool, batch = sglang("gather"), pool_of(), csr_batch([21, 25], share=20)
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Wrapper)
    backend.init_forward_metadata(batch)
    wrapper = backend.forward_metadata.decode_wrapper
    # 20 shared rows count once.
    assert patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, wrapper).shape == (26, 1, 576)


def test_gather_of_pages_of_several_tokens(sglang: Any) -> None:
    # SGLang 0.5.1 plans with the server's page size.
    patched, pool = sglang("gather"), pool_of()
    dispatch, wrapper = patched.mla_fp8_dispatch, patched.reference.Wrapper()
    direct = patched.reference.Wrapper()
    q = torch.randn(2, HEADS, 576, generator=torch.Generator().manual_seed(2)).to(BF16)
    plan = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]).int(), torch.tensor([9, 3, 7]).int(), torch.tensor([8, 4])]
    plan += [HEADS, 512, 64, 4, False, SCALE, BF16]
    dispatch.plan(wrapper, *plan, E4M3)
    direct.plan(*plan, BF16)
    kv = dispatch.kv_for_wrapper(pool, BF16, wrapper).view(-1, 4, 576)
    assert kv.shape == (3, 4, 576)
    out = dispatch.run(wrapper, q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:])
    whole = pool.to(BF16).view(-1, 4, 576)
    assert torch.equal(out, direct.run(q[..., :512], q[..., 512:], whole[..., :512], whole[..., 512:]))


def test_dcp_buffer_is_read_in_the_pools_place(sglang: Any) -> None:
    pool, buffer = pool_of(), pool_of(rows=40, seed=5)
    batch = csr_batch([12, 20], [12, 4])
    batch.kv_indices = torch.arange(32).int()
    batch.attn_dcp_metadata = SimpleNamespace(dcp_kv_buffer=buffer)
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    assert torch.equal(shipped, run_csr(sglang("gather"), "Wrapper", pool, batch))
    assert torch.equal(shipped, run_csr(sglang("native"), "Fp8Wrapper", pool, batch))


FALLBACKS = {
    "FlashInfer too old": ("native", "Wrapper", E4M3, "takes no ckv_scale"),
    "GPU that it is not for": ("native", "Hopperless", E4M3, "requires an SM90"),
    "e5m2 pool": ("native", "Fp8Wrapper", torch.float8_e5m2, "reads float8_e4m3fn, not torch.float8_e5m2"),
}


@pytest.mark.parametrize(("strategy", "wrapper", "dtype", "why"), FALLBACKS.values(), ids=FALLBACKS.keys())
def test_fallback_is_the_shipped_cast_with_one_warning(
    sglang: Any, caplog: pytest.LogCaptureFixture, strategy: str, wrapper: str, dtype: torch.dtype, why: str
) -> None:
    pool, batch = pool_of(dtype), csr_batch([7, 1, 33])
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    patched = sglang(strategy)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fallen = run_csr(patched, wrapper, pool, batch)
    for one, other in zip(shipped, fallen, strict=True):
        assert torch.equal(one, other)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "casting the whole KV pool" in warnings[0]
    assert why in warnings[0]


@pytest.mark.parametrize("strategy", ["auto", "native", "gather"])
def test_bf16_pool_is_left_alone_without_a_word(sglang: Any, caplog: pytest.LogCaptureFixture, strategy: str) -> None:
    pool, batch = pool_of(BF16), csr_batch([7, 1, 33])
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    patched = sglang(strategy)
    with caplog.at_level(logging.WARNING):
        out = run_csr(patched, "Fp8Wrapper", pool, batch)
    assert all(torch.equal(one, other) for one, other in zip(shipped, out, strict=True))
    assert not caplog.records
    wrapper = patched.reference.Fp8Wrapper()
    assert patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, wrapper) is pool


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no FP4")
@pytest.mark.parametrize("strategy", ["auto", "gather"])
def test_fp4_pool_that_is_handed_out_in_bf16_is_left_alone(sglang: Any, strategy: str) -> None:
    """SGLang's MLATokenToKVPoolFP4 dequantises the whole pool in get_key_buffer: no row may be taken for another."""
    pool, batch = pool_of(BF16), csr_batch([7, 1, 33])

    def run(strategy: str | None) -> Any:
        chosen = sglang(strategy)
        model = runner(pool)
        model.kv_cache_dtype = torch.float4_e2m1fn_x2
        backend = chosen.flashinfer_mla_backend.FlashInferMLAAttnBackend(model, chosen.reference.Wrapper)
        backend.init_forward_metadata(batch)
        return backend.forward_decode(batch.q, None, None, LAYER, batch)

    assert all(torch.equal(one, other) for one, other in zip(run(None), run(strategy), strict=True))


def test_a_plan_over_gathered_rows_holds_for_a_buffer_of_another_dtype(sglang: Any) -> None:
    pool, batch = pool_of(), csr_batch([7, 1, 33])
    shipped = run_csr(sglang(None), "Wrapper", pool.to(BF16), batch)
    chosen, model = sglang("gather"), runner(pool.to(BF16))
    model.kv_cache_dtype = E4M3
    backend = chosen.flashinfer_mla_backend.FlashInferMLAAttnBackend(model, chosen.reference.Wrapper)
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(batch.q, None, None, LAYER, batch)
    assert all(torch.equal(one, other) for one, other in zip(shipped, out, strict=True))


def test_environment_turns_the_fix_off(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched, pool, batch = sglang("native"), pool_of(), csr_batch([7])
    monkeypatch.setenv("MLA_FP8_STRATEGY", "cast")
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Fp8Wrapper)
    backend.init_forward_metadata(batch)
    assert patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, backend.forward_metadata.decode_wrapper).dtype == BF16


@pytest.mark.parametrize(
    ("order", "dtype", "rows"),
    [(("native", "gather"), E4M3, ROWS), (("gather", "native"), BF16, 7), (("cast",), BF16, ROWS)],
)
def test_auto_takes_the_first_of_its_order_that_works(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...], dtype: torch.dtype, rows: int
) -> None:
    patched, pool = sglang("auto"), pool_of()
    monkeypatch.setattr(patched.mla_fp8_dispatch, "ORDER", order)
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Fp8Wrapper)
    backend.init_forward_metadata(csr_batch([7]))
    kv = patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, backend.forward_metadata.decode_wrapper)
    assert (kv.dtype, len(kv)) == (dtype, rows)


def graph_buffers(requests: int) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "qo_indptr": torch.zeros(requests + 1, dtype=torch.int32),
        "kv_indptr": torch.zeros(requests + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(ROWS, dtype=torch.int32),
    }


def test_graph_wrapper_keeps_the_cast_under_gather(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    patched, pool, batch = sglang("gather"), pool_of(), csr_batch([7, 12])
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Wrapper)
    wrapper = backend.capture(batch, graph_buffers(2))
    with caplog.at_level(logging.WARNING):
        assert patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, wrapper).shape == pool.shape
    assert "CUDA graphs replay with indices that it cannot rewrite" in caplog.text


def test_replay_by_sglangs_fast_plan_keeps_the_captures_strategy(sglang: Any) -> None:
    patched, pool = sglang("native"), pool_of()
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.ScaleModeWrapper)
    wrapper = backend.capture(csr_batch([7, 12]), graph_buffers(2))
    backend.replay(wrapper, csr_batch([9, 30]))
    assert patched.mla_fp8_dispatch.kv_for_wrapper(pool, BF16, wrapper) is pool
    assert wrapper.scale_mode == "kv-per-tensor"


def page_batch(lengths: list[int], page: int, q_lengths: list[int] | None = None) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(3)
    counts = q_lengths or [1] * len(lengths)
    widest = max(-(-length // page) for length in lengths) + 2
    pages = torch.randperm(ROWS // page, generator=generator).int()
    # Unused places of a page table hold what was there before.
    table = torch.full((len(lengths), widest), 1 << 20, dtype=torch.int32)
    for request, length in enumerate(lengths):
        used = -(-length // page)
        table[request, :used] = pages[3 * request : 3 * request + used]
    metadata = SimpleNamespace(
        page_table=table,
        cache_seqlens_int32=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
    )
    q = torch.randn(sum(counts), HEADS, 576, generator=generator).to(BF16)
    return SimpleNamespace(metadata=metadata, q=q, is_decode=q_lengths is None)


def run_paged(sglang: Sglang, pool: torch.Tensor, batch: SimpleNamespace, page: int) -> Any:
    backend = sglang.flashattention_backend.FlashAttentionBackend(runner(pool, page))
    # The reference reads every page that the table names; the real kernel only those below the length.
    batch.metadata.page_table = batch.metadata.page_table.clamp(max=ROWS // page - 1)
    method = backend.forward_decode if batch.is_decode else backend.forward_extend
    out = method(batch.q, None, None, LAYER, batch)
    return out if isinstance(out, tuple) else (out,)


PAGED = {
    "decode, page 1": ([3, 1], 1, None),
    "decode, page 4, ends at a border": ([8, 5], 4, None),
    "decode, page 16, an empty request": ([20, 0], 16, None),
    "extend, page 4": ([9, 6], 4, [9, 2]),
    "extend, page 3": ([5, 3], 3, [2, 3]),
}


@pytest.mark.parametrize(("lengths", "page", "q_lengths"), PAGED.values(), ids=PAGED.keys())
def test_gather_by_page_table_equals_the_cast(
    sglang: Any, lengths: list[int], page: int, q_lengths: list[int] | None
) -> None:
    pool = pool_of(rows=ROWS // page * page)
    shipped = run_paged(sglang(None), pool, page_batch(lengths, page, q_lengths), page)
    gathered = run_paged(sglang("gather"), pool, page_batch(lengths, page, q_lengths), page)
    for one, other in zip(shipped, gathered, strict=True):
        assert torch.equal(one, other)


def test_gather_by_page_table_takes_only_live_pages(sglang: Any) -> None:
    dispatch = sglang("gather").mla_fp8_dispatch
    batch, pool = page_batch([9, 0, 4], 4), pool_of().view(-1, 4, 1, 576)
    table, lengths = batch.metadata.page_table, batch.metadata.cache_seqlens_int32
    pages, remapped = dispatch._gather_pages(pool, BF16, table, lengths)
    assert pages.shape == (4, 4, 1, 576)
    assert remapped.dtype == table.dtype
    for request, used in enumerate((3, 0, 1)):
        own = remapped[request, :used].long()
        assert torch.equal(pages[own], pool[table[request, :used].long()].to(BF16))
    assert int(remapped.max()) < 4


def test_native_leaves_the_page_table_backend_to_the_cast(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of()
    shipped = run_paged(sglang(None), pool, page_batch([3, 1], 1), 1)
    patched = sglang("native")
    with caplog.at_level(logging.WARNING):
        out = run_paged(patched, pool, page_batch([3, 1], 1), 1)
    assert all(torch.equal(one, other) for one, other in zip(shipped, out, strict=True))
    assert "FlashAttention has no kernel for an FP8 pool" in caplog.text


CALL = {"qv": 1, "page_table": 1, "cache_seqlens": 1, "cu_seqlens_q": 1, "softmax_scale": 1.0, "causal": True}
REFUSED = {
    "a logit cap": ({"softcap": 30.0}, "no logit cap"),
    "a sliding window": ({"window_size": (128, 0)}, "no sliding window"),
    "sinks": ({"sinks": torch.ones(1)}, "no sinks"),
    "what a later release adds": ({"rel_bias": torch.ones(1)}, "no rel_bias"),
    "no page table": ({"page_table": None}, "the call has no page_table"),
    "one split, of --enable-deterministic-inference": ({"num_splits": 1, "ver": 3}, "the same result in every batch"),
    "one split, in releases without a choice of kernels": ({"num_splits": 1}, "the same result in every batch"),
}


@pytest.mark.parametrize(("options", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_kernel_refuses_a_call_with(sglang: Any, options: dict[str, Any], why: str) -> None:
    assert why in sglang("auto").mla_fp8_dispatch._call_refusal(CALL | options)


def test_kernel_takes_the_call_that_sglang_makes(sglang: Any) -> None:
    options = {"softcap": 0.0, "window_size": (-1, -1), "k_descale": None, "v_descale": None, "num_splits": 0, "ver": 3}
    options |= {"cu_seqlens_k_new": torch.ones(1), "max_seqlen_q": 1, "return_softmax_lse": True}
    assert sglang("auto").mla_fp8_dispatch._call_refusal(CALL | options) is None


@pytest.mark.parametrize("options", [{"num_splits": 1, "ver": 4}, {"window_size": None}], ids=str)
def test_kernel_takes_what_asks_nothing_of_it(sglang: Any, options: dict[str, Any]) -> None:
    """FlashAttention 4 is always told to make one split."""
    assert sglang("auto").mla_fp8_dispatch._call_refusal(CALL | options) is None


def test_parts_of_different_rows_are_not_joined(sglang: Any) -> None:
    dispatch, pool = sglang("gather").mla_fp8_dispatch, pool_of()
    joined = dispatch._joined(pool[..., :512], pool[..., 512:])
    assert joined.data_ptr() == pool.data_ptr()
    assert torch.equal(joined.float(), pool.float())
    with pytest.raises(ValueError, match="not views of the same rows"):
        dispatch._joined(pool[..., :512], pool.clone()[..., 512:])
    with pytest.raises(ValueError, match="not views of the same rows"):
        dispatch._joined(pool[..., :512], pool[::2][..., 512:])


def test_the_stride_of_a_single_row_does_not_matter(sglang: Any) -> None:
    """Views give it any value."""
    dispatch, pool = sglang("gather").mla_fp8_dispatch, pool_of(rows=1)
    rope = pool[..., 512:].as_strided((1, 1, 64), (7, 9, 1), 512)
    assert torch.equal(dispatch._joined(pool[..., :512], rope).float(), pool.float())


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@interpreted
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_kernel_agrees_with_the_cast(sglang: Any, batch: SimpleNamespace) -> None:
    pool = pool_of()
    shipped = run_csr(sglang(None), "Wrapper", pool, batch)
    read = run_csr(sglang("kernel"), "Wrapper", pool, batch)
    for one, other in zip(shipped, read, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)


@interpreted
def test_a_call_that_the_kernel_refuses_is_gathered(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    patched, batch = sglang("auto"), page_batch([9, 6], 4)
    metadata, pool = batch.metadata, pool_of().view(-1, 4, 1, 576)
    told = []

    def attend(*, num_splits: int, **options: Any) -> Any:
        told.append(num_splits)
        return patched.reference.flash_attn_with_kvcache(**options)

    def read(pool: torch.Tensor) -> torch.Tensor:
        return patched.mla_fp8_dispatch.flash_attn_with_kvcache(
            attend, q=batch.q[..., 512:], qv=batch.q[..., :512], k_cache=pool[..., 512:], v_cache=pool[..., :512],
            page_table=metadata.page_table.clamp(max=ROWS // 4 - 1), cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q, softmax_scale=SCALE, num_splits=1,
        )  # fmt: skip

    with caplog.at_level(logging.WARNING):
        assert torch.equal(read(pool), read(pool.to(BF16)))
    assert (told, caplog.records) == ([1, 1], [])


@interpreted
@pytest.mark.parametrize(("lengths", "page", "q_lengths"), PAGED.values(), ids=PAGED.keys())
def test_kernel_by_page_table_agrees_with_the_cast(
    sglang: Any, lengths: list[int], page: int, q_lengths: list[int] | None
) -> None:
    pool = pool_of(rows=ROWS // page * page)
    shipped = run_paged(sglang(None), pool, page_batch(lengths, page, q_lengths), page)
    read = run_paged(sglang("kernel"), pool, page_batch(lengths, page, q_lengths), page)
    for one, other in zip(shipped, read, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)


@interpreted
def test_kernel_replays_with_the_new_lengths(sglang: Any) -> None:
    pool, replayed = pool_of(), csr_batch([9, 30])
    shipped = run_csr(sglang(None), "Wrapper", pool, replayed)
    patched = sglang("kernel")
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Wrapper)
    wrapper = backend.capture(csr_batch([7, 12]), graph_buffers(2))
    # SGLang writes the indices of a replay into the captured buffer; the pointers reach it through the dispatch.
    wrapper._kv_indices_buf[: replayed.kv_indptr[-1]] = replayed.kv_indices[: replayed.kv_indptr[-1]]
    backend.replay(wrapper, replayed)
    out = backend.forward_decode(replayed.q, None, None, LAYER, replayed)
    for one, other in zip(shipped, out, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)


@interpreted
def test_layers_of_a_step_share_a_schedule_and_the_next_step_does_not(sglang: Any) -> None:
    patched, pool = sglang("kernel"), pool_of()
    backend = patched.flashinfer_mla_backend.FlashInferMLAAttnBackend(runner(pool), patched.reference.Wrapper)
    batch = csr_batch([7, 12])
    wrapper = backend.capture(batch, graph_buffers(2))
    made = []
    for _ in range(2):
        backend.forward_decode(batch.q, None, None, LAYER, batch)
        made.append(wrapper.mla_fp8_schedule[1])
    backend.replay(wrapper, batch)
    backend.forward_decode(batch.q, None, None, LAYER, batch)
    made.append(wrapper.mla_fp8_schedule[1])
    assert made[0] is made[1]
    assert made[1] is not made[2]


@interpreted
def test_a_hopper_card_that_cannot_have_its_kernel_is_named_once(
    sglang: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = sglang("kernel").mla_fp8_dispatch
    # This machine is told to have a Hopper card, and then nothing on it can be loaded.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch._kernel_refusal(torch.device("cuda:0"), E4M3, BF16, (512, 64)) is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith("the Triton kernel in place of Hopper's own, which is faster: no CUDA device")


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@on_a_gpu
def test_kernel_in_a_cuda_graph_replays_with_the_new_lengths(sglang: Any) -> None:
    pool, captured, replayed = pool_of(), csr_batch([7, 12]), csr_batch([9, 30])
    shipped, shipped_lse = run_csr(sglang(None), "Wrapper", pool, replayed)
    patched, card = sglang("kernel"), torch.device("cuda:0")
    dispatch, pool, q = patched.mla_fp8_dispatch, pool.to(card), replayed.q.to(card)
    buffers = {"use_cuda_graph": True} | {
        name: buffer.to(card) for name, buffer in graph_buffers(2).items() if name != "use_cuda_graph"
    }
    wrapper = patched.reference.Wrapper(**buffers)
    wrapper.device = card
    lengths = [captured.q_indptr, captured.kv_indptr, captured.kv_indices[:19], captured.kv_indptr.diff()]
    dispatch.plan(wrapper, *lengths, HEADS, 512, 64, 1, False, SCALE, BF16, E4M3)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        kv = dispatch.kv_for_wrapper(pool, BF16, wrapper)
        assert kv is pool
        return dispatch.run(wrapper, q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:], return_lse=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    # As SGLang replays: its fast plan sees host copies, the indices are written into the captured buffer.
    dispatch.plan(wrapper, planner=lambda *_, **__: None, device_kv_indptr=replayed.kv_indptr.to(card))
    wrapper._kv_indices_buf[:39] = replayed.kv_indices[:39].to(card)
    graph.replay()
    torch.testing.assert_close(out.cpu().float(), shipped.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu().float(), shipped_lse.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("lengths", "page", "q_lengths"), PAGED.values(), ids=PAGED.keys())
def test_kernel_by_page_table_on_a_gpu(sglang: Any, lengths: list[int], page: int, q_lengths: list[int] | None) -> None:
    pool, batch = pool_of(rows=ROWS // page * page), page_batch(lengths, page, q_lengths)
    shipped = run_paged(sglang(None), pool, batch, page)
    patched, on_card = sglang("kernel"), page_batch(lengths, page, q_lengths)
    on_card.q = batch.q.cuda()
    vars(on_card.metadata).update({name: value.cuda() for name, value in vars(batch.metadata).items()})
    read = run_paged(patched, pool.cuda(), on_card, page)
    for one, other in zip(shipped, read, strict=True):
        torch.testing.assert_close(one.float(), other.cpu().float(), atol=2e-2, rtol=2e-2)
