"""Alternatives measured in processes of another Python: what is believed of their answers, and of none."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from mla_diag.bench.rows import Ceilings, Shape
from mla_diag.bench.strategies import Measured, NotMeasuredError, Verdict, measure, order
from tests.bench.serving_python import serving_python

SHAPES = (Shape(16, 1, 2048), Shape(128, 16, 8192))
ALL = ("kernel", "native", "gather", "cast")


def measured(tmp_path: Path, **behaviour: float | str) -> dict[str, Measured]:
    python = serving_python(tmp_path / "python", **behaviour)
    _, found = measure(ALL, python, shapes=SHAPES, timeout_s=3)
    return {each.strategy: each for each in found}


def test_the_fastest_comes_first_and_what_is_no_faster_than_the_cast_not_at_all(tmp_path: Path) -> None:
    found = measured(tmp_path, kernel=20.0, native=15.0, gather=900.0, cast=800.0)
    assert order(list(found.values())) == ("native", "kernel")
    assert found["native"].us == pytest.approx(15.0)
    assert [row.shape for row in found["native"].rows] == list(SHAPES)


def test_the_cast_is_taken_where_nothing_is_better(tmp_path: Path) -> None:
    assert order(list(measured(tmp_path, cast=10.0).values())) == ("cast",)
    every = measured(tmp_path, kernel="wrong", native="raises", gather="crash", cast="wrong")
    assert order(list(every.values())) == ("cast",)


FAILURES = {
    "wrong": "at 16 x 8192, 128 heads, its relative error is 3.0e-02, not under 2.0e-03",
    "raises": "at 1 x 2048, 16 heads, RuntimeError: [no] kernel image",
    "crash": "it was killed by SIGSEGV",
    "hang": "no answer in 3 s",
}


@pytest.mark.parametrize(("what", "why"), FAILURES.items())
def test_what_fails_is_left_out_and_takes_nothing_with_it(tmp_path: Path, what: str, why: str) -> None:
    found = measured(tmp_path, native=what, kernel=20.0, gather=30.0)
    assert (found["native"].verdict, found["native"].why) == (Verdict.FAILED, why)
    assert order(list(found.values())) == ("kernel", "gather")


def test_what_is_as_good_as_the_cast_is_right(tmp_path: Path) -> None:
    """FlashInfer's own error is over 2e-3 at some shapes: its FP8 kernel is not wrong for giving the same result."""
    found = measured(tmp_path, native="loose", cast="loose")
    assert found["native"].verdict is Verdict.RIGHT
    assert measured(tmp_path, native="loose")["native"].why.endswith("is 2.3e-03, not under 2.0e-03")


def test_what_is_not_installed_keeps_its_place_behind_what_was_measured(tmp_path: Path) -> None:
    """An SGLang on another attention library may still gather; the dispatch finds out."""
    missing = dict.fromkeys(("native", "gather", "cast"), "not installed")
    found = measured(tmp_path, kernel=20.0, **missing)
    assert found["gather"].verdict is Verdict.UNMEASURED
    assert order(list(found.values())) == ("kernel", "native", "gather")


def test_ceilings_are_measured_once(tmp_path: Path) -> None:
    python = serving_python(tmp_path / "python")
    card, _ = measure(("kernel", "cast"), python, shapes=SHAPES)
    first, second = map(json.loads, (tmp_path / "python.asked").read_text().splitlines())
    assert first["ceilings"] is None
    assert Ceilings(**second["ceilings"]) == card.ceilings


NOT_MEASURED = {
    "no torch": "ModuleNotFoundError: No module named 'torch'",
    "out of memory": "the GPU has too little free memory; stop what runs on it, then --apply again",
}


@pytest.mark.parametrize(("what", "why"), NOT_MEASURED.items())
def test_where_nothing_can_be_measured_it_is_said_in_one_line(tmp_path: Path, what: str, why: str) -> None:
    with pytest.raises(NotMeasuredError) as raised:
        measured(tmp_path, kernel=what)
    assert str(raised.value) == why


def test_where_nothing_ran_it_is_said_why(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"^kernel: at .*no\] kernel image; native: .*; cast: Mod[^\n]*$"):
        measured(tmp_path, kernel="raises", **dict.fromkeys(("native", "gather", "cast"), "not installed"))


def test_a_python_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"python: No such file or directory$"):
        measure(ALL, tmp_path / "python")


# ---- the real process, on this machine -------------------------------------------------------------------------------


def test_a_python_without_torch(tmp_path: Path) -> None:
    """mla-diag runs there by its directory alone: the torch that is installed beside it here is not the other's."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    with pytest.raises(NotMeasuredError, match=r"^ModuleNotFoundError: No module named 'torch'$"):
        measure(ALL, tmp_path / "venv" / "bin" / "python")


def test_a_directory_of_packages_goes_before_what_the_python_has(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the torch of that directory')\n")
    with pytest.raises(NotMeasuredError, match=r"^ImportError: the torch of that directory$"):
        measure(ALL, Path(sys.executable), [tmp_path])


def test_a_torch_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(NotMeasuredError, match=r"^torch \S+ sees no GPU$"):
        measure(ALL, Path(sys.executable))


def test_reading_results_imports_no_torch() -> None:
    program = "import sys, mla_diag.bench.strategies, mla_diag.commands.fix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_measuring_needs_torch_and_triton_only() -> None:
    """It runs in the server's Python, which has nothing that mla-diag is installed with."""
    pytest.importorskip("torch")
    program = """
        import sys, mla_diag.bench.strategy_process
        ours = {"msgspec", "rich", "typer", "libcst", "pandas", "httpx", "fsspec", "isal"}
        print("imported:", *ours & set(sys.modules))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("imported:\n", "")


@pytest.mark.gpu
def test_the_kernel_is_measured_on_this_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    card, found = measure(ALL, Path(sys.executable), shapes=SHAPES[:1])
    assert card.device == torch.cuda.get_device_name()
    assert found[0].verdict is Verdict.RIGHT
    assert order(found)[0] != "cast"
