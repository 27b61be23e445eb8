"""The compiled kernel against float64, at shapes the interpreter has no time for."""

import pytest
import torch
from mla_problems import SM_SCALE, problem, relative_error

from mla_diag.kernels import mla_fp8 as kernel
from mla_diag.kernels.mla_fp8 import mla_fp8, workspace_bytes
from mla_diag.kernels.reference import csr_rows, mla_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

RAGGED = [0, 1, 63, 64, 65, 1000, 4097, 20_000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 40, 64, 128])
def test_heads(heads, dtype):
    case = problem(heads, RAGGED, device="cuda", dtype=dtype, seed=heads)
    case.check(tolerance=3e-4)


@pytest.mark.parametrize("batch", [1, 2, 16, 64, 65, 130, 264, 300, 600])
def test_batches_of_every_relation_to_the_card(batch):
    generator = torch.Generator().manual_seed(batch)
    lens = torch.randint(0, 3000, (batch,), generator=generator).tolist()
    lens[batch // 2] = 30_000
    problem(16, lens, device="cuda", seed=batch).check(tolerance=3e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64, 3])
@pytest.mark.parametrize("query_lens", [None, [1, 4, 8, 2, 1, 100, 7, 3]])
def test_page_tables(page_size, query_lens):
    lens = [5, 4, 63, 64, 65, 1000, 4097, 2000]
    problem(16, lens, device="cuda", page_size=page_size, query_lens=query_lens).check(tolerance=3e-4)


@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_extend(heads, causal):
    case = problem(heads, [0, 7, 300, 129, 2500], device="cuda", query_lens=[0, 7, 20, 129, 64])
    case.check(tolerance=3e-4, causal=causal)


def test_the_output_in_bf16_is_rounded_once():
    case = problem(16, [2048] * 16, device="cuda")
    out = torch.empty(16, 16, 512, device="cuda", dtype=torch.bfloat16)
    case.run(out=out)
    assert relative_error(out, case.reference()[0]) < 2e-3


@pytest.mark.parametrize("spread", [1e-20, 1e-3, 30.0, 3e4])
def test_queries_of_any_size(spread):
    """Scores from nothing to one-hot; 3e4 leaves FP16's range."""
    problem(16, [1000, 3000], device="cuda", spread=spread).check(tolerance=5e-4)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize("columns", [16, 32])
def test_the_way_of_other_cards(capability, columns):
    """What SM80 (bits by hand) and the rest (cvt) run, on this card."""
    config = kernel.tuning(capability, columns)
    problem(20, RAGGED, device="cuda").check(tolerance=3e-4, config=config)


def test_pool_past_two_gib():
    rows = 2**31 // 576 + 10_000
    pool = torch.zeros(rows, 1, 576, dtype=torch.uint8, device="cuda")
    last = torch.arange(rows - 3000, rows, device="cuda")
    pool[last] = torch.randn(3000, 1, 576, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    indptr = torch.tensor([0, 3000], dtype=torch.int32, device="cuda")
    query = torch.randn(1, 16, 576, device="cuda", dtype=torch.bfloat16)
    out, _ = mla_fp8(query, pool, sm_scale=SM_SCALE, kv_indptr=indptr, kv_indices=last.int())
    want, _ = mla_reference(query, pool[-3000:], sm_scale=SM_SCALE, rows=[torch.arange(3000, device="cuda")])
    assert relative_error(out, want) < 2e-3


def test_graph_replays_with_other_lengths():
    """Captured at full lengths, replayed at ragged ones: nothing may depend on what was read at capture."""
    capacity = 4000
    indices = torch.randperm(8 * capacity, device="cuda").int()
    pool = torch.randn(8 * capacity, 1, 576, device="cuda").to(torch.float8_e4m3fn)
    query = torch.randn(8, 16, 576, device="cuda", dtype=torch.bfloat16)
    indptr = (torch.arange(9, device="cuda") * capacity).int()
    out = torch.empty(8, 16, 512, device="cuda", dtype=torch.bfloat16)
    workspace = torch.empty(workspace_bytes("cuda"), dtype=torch.uint8, device="cuda")

    def step():
        return mla_fp8(
            query, pool, sm_scale=SM_SCALE, kv_indptr=indptr, kv_indices=indices, out=out, workspace=workspace
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = step()
    for lens in ([1, 0, 4000, 17, 64, 65, 2000, 3], [4000] * 8, [0] * 8):
        indptr.copy_(torch.tensor([0, *lens]).cumsum(0))
        query.normal_()
        out.fill_(torch.nan)
        graph.replay()
        want, want_lse = mla_reference(query, pool, sm_scale=SM_SCALE, rows=csr_rows(indptr, indices))
        assert relative_error(out, want) < 2e-3
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


def test_same_inputs_give_the_same_bits():
    case = problem(16, [20_000, 300, 7], device="cuda")
    first, _ = case.run()
    for _ in range(20):
        again, _ = case.run()
        assert torch.equal(first, again)
