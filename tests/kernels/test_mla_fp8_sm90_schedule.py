"""The Hopper kernel's division of work, run on the host: every tile once, and every partial result found again."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_diag import kernels

HARNESS = Path(__file__).with_name("mla_fp8_sm90_schedule.cpp")
HEADER = Path(next(iter(kernels.__path__))) / "mla_fp8_sm90_schedule.cuh"
ROWS, TOKENS = 16, 64  # as in the harness and the kernel
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Piece:
    block: int
    request: int
    first_row: int
    rows: int
    begin: int
    tiles: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """What each block does, and the slots that the combine reads for each (request, first row)."""

    pieces: list[Piece]
    slots: dict[tuple[int, int], list[int]]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedule")
    header = folder / "schedule.h"
    text = HEADER.read_text()
    assert '#include "mla_fp8_sm90_ptx.cuh"' in text
    header.write_text(text.replace('#include "mla_fp8_sm90_ptx.cuh"', ""))
    command = [
        str(COMPILER),
        "-std=c++17",
        "-O1",
        f'-DSCHEDULE="{header}"',
        "-o",
        str(folder / "schedule"),
        str(HARNESS),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "schedule"


def plan(program: Path, blocks: int, heads: int, requests: list[tuple[int, int]], causal: bool = False) -> Plan:
    """Divide the work of requests of (query tokens, KV tokens) each."""
    numbers = [blocks, heads, int(causal), len(requests), *(n for request in requests for n in request)]
    done = subprocess.run(
        [str(program)], input=" ".join(map(str, numbers)), text=True, capture_output=True, check=True, timeout=20
    )
    pieces, slots = [], {}
    for line in done.stdout.splitlines():
        kind, *fields = line.split()
        values = list(map(int, fields))
        if kind == "piece":
            pieces.append(Piece(*values))
        else:
            slots[values[0], values[1]] = values[2:]
    return Plan(pieces, slots)


def check(made: Plan, requests: list[tuple[int, int]], heads: int) -> None:
    covered: dict[tuple[int, int], list[Piece]] = {item: [] for item in made.slots}
    for piece in made.pieces:
        covered[piece.request, piece.first_row].append(piece)
    assert len(covered) == sum(-(-tokens * heads // ROWS) for tokens, _ in requests)
    for (request, first_row), pieces in covered.items():
        tokens, kv_len = requests[request]
        tiles = [tile for piece in pieces for tile in range(piece.begin, piece.begin + piece.tiles)]
        assert tiles == list(range(-(-kv_len // TOKENS)))
        assert {piece.rows for piece in pieces} <= {min(ROWS, tokens * heads - first_row)}
        slots = made.slots[request, first_row]
        assert len(slots) == len(pieces)
        assert [piece.slot for piece in pieces] == (slots if len(pieces) > 1 else [-1] * len(pieces))
    partial = [piece.slot for piece in made.pieces if piece.slot >= 0]
    assert len(partial) == len(set(partial))


def check_causal(made: Plan, requests: list[tuple[int, int]], heads: int) -> None:
    """Every row tile has, once, the tiles that its last row sees."""
    covered: dict[tuple[int, int], list[int]] = {item: [] for item in made.slots}
    for piece in made.pieces:
        covered[piece.request, piece.first_row] += range(piece.begin, piece.begin + piece.tiles)
    for (request, first_row), tiles in covered.items():
        tokens, kv_len = requests[request]
        last = min(first_row + ROWS, tokens * heads) - 1
        seen = kv_len - tokens + 1 + last // heads
        assert sorted(tiles) == list(range(-(-seen // TOKENS)))


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.sampled_from([1, 2, 7, 132]),
    heads=st.sampled_from([1, 16, 40, 128]),
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5000)), min_size=1, max_size=20),
)
def test_every_tile_is_done_once(program: Path, blocks: int, heads: int, requests: list[tuple[int, int]]) -> None:
    check(plan(program, blocks, heads, requests), requests, heads)


@pytest.mark.parametrize("batch", [1, 2, 16, 64, 131, 132, 133, 128, 600])
@pytest.mark.parametrize("length", [1, 64, 2048, 5000, 8192])
def test_equal_lengths(program: Path, batch: int, length: int) -> None:
    """No block works on two requests when there are enough blocks, and none does much more than its share."""
    requests = [(1, length)] * batch
    made = plan(program, 132, 16, requests)
    check(made, requests, 16)
    work = [sum(piece.tiles for piece in made.pieces if piece.block == block) for block in range(132)]
    tiles = -(-length // TOKENS)
    assert max(work) <= -(-batch * tiles // 132) + 4
    if batch <= 132:
        assert len({piece.block for piece in made.pieces}) == len(made.pieces)


def test_with_more_items_than_blocks_a_block_gets_whole_ones(program: Path) -> None:
    """Cut evenly, 256 items of 64 tiles would give each of 132 blocks 125 tiles in three pieces; two whole are 128."""
    requests = [(1, 4096)] * 256
    made = plan(program, 132, 16, requests)
    check(made, requests, 16)
    assert {piece.slot for piece in made.pieces} == {-1}


@pytest.mark.parametrize("requests", [[(4096, 4096)], [(2048, 3000)] * 2, [(1024, 1500)] * 4, [(65, 1065)] * 64])
def test_blocks_of_an_extend_have_about_as_much_to_see(program: Path, requests: list[tuple[int, int]]) -> None:
    """Cut by what all rows could see, the blocks of a prompt's last rows had twice the others' work."""
    made = plan(program, 132, 16, requests, causal=True)
    check_causal(made, requests, 16)
    work = [sum(piece.tiles for piece in made.pieces if piece.block == block) for block in range(132)]
    assert max(work) <= 1.1 * sum(work) / 132


def test_an_extend_of_more_rows_than_an_int_can_square_is_as_even(program: Path) -> None:
    requests = [(40_000, 40_000)]
    made = plan(program, 132, 16, requests, causal=True)
    work = [sum(piece.tiles for piece in made.pieces if piece.block == block) for block in range(132)]
    assert max(work) <= 1.1 * sum(work) / 132


def test_a_request_without_query_tokens_has_no_say(program: Path) -> None:
    """Nor do its keys: equal requests beside it are still one block's part each."""
    requests = [(1, 2048)] * 16 + [(0, 200_000)]
    made = plan(program, 132, 16, requests)
    check(made, requests, 16)
    assert len({piece.block for piece in made.pieces}) == len(made.pieces)


def test_row_tiles_of_a_request_are_read_at_the_same_time(program: Path) -> None:
    """By neighbouring blocks in the same round, so that the second finds in L2 what the first read."""
    made = plan(program, 132, 128, [(1, 4096)] * 33)  # of eight row tiles here, on 132 blocks: two rounds
    rounds: dict[int, int] = {}
    places: dict[int, set[tuple[int, int]]] = {}
    for piece in made.pieces:
        round_ = rounds[piece.block] = rounds.get(piece.block, -1) + 1
        places.setdefault(piece.request, set()).add((round_, piece.block))
    assert set(rounds.values()) == {1}
    together = 0
    for found in places.values():
        first_round, first_block = min(found)
        together += found == {(first_round, first_block + place) for place in range(8)}
    assert together == 32  # one request lies across the end of the first round


def test_one_long_request_among_many_is_shared(program: Path) -> None:
    requests = [(1, 100)] * 63 + [(1, 100_000)]
    made = plan(program, 132, 16, requests)
    check(made, requests, 16)
    total = sum(-(-length // TOKENS) for _, length in requests)
    work = [sum(piece.tiles for piece in made.pieces if piece.block == block) for block in range(132)]
    assert max(work) <= -(-total // 132) + 4


def test_tiles_that_nobody_sees_are_left_out(program: Path) -> None:
    """128 causal query tokens of 16 heads over 128 tokens: the first 64 rows of tokens see only the first tile."""
    made = plan(program, 132, 16, [(128, 128)], causal=True)
    seen = {first_row // 16: 0 for _, first_row in made.slots}
    for piece in made.pieces:
        seen[piece.first_row // 16] += piece.tiles
    assert seen == {token: 1 if token < 64 else 2 for token in range(128)}
