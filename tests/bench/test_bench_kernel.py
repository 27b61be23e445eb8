import importlib.util
import json
from dataclasses import asdict

import pytest
import torch

from mla_diag.bench.kernel import ALTERNATIVES, STRATEGIES, Case, bench_kernels
from mla_diag.bench.rows import Ceilings, Row, Shape

H200 = Ceilings(bandwidth=4.25e12, matmul=786e12)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def case():
    pool = torch.randn(300, 1, 576, device=DEVICE).to(torch.float8_e4m3fn)
    return Case.draw(Shape(heads=4, batch=3, context=50), pool, pool.bfloat16())


@pytest.mark.parametrize(
    ("shape", "microseconds"),
    [
        (Shape(16, 64, 8192), 71.1),
        (Shape(64, 64, 8192), 92.9),
        (Shape(128, 64, 8192), 185.8),
        (Shape(16, 1, 2048), 0.28),
    ],
)
def test_roofline(shape, microseconds):
    """Bytes bind at 16 heads (576 a token), products at 64 and up: the figures of a copy and a matmul on an H200."""
    assert H200.roofline_us(shape) == pytest.approx(microseconds, rel=0.01)


def test_rows_are_drawn_once_where_the_pool_has_enough(case):
    assert len(case.indices.unique()) == 150
    assert case.indptr.tolist() == [0, 50, 100, 150]


def test_the_error_is_the_kernels(case):
    """The interpreter cuts BF16 off where hardware rounds; a step that computes something else is far away."""
    step = ALTERNATIVES["mla-diag triton"](case)
    assert case.error(step) < 5e-3
    assert case.error(lambda: step() * 1.01) > 5e-3


def test_the_fixs_kernel_is_held_to_the_same(case):
    assert case.error(STRATEGIES["kernel"](case)) < 5e-3


def test_an_output_left_unwritten_is_an_error(case):
    with pytest.raises(ArithmeticError, match="not finite"):
        case.error(lambda: case.out)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_what_is_not_installed_is_a_row_with_a_reason():
    wanted = {name: ALTERNATIVES[name] for name in ("bf16 pool", "native fp8")}
    rows = list(bench_kernels([Shape(4, 1, 20)], H200, wanted, pool_rows=64, device="cpu"))
    assert [row.us for row in rows] == [None, None]
    assert all("flashinfer" in row.reason for row in rows)


def test_rows_are_json():
    row = Row(Shape(16, 1, 2048), "mla-diag", 10.5, 1.6e-3, 0.28)
    assert json.loads(json.dumps(asdict(row)))["shape"] == {"heads": 16, "batch": 1, "context": 2048}
