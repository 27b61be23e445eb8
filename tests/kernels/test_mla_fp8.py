"""The kernel against float64: in Triton's interpreter on a CPU, compiled on a GPU. Shapes are small for the former."""

import math
from dataclasses import replace

import pytest
import torch
from mla_problems import SM_SCALE, problem

from mla_diag.kernels import mla_fp8 as kernel
from mla_diag.kernels.mla_fp8 import mla_fp8, mla_schedule, workspace_bytes

# 16 is the interpreter's block of tokens: lengths on both sides of a block, of a page, and of several pieces.
LENS = [0, 1, 15, 16, 17, 100]


@pytest.fixture(scope="module")
def default(device):
    return kernel._tuning(torch.device(device), 16)


@pytest.fixture(
    params=[{}, {"whole_words": True}, {"block_heads": 32}], ids=["even and odd", "whole words", "32 columns"]
)
def config(request, default):
    """The layouts of the tuning table."""
    return replace(default, **request.param)


@pytest.mark.parametrize("heads", [1, 5, 16, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode(device, heads, dtype):
    problem(heads, LENS, device=device, dtype=dtype).check()


@pytest.mark.parametrize("heads", [5, 40])
def test_layouts(device, config, heads):
    problem(heads, LENS, device=device).check(config=config)


def test_many_heads(device):
    problem(128, [33], device=device).check()


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_page_table(device, page_size):
    lens = [0, 1, page_size, page_size + 1, 2 * page_size - 1, 70]
    problem(4, lens, device=device, page_size=page_size).check()


@pytest.mark.parametrize("query_lens", [None, [1, 4, 2]])
def test_csr_pair_over_pages(device, query_lens):
    problem(5, [33, 1, 70], page_size=16, csr=True, query_lens=query_lens, device=device).check()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
def test_extend(device, causal, page_size):
    """Tiles that hold several tokens (5 heads a token), requests without queries, tokens that see nothing."""
    case = problem(5, [0, 7, 40, 33, 3], device=device, query_lens=[2, 7, 0, 9, 4], page_size=page_size)
    case.check(causal=causal)


def test_extend_in_every_layout(device, config):
    problem(5, [7, 40, 3], device=device, query_lens=[7, 9, 4]).check(config=config)


@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("query_lens", [[2, 3], [0, 17], [1, 0]])
def test_tokens_of_no_request_see_nothing(device, heads, query_lens):
    problem(heads, [70, 20], query_lens=query_lens, device=device).check_with_tokens_of_no_request()


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_any_number_of_pieces(device, default, programs):
    """From one piece a request to more pieces than blocks, over the same problem."""
    problem(4, [90, 0, 5, 200], device=device).check(config=replace(default, programs_per_sm=programs))


@pytest.mark.parametrize("spread", [1e-20, 30.0, 3e4])
def test_queries_of_any_size(device, spread):
    """Scores from nothing to one-hot; 3e4 leaves FP16's range."""
    problem(4, [50, 20], device=device, spread=spread).check()


@pytest.mark.parametrize("widths", [(128, 32), (256, 64)])
def test_widths(device, widths):
    problem(4, [40, 3], device=device, widths=widths).check()


def test_scale(device):
    problem(4, [40, 3], device=device).check(kv_scale=0.37)


def test_lse_base(device):
    case = problem(4, [40, 0], device=device)
    _, two = case.run()
    _, e = case.run(natural_lse=True)
    torch.testing.assert_close(e[0], two[0] * math.log(2.0))
    assert (e[1] == -math.inf).all()


def test_query_in_two_and_strided(device):
    """SGLang hands over views: the query of a wider tensor, heads before tokens."""
    case = problem(4, [40, 3], device=device)
    expected, _ = case.run()
    wide = torch.zeros(4, 2, 700, dtype=case.query.dtype, device=device).transpose(0, 1)
    wide[..., 60:636] = case.query
    joined, _ = case.run(query=wide[..., 60:636])
    split, _ = case.run(query=wide[..., 60:572], query_rope=wide[..., 572:636])
    assert torch.equal(joined, expected)
    assert torch.equal(split, expected)


@pytest.mark.parametrize("shape", ["rows", "pages", "bytes", "wide rows"])
def test_pool_layouts(device, shape):
    case = problem(4, [40, 3], device=device, page_size=16)
    expected, _ = case.run()
    pool = case.pool
    if shape == "rows":
        pool = pool.view(-1, 1, 576)
    elif shape == "pages":
        pool = pool.view(-1, 16, 1, 576)
    elif shape == "bytes":
        pool = pool.view(torch.uint8)
    else:
        wide = torch.full((len(pool), 656), 0x7F, dtype=torch.uint8, device=device)
        wide[:, :576] = pool.view(torch.uint8)
        pool = wide[:, :576]
    got, _ = case.run(pool=pool)
    assert torch.equal(got, expected)


def test_nan_of_a_request_stays_its_own(device):
    """A NaN row poisons the request that owns it, if anything, and no other."""
    case = problem(4, [40, 30], device=device)
    expected, _ = case.run()
    case.pool.view(torch.uint8)[case.rows[0][3].long()] = 0x7F
    got, _ = case.run()
    assert torch.equal(got[1], expected[1])
    assert not torch.equal(got[0], expected[0])


def test_one_schedule_serves_all_layers(device):
    case = problem(4, LENS, device=device)
    schedule = mla_schedule(4, kv_indptr=case.addressing["kv_indptr"])
    for layer in range(2):
        case.query = case.query.roll(layer, 0)
        case.check(schedule=schedule)


def test_given_workspace_and_outputs_are_used(device):
    case = problem(4, [90, 20], device=device)
    out = torch.full((2, 4, 512), torch.nan, device=device)
    lse = torch.full((2, 4), torch.nan, device=device)
    workspace = torch.full((workspace_bytes(device),), 0xFF, dtype=torch.uint8, device=device)
    got, got_lse = case.run(out=out, lse=lse, workspace=workspace)
    assert got.data_ptr() == out.data_ptr()
    assert got_lse.data_ptr() == lse.data_ptr()
    assert (workspace != 0xFF).any()


def test_nothing_to_do(device):
    pool = torch.zeros(8, 576, dtype=torch.uint8, device=device)
    query = torch.zeros(0, 4, 576, dtype=torch.bfloat16, device=device)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = mla_fp8(query, pool, sm_scale=SM_SCALE, kv_indptr=nobody, kv_indices=nobody[:0])
    assert out.shape == (0, 4, 512)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 4, 570, dtype=torch.bfloat16)}, "powers of two"),
        ({"query_rope": torch.zeros(1, 4, 64, dtype=torch.bfloat16)}, r"\[T, H, 512\]"),
        ({"query": torch.zeros(1, 4, 544, dtype=torch.bfloat16)}, "the pool must be"),
        ({"query": torch.zeros(1, 4, 576)}, "BF16 or FP16"),
        ({"query": torch.zeros(3, 4, 576, dtype=torch.bfloat16)}, "need qo_indptr"),
        ({"pool": torch.zeros(8, 576, dtype=torch.float8_e5m2)}, "e4m3"),
        ({"pool": torch.zeros(576, 8, dtype=torch.uint8).T}, "not a list of rows"),
        ({"page_table": torch.zeros(1, 1, dtype=torch.int32)}, "either"),
        ({"kv_indices": None}, "either"),
        ({"page_size": 16}, "kv_lens"),
        ({"kv_indices": torch.arange(6, dtype=torch.int32)[::2]}, "contiguous"),
        ({"workspace": torch.zeros(8, dtype=torch.uint8)}, "bytes or more"),
        ({"out": torch.zeros(1, 4, 510)}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = {
        "query": torch.zeros(1, 4, 576, dtype=torch.bfloat16),
        "pool": torch.zeros(8, 576, dtype=torch.uint8),
        "kv_indptr": torch.tensor([0, 3], dtype=torch.int32),
        "kv_indices": torch.arange(3, dtype=torch.int32),
    }
    if torch.cuda.is_available():
        arguments, change = (
            {k: v.cuda() if torch.is_tensor(v) else v for k, v in d.items()} for d in (arguments, change)
        )
    with pytest.raises(ValueError, match=message):
        mla_fp8(sm_scale=SM_SCALE, **arguments | change)


def test_a_pool_on_another_device_is_refused():
    query, indptr = torch.zeros(1, 4, 576, dtype=torch.bfloat16), torch.tensor([0, 3], dtype=torch.int32)
    pool = torch.zeros(8, 576, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="pool is on meta, not on cpu"):
        mla_fp8(query, pool, sm_scale=SM_SCALE, kv_indptr=indptr, kv_indices=indptr)
