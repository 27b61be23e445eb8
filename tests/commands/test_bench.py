"""`mla-diag bench kernel`: what it says where it cannot run, and how it prints what it measured."""

from __future__ import annotations

import pytest

from mla_diag.bench.rows import Row, Shape
from mla_diag.commands.bench import format_row, parse_shape
from mla_diag.errors import UsageError
from tests.commands.test_explain import run


def test_without_a_gpu_it_says_so_in_one_line():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run("bench", "kernel")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "mla-diag: bench kernel needs a GPU, and torch sees none here; run it where the server runs\n"
    )


def test_shapes():
    assert parse_shape("16x8192") == (16, 8192)
    for text in ("16", "0x5", "16x", "ax5", "16x8k"):
        with pytest.raises(UsageError, match=f"--shape {text}"):
            parse_shape(text)


def test_a_row_that_was_measured():
    row = Row(Shape(16, 64, 8192), "mla-diag triton", 130.0, 1.65e-3, 70.7)
    assert format_row(row).plain.split()[:5] == ["16", "64", "8192", "mla-diag", "triton"]
    assert format_row(row).plain.split()[5:] == ["130.0", "1.84", "x", "1.6e-03"]


def test_a_row_that_could_not_be():
    row = Row(Shape(16, 1, 2048), "native fp8", None, None, 0.3, "ImportError: No module named 'flashinfer'")
    assert format_row(row).plain.endswith("native fp8              -  ImportError: No module named 'flashinfer'")
