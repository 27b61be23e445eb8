"""Building CUDA sources: what is cached, and what is said when a build is impossible."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

import pytest

from mla_diag.kernels import mla_fp8_cuda as cuda

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
extern "C" __global__ void fill(int* to) { to[threadIdx.x] = VALUE; }
"""

needs_compiler = pytest.mark.skipif(cuda.compiler() is None, reason="neither NVRTC nor nvcc is here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_a_build_is_machine_code_and_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = cuda.build(source, "sm_90a", {"VALUE": 1})
    assert cubin.startswith(b"\x7fELF")

    def refuse(*_: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(type(cuda.compiler()), "compile", refuse)
    assert cuda.build(source, "sm_90a", {"VALUE": 1}) == cubin
    with pytest.raises(AssertionError, match="compiled again"):
        cuda.build(source, "sm_90a", {"VALUE": 2})


@needs_compiler
def test_an_edited_include_is_a_new_build(source: Path) -> None:
    (source.parent / "value.cuh").write_text("#define OFFSET 1\n")
    source.write_text('#include "value.cuh"\n' + SOURCE.replace("VALUE", "VALUE + OFFSET"))
    before = cuda.build(source, "sm_90a", {"VALUE": 1})
    (source.parent / "value.cuh").write_text("#define OFFSET 2\n")
    assert cuda.build(source, "sm_90a", {"VALUE": 1}) != before


@needs_compiler
def test_a_rejected_source_is_one_line_with_the_compilers_error(source: Path) -> None:
    source.write_text('extern "C" __global__ void broken() { undeclared(); }')
    with pytest.raises(cuda.CudaError, match=r"rejects fill\.cu: .*undeclared") as caught:
        cuda.build(source, "sm_90a", {})
    assert "\n" not in str(caught.value)


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_stop_a_build(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source / "not-a-directory"))
    assert cuda.build(source, "sm_90a", {"VALUE": 1}).startswith(b"\x7fELF")


@needs_compiler
def test_a_user_without_a_home_builds_each_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under user numbers that no password file has; Path.home() then raises."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    assert cuda.build(source, "sm_90a", {"VALUE": 1}).startswith(b"\x7fELF")


def test_without_a_compiler_the_error_names_what_is_missing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "compiler", lambda: None)
    with pytest.raises(cuda.CudaError, match="needs NVRTC"):
        cuda.build(source, "sm_90a", {"VALUE": 1})
