"""Every compiled kernel, and the operator that chooses, against float64, at shapes the interpreter has no time for."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_problems import problem, relative_error  # noqa: E402

from mla_diag.kernels import mla_fp8 as triton_kernel  # noqa: E402
from mla_diag.kernels import mla_fp8_sm90  # noqa: E402
from mla_diag.kernels.mla_fp8_operator import attend, prepare, schedule  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def hopper_planned(query: torch.Tensor, pool: torch.Tensor, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Hopper's kernel with a schedule made before, as all layers of a step share it."""
    lengths = {name: call.get(name) for name in ("kv_indptr", "kv_lens", "qo_indptr")}
    tokens = None if lengths["qo_indptr"] is None else query.shape[0]
    made = mla_fp8_sm90.mla_sm90_schedule(query.shape[1], tokens=tokens, **lengths)
    return mla_fp8_sm90.mla_fp8_sm90(query, pool, schedule=made, **call)


OPERATORS = {
    "triton": triton_kernel.mla_fp8,
    "hopper": mla_fp8_sm90.mla_fp8_sm90,
    "hopper, planned": hopper_planned,
    "chosen": attend,
}
RAGGED = [0, 1, 63, 64, 65, 1000, 4097, 20_000]
TOLERANCE = 4e-4  # products and partial results are FP16's

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    if request.param.startswith("hopper") and (reason := mla_fp8_sm90.unavailable()) is not None:
        pytest.skip(reason)
    return OPERATORS[request.param]


@pytest.mark.parametrize("extremes", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 40, 64, 128])
def test_heads(operator: Operator, heads: int, dtype: torch.dtype, extremes: bool) -> None:
    case = problem(heads, RAGGED, device="cuda", dtype=dtype, seed=heads, extremes=extremes)
    case.check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("batch", [1, 2, 16, 64, 65, 130, 131, 132, 133, 264, 300, 600])
@pytest.mark.parametrize("longest", [500, 30_000])
def test_batches_of_every_relation_to_the_card(operator: Operator, batch: int, longest: int) -> None:
    """With one long request Hopper's kernel cuts the work evenly, with equal ones it pads them: both ways are here."""
    lens = torch.randint(0, 500, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    lens[batch // 2] = longest
    problem(16, lens, device="cuda", seed=batch, extremes=False).check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("length", [1, 64, 127, 8192])
def test_equal_lengths(operator: Operator, heads: int, length: int) -> None:
    problem(heads, [length] * 16, device="cuda", extremes=False).check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("query_lens", [None, [1, 4, 8, 2, 1, 100, 7, 3]])
def test_page_tables(operator: Operator, page_size: int, query_lens: list[int] | None) -> None:
    lens = [5, 4, 63, 64, 65, 1000, 4097, 2000]
    case = problem(16, lens, device="cuda", page_size=page_size, query_lens=query_lens)
    case.check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("query_lens", [None, [1, 4, 8, 2]])
def test_csr_pairs_over_pages(operator: Operator, query_lens: list[int] | None) -> None:
    lens = [5, 400, 63, 2000]
    case = problem(16, lens, device="cuda", page_size=16, csr=True, query_lens=query_lens)
    case.check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_extend(operator: Operator, heads: int, causal: bool) -> None:
    query_lens = [0, 7, 20, 129, 64, 5]
    case = problem(heads, [0, 7, 300, 129, 2500, 2], device="cuda", query_lens=query_lens, extremes=False)
    case.check(TOLERANCE, causal=causal, operator=operator)


@pytest.mark.parametrize("heads", [16, 128])
def test_chunks_of_more_rows_than_the_card_takes_at_once(operator: Operator, heads: int) -> None:
    """Prefill in chunks: the blocks take whole row tiles, in rounds, and of unlike lengths."""
    lens, query_lens = [2500, 0, 900, 64], [700, 3, 500, 64]
    case = problem(heads, lens, device="cuda", query_lens=query_lens, extremes=False)
    case.check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("batch", [8, 128, 264])
def test_empty_requests_among_equal_ones(operator: Operator, batch: int) -> None:
    """Requests cut in parts, one a block, and two whole ones a block: the empty get their zeros each time."""
    problem(16, [0, *[512] * (batch - 2), 0], device="cuda", extremes=False).check(TOLERANCE, operator=operator)


@pytest.mark.parametrize("tokens", [3, 700])
def test_tokens_of_no_request_see_nothing(operator: Operator, tokens: int) -> None:
    case = problem(16, [2000, 900], device="cuda", query_lens=[tokens, 2], extremes=False)
    case.check_with_tokens_of_no_request(TOLERANCE, operator=operator)


def test_an_extend_with_a_schedule_made_before() -> None:
    case = problem(16, [0, 7, 300, 129, 2500], device="cuda", query_lens=[0, 7, 20, 129, 64])
    made = schedule(16, kv_indptr=case.addressing["kv_indptr"], qo_indptr=case.addressing["qo_indptr"], tokens=220)
    case.check(TOLERANCE, operator=attend, schedule=made)


def test_the_output_in_bf16_is_rounded_once(operator: Operator) -> None:
    case = problem(16, [2048] * 16, device="cuda")
    out = torch.empty(16, 16, 512, device="cuda", dtype=torch.bfloat16)
    case.run(out=out, operator=operator)
    assert relative_error(out, case.reference()[0]) < 2e-3


@pytest.mark.parametrize("spread", [1e-20, 1e-3, 30.0, 3e4])
def test_queries_of_any_size(operator: Operator, spread: float) -> None:
    """Scores from nothing to one-hot; 3e4 leaves FP16's range, and 30 raises the maximum again and again."""
    problem(16, [1000, 3000], device="cuda", spread=spread).check(tolerance=5e-4, operator=operator)


def test_averages_of_448_times_a_scale(operator: Operator) -> None:
    """The largest average there is fits FP16, in which partial results are kept; times its scale it would not."""
    case = problem(16, [30_000, 40], device="cuda", extremes=False)
    case.pool.fill_(448)
    got, _ = case.run(operator=operator, kv_scale=300.0)
    assert relative_error(got, case.reference(kv_scale=300.0)[0]) < TOLERANCE


def test_scale_and_base_of_the_lse(operator: Operator) -> None:
    case = problem(16, [700, 70], device="cuda", extremes=False)
    case.check(TOLERANCE, kv_scale=0.37, operator=operator)
    base2, natural = case.run(operator=operator)[1], case.run(operator=operator, natural_lse=True)[1]
    assert torch.allclose(base2 * math.log(2), natural, rtol=1e-5)


def test_a_query_in_two_strided_parts(operator: Operator) -> None:
    case = problem(16, [700, 70], device="cuda")
    nope = case.query[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.nn.functional.pad(case.query[..., 512:], (128, 0))[..., 128:]
    assert torch.equal(case.run(operator=operator, query=nope, query_rope=rope)[0], case.run(operator=operator)[0])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize("columns", [16, 32])
def test_the_way_of_other_cards(capability: tuple[int, int], columns: int) -> None:
    """What SM80 (bits by hand) and the rest (cvt) run, on this card."""
    config = triton_kernel.tuning(capability, columns)
    problem(20, RAGGED, device="cuda").check(TOLERANCE, config=config)


def test_pool_past_two_gib(operator: Operator) -> None:
    case = problem(16, [3000, 20], device="cuda", extremes=False)
    rows = 2**31 // 576 + 10_000
    shift = rows - len(case.pool)
    pool = torch.zeros(rows, 576, dtype=torch.uint8, device="cuda")
    pool[shift:] = case.pool.view(torch.uint8)
    got, _ = case.run(operator=operator, pool=pool, kv_indices=case.addressing["kv_indices"] + shift)
    assert relative_error(got, case.reference()[0]) < TOLERANCE


@pytest.mark.parametrize("heads", [16, 64])
def test_a_graph_replays_with_other_lengths(operator: Operator, heads: int) -> None:
    """Captured at full lengths, replayed at ragged ones: nothing may depend on what was read at capture."""
    case = problem(heads, [4000] * 8, device="cuda", seed=1, extremes=False)
    prepare(case.query.device)
    out, lse = case.run(operator=operator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(operator=operator, out=out, lse=lse)
    for lens in ([4000, 0, 1, 64, 3999, 65, 2000, 8], [0] * 7 + [32_000], [4000] * 8, [0] * 8):
        case.addressing["kv_indptr"].copy_(torch.tensor([0, *accumulate(lens)], dtype=torch.int32))
        case.rows = list(case.addressing["kv_indices"].split([*lens, 32_000 - sum(lens)]))[:8]
        case.query.normal_()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = case.reference()
        assert relative_error(out, want) < TOLERANCE
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


def test_the_same_inputs_give_the_same_bits(operator: Operator) -> None:
    case = problem(64, RAGGED, device="cuda")
    first = case.run(operator=operator)[0]
    for _ in range(10):
        assert torch.equal(case.run(operator=operator)[0], first)
