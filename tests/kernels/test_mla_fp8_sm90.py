"""The Hopper kernel: what the compiler made of it (no GPU needed), and what it computes (`gpu`)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_diag.kernels import cuda, mla_fp8_sm90  # noqa: E402
from mla_diag.kernels.mla_fp8_sm90 import LATENT, ROPE, SOURCE, TILES, Tile, Workspace, choose_tile  # noqa: E402

SHARED_OF_A_MULTIPROCESSOR, RESERVED_FOR_A_BLOCK = 233_472, 1024  # Hopper
TILE_LIST = pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: f"rows{tile.rows}")


def cuobjdump() -> str | None:
    """The disassembler: the toolkit's, or the one that Triton carries."""
    bundled = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)


# ---- what the compiler made of it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    if cuda.compiler() is None:
        pytest.skip("neither NVRTC nor nvcc is here")
    folder = tmp_path_factory.mktemp("cubin")
    paths = {}
    for rows, tile in TILES.items():
        paths[rows] = folder / f"rows{rows}.cubin"
        paths[rows].write_bytes(cuda.build(SOURCE, "sm_90a", tile.defines))
    return paths


def dump(cubin: Path, *options: str) -> str:
    program = cuobjdump()
    if program is None:
        pytest.skip("no cuobjdump")
    return subprocess.run([program, *options, str(cubin)], capture_output=True, text=True, check=True).stdout


@TILE_LIST
def test_registers_and_spills(tile: Tile, machine_code: dict[int, Path]) -> None:
    usage = dump(machine_code[tile.rows], "--dump-resource-usage")
    found = re.search(r"Function mla_split:\s+REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = map(int, found.groups())
    assert registers * 384 * tile.blocks <= 65_536
    assert stack <= 64  # a few loop counters; an accumulator that spilled would be 512 bytes and more


@TILE_LIST
def test_the_tensor_cores_run_ahead(tile: Tile, machine_code: dict[int, Path]) -> None:
    """The compiler falls back to one wait for each wgmma when it runs out of registers; that halves the speed."""
    code = dump(machine_code[tile.rows], "--dump-sass", "-fun", "mla_split")
    products = re.findall(r"HGMMA\.(\S+) (R\d+), (R\d+)", code)
    assert len(products) >= 2 * 36 + 16
    assert {shape for shape, *_ in products} == {f"64x{tile.rows}x16.F32"}
    assert code.count("WARPGROUP.DEPBAR") < 0.7 * len(products)
    assert "UBLKCP" in code
    assert "F2FP.F16.E4M3.UNPACK_B" in code


@TILE_LIST
def test_the_blocks_fit_a_multiprocessor(tile: Tile) -> None:
    assert tile.blocks * (tile.shared_bytes + RESERVED_FOR_A_BLOCK) <= SHARED_OF_A_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("tokens", "heads", "batch", "rows"),
    [(1, 1, 1, 16), (64, 16, 64, 16), (64, 17, 64, 32), (8, 64, 8, 64), (8, 128, 8, 64), (32, 16, 8, 64), (9, 16, 8, 32)],
)
def test_the_tile_follows_the_rows_of_a_request(tokens: int, heads: int, batch: int, rows: int) -> None:
    assert choose_tile(tokens, heads, batch).rows == rows


# ---- what it refuses -------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call, but for the device."""
    valid = {
        "q_nope": torch.zeros(2, 16, LATENT, dtype=torch.bfloat16),
        "q_rope": torch.zeros(2, 16, ROPE, dtype=torch.bfloat16),
        "pool": torch.zeros(8, 1, LATENT + ROPE, dtype=torch.uint8),
        "pages": torch.zeros(5, dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "sm_scale": 1.0,
    }
    return valid | changes


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"q_nope": torch.zeros(2, 16, LATENT)}, "q_nope"),
        ({"q_nope": torch.zeros(2, 16, 256, dtype=torch.bfloat16)}, "q_nope"),
        ({"q_rope": torch.zeros(2, 16, ROPE, dtype=torch.float16)}, "q_rope"),
        ({"pool": torch.zeros(8, 1, 512, dtype=torch.uint8)}, "pool"),
        ({"pool": torch.zeros(8, 1, 576, dtype=torch.bfloat16)}, "pool"),
        ({"pages": torch.zeros(5, dtype=torch.int64)}, "pages"),
        ({"kv_indptr": None}, "kv_lens"),
        ({"kv_indptr": torch.tensor([0, 2, 5])}, "kv_indptr"),
        ({"page_size": 64}, "kv_lens"),
        ({"page_size": 0}, "page_size"),
        ({"qo_indptr": torch.tensor([0, 2], dtype=torch.int32)}, "qo_indptr"),
        ({"q_nope": torch.zeros(3, 16, LATENT, dtype=torch.bfloat16), "q_rope": torch.zeros(3, 16, ROPE, dtype=torch.bfloat16)}, "qo_indptr"),
        ({"out": torch.zeros(2, 16, LATENT)}, "out"),
        ({"lse": torch.zeros(2, 16, dtype=torch.bfloat16)}, "lse"),
        ({"sm_scale": 0.0}, "sm_scale"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        mla_fp8_sm90.mla_fp8_sm90(**arguments(**changes))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mla_fp8_sm90.unavailable() == "no CUDA device"


def test_on_another_architecture_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    reason = mla_fp8_sm90.unavailable()
    assert reason is not None
    assert "10.0" in reason
