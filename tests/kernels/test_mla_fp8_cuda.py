"""Building CUDA sources: what is cached, and what is said when a build is impossible; and what a launch says."""

from __future__ import annotations

import ctypes
import gc
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
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


# ---- launches --------------------------------------------------------------------------------------------------------


class Number(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int),)


@dataclass
class Driver:
    """A CUDA driver that writes down what it is asked to launch, once `threads` threads have asked."""

    threads: int = 1
    status: int = 0
    context: int | None = 99  # the current one
    launches: list[tuple[object, ...]] = field(default_factory=list)

    def kernel(self, shared_bytes: int = 0) -> cuda.Kernel:
        """A kernel whose launches come here, through a C function as the driver's is one."""
        barrier = threading.Barrier(self.threads)

        def launch(config: object, _function: int, arguments: object, _extra: int) -> int:
            barrier.wait(timeout=10)
            if self.context is None:
                return 201
            shape = config.contents  # type: ignore[attr-defined]
            early = [
                (shape.attributes[place].id, shape.attributes[place].value) for place in range(shape.attribute_count)
            ]
            value = Number.from_address(arguments[0]).value  # type: ignore[index]
            self.launches.append((*shape.grid, *shape.block, shape.shared_bytes, shape.stream, early, value))
            return self.status

        def explain(_status: int, text: object) -> None:
            text._obj.value = b"invalid argument"  # type: ignore[attr-defined]

        pointers = ctypes.POINTER(cuda._Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        module = cuda.Module.__new__(cuda.Module)
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *pointers)(launch)
        module._driver = SimpleNamespace(  # type: ignore[assignment]
            cuLaunchKernelEx=entry, cuGetErrorString=explain, cuCtxSetCurrent=self.set_context
        )
        module._context = ctypes.c_void_p(99)
        return cuda.Kernel(module, ctypes.c_void_p(1), "attend", shared_bytes)

    def set_context(self, context: ctypes.c_void_p) -> int:
        self.context = context.value
        return 0


def test_a_thread_without_a_context_gets_the_modules() -> None:
    """As in triton-lang/triton#3729: torch makes a thread's only when it has to."""
    driver = Driver(context=None)
    driver.kernel().launch((1, 1, 1), 32, 7, Number(5))
    assert (driver.context, [launch[-1] for launch in driver.launches]) == (99, [5])


def test_each_launch_has_its_own_shape_stream_and_parameters() -> None:
    driver = Driver()
    kernel = driver.kernel(shared_bytes=1024)
    for stream, value in ((7, 1), (8, 2), (7, 3)):
        kernel.launch((132, 1, 1), 384, stream, Number(value), overlap=True)
        gc.collect()
    kernel.launch((5, 2, 1), 256, 7, Number(4))
    early = [(cuda._PROGRAMMATIC_STREAM_SERIALIZATION, 1)]
    assert driver.launches == [
        (132, 1, 1, 384, 1, 1, 1024, 7, early, 1),
        (132, 1, 1, 384, 1, 1, 1024, 8, early, 2),
        (132, 1, 1, 384, 1, 1, 1024, 7, early, 3),
        (5, 2, 1, 256, 1, 1, 1024, 7, [], 4),
    ]


def test_threads_that_launch_at_once_do_not_mix() -> None:
    """ctypes lets other threads run before the driver has read anything."""
    driver = Driver(threads=4)
    kernel = driver.kernel()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(kernel.launch, (n % 2 + 1, 1, 1), 32, n // 2 + 7, Number(n)) for n in range(4)]
        for call in calls:
            call.result()
    assert sorted((grid, stream, value) for grid, *_, stream, _early, value in driver.launches) == [
        (1, 7, 0),
        (1, 8, 2),
        (2, 7, 1),
        (2, 8, 3),
    ]


def test_a_refused_launch_is_one_line() -> None:
    with pytest.raises(cuda.CudaError, match=r"^CUDA driver: attend: invalid argument \(1\)$"):
        Driver(status=1).kernel().launch((1, 1, 1), 32, 0, Number(1))
