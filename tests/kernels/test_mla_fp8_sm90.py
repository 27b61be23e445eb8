"""The Hopper kernel without a GPU: what the compiler makes of it, what the operator launches, and what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_diag.kernels import mla_fp8_cuda as cuda  # noqa: E402
from mla_diag.kernels import mla_fp8_sm90  # noqa: E402
from mla_diag.kernels.mla_fp8_sm90 import (  # noqa: E402
    LATENT,
    ROPE,
    SOURCE,
    TILES,
    WIDTH,
    Schedule,
    Tile,
    choose_tile,
    mla_sm90_schedule,
)

SHARED_OF_A_MULTIPROCESSOR, RESERVED_FOR_A_BLOCK = 233_472, 1024  # Hopper
TILE_LIST = pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: f"rows{tile.rows}")


def cuobjdump() -> str | None:
    """The disassembler: the toolkit's, or the one that Triton carries."""
    bundled = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)


# ---- what the compiler made of it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["nvrtc", "nvcc"])
def machine_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The cubins by both compilers: each takes C++ that the other does not."""
    compiler = {"nvrtc": cuda._nvrtc, "nvcc": cuda._nvcc}[request.param]()
    if compiler is None:
        pytest.skip(f"no {request.param} here")
    folder = tmp_path_factory.mktemp("cubin")
    paths = {}
    for rows, tile in TILES.items():
        paths[rows] = folder / f"rows{rows}.cubin"
        options = [f"-D{name}={value}" for name, value in tile.defines.items()]
        paths[rows].write_bytes(compiler.compile(SOURCE, "sm_90a", options))
    return paths


def dump(cubin: Path, *options: str) -> str:
    program = cuobjdump()
    if program is None:
        pytest.skip("no cuobjdump")
    return subprocess.run([program, *options, str(cubin)], capture_output=True, text=True, check=True).stdout


@TILE_LIST
def test_registers_and_spills(tile: Tile, machine_code: dict[int, Path]) -> None:
    usage = dump(machine_code[tile.rows], "--dump-resource-usage")
    found = re.search(r"Function mla_fp8_sm90_attention:\s+REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = map(int, found.groups())
    assert registers * 384 <= 65_536
    assert stack <= 64  # a few loop counters; an accumulator that spilled would be 512 bytes and more


@TILE_LIST
def test_the_tensor_cores_run_ahead(tile: Tile, machine_code: dict[int, Path]) -> None:
    """The compiler falls back to one wait for each wgmma when it runs out of registers; that halves the speed."""
    code = dump(machine_code[tile.rows], "--dump-sass", "-fun", "mla_fp8_sm90_attention")
    products = re.findall(r"HGMMA\.(\S+) (R\d+), (R\d+)", code)
    assert len(products) == WIDTH // 16 + 4 * 4
    assert {shape for shape, *_ in products} == {f"64x{tile.rows}x16.F32"}
    assert code.count("WARPGROUP.DEPBAR") < 0.7 * len(products)
    assert "UBLKCP" in code
    assert "F2FP.F16.E4M3.UNPACK_B" in code


@TILE_LIST
def test_the_block_fits_a_multiprocessor(tile: Tile) -> None:
    assert tile.shared_bytes + RESERVED_FOR_A_BLOCK <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("tokens", "heads", "batch", "rows"),
    [
        (1, 1, 1, 16),
        (64, 16, 64, 16),
        (64, 17, 64, 32),
        (8, 64, 8, 64),
        (8, 128, 8, 64),
        (32, 16, 8, 64),
        (9, 16, 8, 32),
    ],
)
def test_the_tile_follows_the_rows_of_a_request(tokens: int, heads: int, batch: int, rows: int) -> None:
    assert choose_tile(tokens, heads, batch).rows == rows


# ---- what it launches ------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call, but for the device."""
    valid = {
        "query": bf16(2, 16, WIDTH),
        "pool": torch.zeros(8, 1, WIDTH, dtype=torch.uint8),
        "kv_indices": torch.zeros(5, dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "sm_scale": 1.0,
    }
    return valid | changes


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def pages_apart(gap: int) -> torch.Tensor:
    """A pool of pages of 64 rows, with some bytes between one page and the next."""
    page = 64 * WIDTH + gap
    return torch.zeros(3 * page, dtype=torch.uint8).as_strided((3, 64, 1, WIDTH), (page, WIDTH, WIDTH, 1))


class Card:
    """What stands for the kernels of a card with two multiprocessors: it keeps the parameters of each launch."""

    blocks = 2

    def __init__(self) -> None:
        self.plan = self.attention = self.combine = self
        self.launches: list[Any] = []

    def launch(self, _grid: Any, _threads: int, stream: int, params: Any, *, overlap: bool = False) -> None:
        assert stream == 7
        self.launches.append(type(params).from_buffer_copy(params))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(mla_fp8_sm90, "_kernels", lambda *_: card)
    monkeypatch.setattr(mla_fp8_sm90, "_multiprocessors", lambda _: card.blocks)
    monkeypatch.setattr(mla_fp8_sm90, "_index", lambda _: 0)
    monkeypatch.setattr(mla_fp8_sm90, "_stream", lambda _: 7)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return card


def told(params: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(params, name) for name in names)


def test_calls_that_look_alike_are_told_their_own_addresses(card: Card) -> None:
    """As the layers of a step look alike."""
    layers = [
        arguments(
            query=bf16(2, 16, LATENT),
            query_rope=bf16(2, 16, ROPE),
            pool=torch.zeros(8, 1, WIDTH, dtype=torch.uint8),
            kv_indptr=torch.tensor([0, 2, 5], dtype=torch.int32),
            kv_indices=int32(5),
            qo_indptr=int32(3),
            out=bf16(2, 16, LATENT),
            lse=torch.zeros(2, 16),
            workspace=torch.zeros(2 * 2 * 32 * (LATENT * 2 + 4), dtype=torch.uint8),
            schedule=Schedule(int32(99), TILES[32], (2, 16, 2), csr=True),
        )
        for _ in range(2)
    ]
    for layer in layers:
        mla_fp8_sm90.mla_fp8_sm90(**layer)
    for layer, attention, combine in zip(layers, card.launches[::2], card.launches[1::2], strict=True):
        assert bytes(attention) == bytes(combine)
        own = [layer[name].data_ptr() for name in ("query", "query_rope", "pool", "out", "lse", "workspace")]
        assert list(told(attention, "q_nope", "q_rope", "pool", "out", "lse", "partial")) == own
        own = [layer[name].data_ptr() for name in ("kv_indptr", "kv_indices", "qo_indptr")]
        assert list(told(attention, "kv_indptr", "pages", "qo_indptr")) == own
        assert attention.spans == layer["schedule"].plan.data_ptr()
        assert attention.kv_lens is None
        assert attention.planned


def test_a_call_is_told_its_own_layout(card: Card) -> None:
    table, pages = int32(2, 9), torch.zeros(3, 4, 1, 640, dtype=torch.uint8)[..., :WIDTH]
    paged = {"kv_indptr": None, "kv_indices": None, "page_table": table, "page_size": 4, "kv_lens": int32(5)}
    whole = bf16(2, 16, 640)[..., :WIDTH]
    mla_fp8_sm90.mla_fp8_sm90(**arguments())
    mla_fp8_sm90.mla_fp8_sm90(
        **arguments(**paged, pool=pages, query=whole, sm_scale=0.5, kv_scale=3.0, out=torch.zeros(2, 16, LATENT))
    )
    plain, _, other, _ = card.launches
    assert told(plain, "tokens", "heads", "batch", "page_size", "causal", "planned") == (2, 16, 2, 1, 0, 0)
    assert told(plain, "q_nope_token", "q_nope_head", "pool_row", "pages_row") == (16 * WIDTH, WIDTH, WIDTH, 0)
    assert told(plain, "q_type", "out_type", "score_scale", "value_scale", "lse_scale") == (0, 0, 1.0, 1.0, 1.0)
    assert told(other, "pages", "kv_lens", "kv_indptr") == (table.data_ptr(), paged["kv_lens"].data_ptr(), None)
    assert told(other, "q_rope_token", "q_rope_head", "pool_row", "pages_row") == (16 * 640, 640, 640, 9)
    assert told(other, "page_size", "out_type", "score_scale", "value_scale") == (4, 2, 1.5, 3.0)
    assert other.q_rope == whole.data_ptr() + LATENT * 2


def test_a_schedule_is_planned_from_its_lengths(card: Card) -> None:
    lens, starts = int32(3), int32(4)
    made = mla_sm90_schedule(16, kv_lens=lens, qo_indptr=starts, tokens=40)
    (params,) = card.launches
    assert told(params, "tokens", "heads", "batch", "causal") == (40, 16, 3, 1)
    assert told(params, "kv_lens", "qo_indptr", "kv_indptr") == (lens.data_ptr(), starts.data_ptr(), None)
    assert params.spans == made.plan.data_ptr()
    assert params.first + (3 + 1) * 4 <= params.spans + made.plan.nbytes


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"query": torch.zeros(2, 16, WIDTH)}, "query must be BF16 or FP16"),
        ({"query": bf16(2, 16, LATENT)}, "query must be"),
        ({"query": bf16(2, 16, WIDTH + 1)[..., 1:]}, "16-byte aligned"),
        ({"query": bf16(2, 16, LATENT), "query_rope": torch.zeros(2, 16, ROPE)}, "query_rope must be torch.bfloat16"),
        ({"query": bf16(2, 16, LATENT), "query_rope": bf16(2, 8, ROPE)}, "query_rope must be"),
        ({"query": bf16(3, 16, WIDTH)}, "qo_indptr is needed"),
        ({"pool": torch.zeros(8, 1, 512, dtype=torch.uint8)}, "pool must be"),
        ({"pool": bf16(8, 1, WIDTH)}, "pool must be float8_e4m3fn"),
        ({"pool": torch.zeros(8, 2, WIDTH, dtype=torch.uint8)}, "one head"),
        ({"pool": torch.zeros(8, 584, dtype=torch.uint8)[:, :WIDTH]}, "pool's rows"),
        ({"pool": torch.zeros(8, 4, 1, WIDTH, dtype=torch.uint8)[:, :2]}, "end to end"),
        ({"pool": pages_apart(32)}, "end to end"),
        ({"kv_indices": torch.zeros(5, dtype=torch.int64)}, "kv_indices"),
        ({"kv_indptr": None}, "kv_indptr and kv_indices, or page_table"),
        ({"page_table": int32(2, 4)}, "kv_indptr and kv_indices, or page_table"),
        ({"kv_indptr": None, "kv_indices": None, "page_table": int32(2, 4)}, "kv_lens is needed"),
        ({"kv_indptr": torch.tensor([0, 2, 5])}, "kv_indptr must be"),
        ({"page_size": 64}, "kv_lens is needed"),
        ({"page_size": 64, "kv_lens": int32(1)}, "kv_lens must have 2 elements"),
        ({"kv_lens": int32(2).to("meta")}, "kv_lens is on meta, not on cpu"),
        ({"page_size": 0}, "page_size"),
        ({"qo_indptr": int32(2)}, "qo_indptr must have 3"),
        ({"out": torch.zeros(2, 16, LATENT, dtype=torch.float64)}, "out must be"),
        ({"out": torch.zeros(2, 16, 2 * LATENT)[..., ::2]}, "out must be contiguous"),
        ({"out": bf16(2 * 16 * LATENT + 4)[4:].view(2, 16, LATENT)}, "aligned to 16 bytes"),
        ({"lse": bf16(2, 16)}, "lse must be float32"),
        ({"sm_scale": 0.0}, "sm_scale"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        mla_fp8_sm90.mla_fp8_sm90(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"query": bf16(2 * 16 * WIDTH + 4)[4:].view(2, 16, WIDTH)}, "query's rows must be"),
        ({"query": torch.zeros(2, 16, WIDTH)}, "query must be BF16 or FP16"),
        ({"pool": torch.zeros(8 * WIDTH + 8, dtype=torch.uint8)[8:].view(8, 1, WIDTH)}, "pool's rows must be"),
        ({"out": bf16(2 * 16 * LATENT + 4)[4:].view(2, 16, LATENT)}, "aligned to 16 bytes"),
        ({"lse": torch.zeros(16, 2).T}, "lse must be contiguous"),
        ({"pool": torch.zeros(8, 1, WIDTH, dtype=torch.uint8, device="meta")}, "pool is on meta, not on cpu"),
        ({"out": bf16(2, 16, LATENT).to("meta")}, "out is on meta, not on cpu"),
        ({"workspace": torch.zeros(131584, dtype=torch.uint8, device="meta")}, "workspace is on meta, not on cpu"),
        ({"kv_lens": int32(1)}, "kv_lens must have 2 elements"),
        ({"kv_indptr": int32(9)}, "qo_indptr is needed: 2 tokens for 8 requests"),
        ({"kv_indices": int32(10)[::2]}, "kv_indices must be contiguous"),
        ({"workspace": torch.zeros(100, dtype=torch.uint8)}, "workspace must have 131584 aligned bytes"),
        ({"workspace": torch.zeros(131592, dtype=torch.uint8)[8:]}, "workspace must have 131584 aligned bytes"),
        ({"schedule": Schedule(int32(99).to("meta"), TILES[32], (2, 16, 2), csr=True)}, "the schedule is on meta"),
    ],
)
def test_a_wrong_call_is_refused_after_a_right_one(card: Card, changes: dict[str, Any], complaint: str) -> None:
    """All layers of a step look alike, but for what goes wrong in one."""
    right = arguments(schedule=Schedule(int32(99), TILES[32], (2, 16, 2), csr=True), kv_lens=int32(2))
    mla_fp8_sm90.mla_fp8_sm90(**right)
    with pytest.raises(ValueError, match=complaint):
        mla_fp8_sm90.mla_fp8_sm90(**right | changes)
    assert len(card.launches) == 2


def test_a_schedule_serves_calls_of_its_own_shape_alone() -> None:
    made = Schedule(int32(0), choose_tile(2, 16, 2), (2, 16, 2), csr=True)
    with pytest.raises(
        ValueError, match=r"the schedule is for \(tokens, heads, requests\) \(2, 16, 2\), not \(3, 16, 2\)"
    ):
        mla_fp8_sm90.mla_fp8_sm90(**arguments(query=bf16(3, 16, WIDTH), qo_indptr=int32(3), schedule=made))


def test_a_schedule_without_kv_indptr_serves_page_tables_alone() -> None:
    """It would send every block to the first request's pages."""
    made = Schedule(int32(0), choose_tile(2, 16, 2), (2, 16, 2), csr=False)
    with pytest.raises(ValueError, match="the schedule was made without kv_indptr"):
        mla_fp8_sm90.mla_fp8_sm90(**arguments(schedule=made))


@pytest.mark.parametrize(
    ("lengths", "complaint"),
    [
        ({}, "kv_lens or kv_indptr"),
        ({"kv_lens": int32(2), "tokens": 5}, "go together"),
        ({"kv_lens": int32(2), "qo_indptr": int32(3)}, "go together"),
        ({"kv_lens": torch.zeros(2, dtype=torch.int64)}, "kv_lens must be contiguous int32"),
        ({"kv_lens": int32(2), "kv_indptr": int32(2)}, "kv_indptr must have 3 elements"),
        ({"kv_lens": int32(2), "qo_indptr": int32(2), "tokens": 4}, "qo_indptr must have 3 elements"),
    ],
)
def test_a_schedule_needs_lengths(lengths: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        mla_sm90_schedule(16, **lengths)


def test_nothing_to_do_needs_no_device() -> None:
    empty = arguments(query=bf16(0, 16, WIDTH), kv_indptr=int32(1))
    out, lse = mla_fp8_sm90.mla_fp8_sm90(**empty)
    assert out.shape == (0, 16, LATENT)
    assert lse.shape == (0, 16)


def test_no_request_at_all_means_that_no_token_sees_anything() -> None:
    out, lse = mla_fp8_sm90.mla_fp8_sm90(
        **arguments(query=bf16(3, 16, WIDTH), kv_indptr=int32(1), qo_indptr=int32(1), out=bf16(3, 16, LATENT) + 1)
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert choose_tile(3, 16, 0).rows == 64


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mla_fp8_sm90.unavailable() == "no CUDA device"


def test_on_another_architecture_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    reason = mla_fp8_sm90.unavailable()
    assert reason is not None
    assert "10.0" in reason
