"""The Hopper kernel against float64, over heads, lengths, page sizes and query lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_diag.kernels import mla_fp8_sm90  # noqa: E402
from mla_diag.kernels.mla_fp8_sm90 import LATENT, WIDTH  # noqa: E402

REASON = mla_fp8_sm90.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SM_SCALE = (128 + 64) ** -0.5
NAN = 0x7F
RAGGED = [0, 1, 63, 64, 65, 1000, 4097, 20_000]


@dataclass
class Case:
    """A random problem; every pool row that no request owns is NaN, and so is the output before the call."""

    query: torch.Tensor
    pool: torch.Tensor
    rows: list[torch.Tensor]
    addressing: dict[str, Any]
    query_lens: list[int] | None

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, _ = self.query.shape
        options.setdefault("out", torch.full((tokens, heads, LATENT), torch.nan, device="cuda"))
        options.setdefault("lse", torch.full((tokens, heads), torch.nan, device="cuda"))
        query = options.pop("query", self.query)
        return mla_fp8_sm90.mla_fp8_sm90(query, self.pool, sm_scale=SM_SCALE, **self.addressing, **options)

    def reference(self, causal: bool = True, kv_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in float64, row by row, with a natural log-sum-exp."""
        tokens, heads, _ = self.query.shape
        out = torch.zeros(tokens, heads, LATENT, dtype=torch.float64, device="cuda")
        lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device="cuda")
        token = 0
        for rows, count in zip(self.rows, self.query_lens or [1] * len(self.rows), strict=True):
            keys = self.pool[rows].double() * kv_scale
            for i in range(count):
                visible = len(keys) - (count - 1 - i if causal else 0)
                if visible > 0:
                    seen = keys[:visible]
                    scores = self.query[token].double() @ seen.T * SM_SCALE
                    out[token] = scores.softmax(-1) @ seen[:, :LATENT]
                    lse[token] = scores.logsumexp(-1)
                token += 1
        return out, lse

    def check(self, tolerance: float = 3e-4, causal: bool = True, kv_scale: float = 1.0, **options: Any) -> None:
        got, lse = self.run(causal=causal, kv_scale=kv_scale, natural_lse=True, **options)
        want, want_lse = self.reference(causal, kv_scale)
        unseen = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, unseen)
        assert (got[unseen] == 0).all()
        assert torch.isfinite(got).all()
        assert relative_error(got, want) < tolerance
        torch.testing.assert_close(lse[~unseen].double(), want_lse[~unseen], rtol=1e-5, atol=1e-3)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def draw(
    heads: int,
    lens: list[int],
    *,
    query_lens: list[int] | None = None,
    page_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
    """A case with a CSR pair over single rows, or, with a page size, a page table."""
    generator = torch.Generator("cuda").manual_seed(seed)
    page = page_size or 1
    counts = [-(-n // page) for n in lens]
    slots = torch.randperm(sum(counts) + 3, generator=generator, device="cuda")[: sum(counts)].split(counts)
    offsets = torch.arange(page, device="cuda")
    rows = [(own[:, None] * page + offsets).flatten()[:n] for own, n in zip(slots, lens, strict=True)]
    pool = torch.full(((sum(counts) + 3) * page, WIDTH), NAN, dtype=torch.uint8, device="cuda")
    owned = torch.cat(rows)
    values = torch.randn(len(owned), WIDTH, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    pool[owned] = values.view(torch.uint8)
    addressing: dict[str, Any]
    if page_size is None:
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda")
        addressing = {"kv_indptr": starts, "kv_indices": torch.cat(slots).int()}
    else:
        table = torch.full((len(lens), max([1, *counts]) + 1), 2**30, dtype=torch.int32, device="cuda")
        for request, own in enumerate(slots):
            table[request, : len(own)] = own
        kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        addressing = {"page_table": table, "kv_lens": kv_lens, "page_size": page_size}
    if query_lens is not None:
        addressing["qo_indptr"] = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device="cuda")
    tokens = sum(query_lens) if query_lens is not None else len(lens)
    query = torch.randn(tokens, heads, WIDTH, generator=generator, device="cuda") * spread
    return Case(query.to(dtype), pool.view(torch.float8_e4m3fn), rows, addressing, query_lens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 40, 64, 128])
def test_heads(heads: int, dtype: torch.dtype) -> None:
    draw(heads, RAGGED, dtype=dtype, seed=heads).check()


@pytest.mark.parametrize("batch", [1, 2, 64, 131, 132, 133, 300, 600])
@pytest.mark.parametrize("longest", [500, 30_000])
def test_batches_of_every_relation_to_the_card(batch: int, longest: int) -> None:
    """With one long request the work is cut evenly, with equal ones each request is padded: both ways are here."""
    lens = torch.randint(0, 500, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    lens[batch // 2] = longest
    draw(16, lens, seed=batch).check()


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("length", [1, 64, 127, 8192])
def test_equal_lengths(heads: int, length: int) -> None:
    draw(heads, [length] * 16).check()


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("query_lens", [None, [1, 4, 8, 2, 1, 100, 7, 3]])
def test_page_tables(page_size: int, query_lens: list[int] | None) -> None:
    draw(16, [5, 4, 63, 64, 65, 1000, 4097, 2000], page_size=page_size, query_lens=query_lens).check()


@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_extend(heads: int, causal: bool) -> None:
    draw(heads, [0, 7, 300, 129, 2500, 2], query_lens=[0, 7, 20, 129, 64, 5]).check(causal=causal)


@pytest.mark.parametrize("spread", [1e-20, 1e-3, 30.0, 3e4])
def test_queries_of_any_size(spread: float) -> None:
    """Scores from nothing to one-hot; 3e4 leaves fp16's range, and 30 raises the maximum again and again."""
    draw(16, [1000, 3000], spread=spread).check(tolerance=5e-4)


def test_the_output_in_bf16_is_rounded_once() -> None:
    case = draw(16, [2048] * 16)
    out = torch.empty(16, 16, LATENT, dtype=torch.bfloat16, device="cuda")
    case.run(out=out)
    assert relative_error(out, case.reference()[0]) < 2e-3


def test_scale_and_base_of_the_lse() -> None:
    case = draw(16, [700, 70])
    case.check(kv_scale=0.37)
    assert torch.allclose(case.run()[1] * math.log(2), case.run(natural_lse=True)[1], rtol=1e-5)


def test_a_query_in_two_strided_parts() -> None:
    case = draw(16, [700, 70])
    nope = case.query[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.nn.functional.pad(case.query[..., LATENT:], (128, 0))[..., 128:]
    assert torch.equal(case.run(query=nope, query_rope=rope)[0], case.run()[0])


def test_pool_past_two_gib() -> None:
    rows = 2**31 // WIDTH + 10_000
    pool = torch.zeros(rows, 1, WIDTH, dtype=torch.uint8, device="cuda")
    case = draw(16, [3000])
    last = torch.arange(rows - 3000, rows, device="cuda")
    pool[last, 0] = case.pool.view(torch.uint8)[case.rows[0]]
    out, _ = mla_fp8_sm90.mla_fp8_sm90(
        case.query, pool, sm_scale=SM_SCALE, kv_indptr=case.addressing["kv_indptr"], kv_indices=last.int()
    )
    assert relative_error(out, case.reference()[0]) < 2e-3


@pytest.mark.parametrize("heads", [16, 64])
def test_a_graph_replays_with_other_lengths(heads: int) -> None:
    case = draw(heads, [4000] * 8, seed=1)
    out, lse = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=out, lse=lse)
    for lens in ([4000, 0, 1, 64, 3999, 65, 2000, 8], [0] * 7 + [32_000], [4000] * 8):
        case.addressing["kv_indptr"].copy_(torch.tensor([0, *accumulate(lens)], dtype=torch.int32))
        case.rows = list(case.addressing["kv_indices"].long().split([*lens, 32_000 - sum(lens)]))[:8]
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = case.reference()
        assert relative_error(out, want) < 3e-4
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


def test_the_same_inputs_give_the_same_bits() -> None:
    case = draw(64, RAGGED)
    first = case.run()[0]
    for _ in range(5):
        assert torch.equal(case.run()[0], first)
