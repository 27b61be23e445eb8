"""What each strategy's outlook is, on which GPU, with which FlashInfer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mla_diag.errors import UsageError
from mla_diag.fix import dispatch
from mla_diag.fix.locate import FlashInfer, Gpu
from mla_diag.fix.strategy import Strategy, check, kernel_files, outlooks

H200, B200, A100, V100 = (
    Gpu(name, sm) for name, sm in (("H200", (9, 0)), ("B200", (10, 0)), ("A100", (8, 0)), ("V100", (7, 0)))
)
OLD = FlashInfer(Path("flashinfer"), "0.6.12", ("kv_data_type",), ("q_nope", "o_scale"))
NEW = FlashInfer(Path("flashinfer"), "0.6.15.post1", ("kv_data_type",), ("q_nope", "ckv_scale", "kpe_scale"))


@pytest.mark.parametrize(
    ("gpu", "flashinfer", "works", "why"),
    [
        (H200, NEW, True, "on SM90"),
        (None, NEW, None, "on SM90"),
        (B200, NEW, False, "needs SM90, not B200 (SM100)"),
        (H200, OLD, False, "FlashInfer 0.6.12 has no FP8 MLA"),
        (H200, None, False, "there is no FlashInfer"),
    ],
)
def test_native(gpu: Gpu | None, flashinfer: FlashInfer | None, works: bool | None, why: str) -> None:
    native = next(way for way in outlooks(gpu, flashinfer) if way.strategy is Strategy.NATIVE)
    assert native.works is works
    assert why in native.why


@pytest.mark.parametrize(("gpu", "works"), [(H200, True), (A100, True), (V100, False), (None, None)])
def test_kernel(gpu: Gpu | None, works: bool | None) -> None:
    kernel = next(way for way in outlooks(gpu, None) if way.strategy is Strategy.KERNEL)
    assert kernel.works is works


COPIED = (*kernel_files(), Path(dispatch.__file__))
COPIED_PYTHON = [path for path in COPIED if path.suffix == ".py"]


def test_both_kernels_are_copied_with_all_their_sources() -> None:
    python = {"mla_fp8_operator.py", "mla_fp8.py", "mla_fp8_triton.py", "mla_fp8_sm90.py", "mla_fp8_cuda.py"}
    cuda = {"mla_fp8_sm90.cu", "mla_fp8_sm90_tile.cuh", "mla_fp8_sm90_schedule.cuh", "mla_fp8_sm90_ptx.cuh"}
    assert {path.name for path in kernel_files()} == python | cuda
    # SGLang has no such names beside its backends, and whoever looks there sees what belongs together.
    assert all(path.name.startswith("mla_fp8") for path in kernel_files())


@pytest.mark.parametrize("path", COPIED_PYTHON, ids=lambda path: path.name)
def test_what_is_copied_needs_nothing_of_mla_diag(path: Path) -> None:
    names = {each.name for each in kernel_files()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            assert f"{node.module}.py" in names
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            assert not any(module.startswith("mla_diag") for module in modules)


@pytest.mark.parametrize("path", COPIED_PYTHON, ids=lambda path: path.name)
def test_what_is_copied_keeps_to_python_3_9(path: Path) -> None:
    # SGLang before 0.5.1 may run on it.
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [node for node in calls if any(keyword.arg == "strict" for keyword in node.keywords)]


def test_gather_says_what_it_cannot() -> None:
    gather = next(way for way in outlooks(None, None) if way.strategy is Strategy.GATHER)
    assert gather.works
    assert "CUDA graphs" in gather.why


def test_strategy_that_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"--strategy native: FlashInfer 0\.6\.12 has no FP8 MLA"):
        check(Strategy.NATIVE, outlooks(H200, OLD))
    check(Strategy.AUTO, outlooks(H200, OLD))
    check(Strategy.NATIVE, outlooks(None, NEW))
