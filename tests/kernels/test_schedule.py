"""The plan: every key of every column once, in pieces that fit the card, whatever the lengths."""

import itertools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mla_problems import problem

from mla_diag.kernels import mla_fp8 as kernel
from mla_diag.kernels.mla_fp8 import mla_schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = kernel.Tuning(block_tokens=16, warps=4, stages=1, programs_per_sm=1, decode=kernel.PORTABLE.value)


def plan(heads, lens, query_lens=None):
    tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    extend = {}
    if query_lens is not None:
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
        extend = {"qo_indptr": starts, "tokens": sum(query_lens)}
    schedule = mla_schedule(heads, kv_lens=tensor, config=CONFIG, **extend)
    return schedule.items[:, :5].tolist(), schedule.groups.tolist()


def slots():
    return CONFIG.programs_per_sm * kernel._processors(torch.device(DEVICE))


def check_plan(heads, lens, query_lens=None):
    items, groups = plan(heads, lens, query_lens)
    tiles = [-(-n * heads // CONFIG.block_heads) for n in query_lens or [1] * len(lens)]
    busy = [item for item in items if item[0] >= 0]
    used = []
    for request, tile_count in enumerate(tiles):
        for tile in range(tile_count):
            pieces = sorted((begin, end, slot) for r, t, begin, end, slot in busy if (r, t) == (request, tile))
            assert pieces, "a tile without an item would leave its output unwritten"
            # The pieces follow one another from the first key to the last.
            assert pieces[0][0] == 0
            assert pieces[-1][1] == lens[request]
            assert all(left[1] == right[0] for left, right in itertools.pairwise(pieces))
            group = next(g for g in groups if g[:2] == [request, tile] and g[3] > 0)
            assert group[3] == len(pieces)
            if len(pieces) > 1:
                assert [slot for *_, slot in pieces] == list(range(group[2], group[2] + len(pieces)))
                used += [slot for *_, slot in pieces]
            else:
                assert pieces[0][2] == -1
    assert sum(group[3] > 0 for group in groups) == sum(tiles)
    assert len(set(used)) == len(used)
    assert all(0 <= slot < slots() for slot in used)


@given(
    lens=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 100_000)), min_size=1, max_size=12),
    heads=st.sampled_from([1, 16, 17, 128]),
)
@settings(max_examples=30, deadline=None)
def test_decode_plans(lens, heads):
    check_plan(heads, lens)


@example(requests=[(0, 0)] * 3 + [(33, 2), (129, 4)], heads=3)  # far fewer tiles than there may be
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=8),
    heads=st.sampled_from([3, 16]),
)
@settings(max_examples=20, deadline=None)
def test_extend_plans(requests, heads):
    lens, query_lens = zip(*requests, strict=True)
    if sum(query_lens):
        check_plan(heads, list(lens), list(query_lens))


def test_work_is_shared_evenly():
    """Equal requests get equal pieces, as many as the card has room for."""
    room = slots()
    items, _ = plan(16, [16 * 64 * room])
    sizes = [end - begin for r, _, begin, end, _ in items if r >= 0]
    assert len(sizes) == room
    assert max(sizes) == min(sizes)


def test_one_long_request_among_many_is_cut():
    """A batch that fills the card by itself still splits what would keep one program busy long after the others."""
    lens = [16] * (2 * slots()) + [16 * 1000]
    items, _ = plan(16, lens)
    assert sum(r == len(lens) - 1 for r, *_ in items) > 1


@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    page_size=st.sampled_from([None, 1, 2, 7, 16]),
    heads=st.sampled_from([1, 4, 18]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None)
def test_rows_are_found(lens, page_size, heads, seed):
    """Random lengths, pages and order of pages, with every other row of the pool NaN."""
    problem(heads, lens, device=DEVICE, page_size=page_size, seed=seed).check()
