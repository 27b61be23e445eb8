"""Build a CUDA source at first use and launch it, with what a torch installation already has.

The compiler is NVRTC, which comes with torch, or else an `nvcc` on PATH or under CUDA_HOME; the launch goes through the
CUDA driver. No torch headers, no host compiler, no build directory: a build takes about a second, prints nothing, and
is kept under `$XDG_CACHE_HOME/mla-diag` by the hash of everything that went into it. This file goes beside SGLang's
attention backends with mla_fp8_sm90.py, so it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_INVALID_CONTEXT = 201  # CUresult


class CudaError(RuntimeError):
    """A CUDA source cannot be built or launched here; the message is one line that says why."""


def build(source: Path, architecture: str, defines: Mapping[str, int]) -> bytes:
    """Compile a CUDA source to machine code, or return the cached result of an earlier build.

    Args:
        source: the `.cu` file; what it includes lies beside it as `.cuh` files.
        architecture: the target, as in `sm_90a`.
        defines: the macros the source asks for.

    Returns:
        The cubin.

    Raises:
        CudaError: there is no compiler, or it rejects the source.
    """
    using = compiler()
    if using is None:
        raise CudaError(f"{source.name} needs NVRTC (part of torch's CUDA wheels) or nvcc; neither was found")
    options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    digest = hashlib.sha256()
    for part in (source, *sorted(source.parent.glob("*.cuh"))):
        digest.update(part.read_bytes())
    digest.update(repr((architecture, options, using.version)).encode())
    directory = _cache_directory()
    if directory is None:
        return using.compile(source, architecture, options)
    cached = directory / f"{source.stem}-{architecture}-{digest.hexdigest()[:20]}.cubin"
    try:
        return cached.read_bytes()
    except OSError:
        pass
    cubin = using.compile(source, architecture, options)
    try:  # a cache that cannot be written costs a second at the next start and is no reason to fail
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(cached)
    except OSError:
        pass
    return cubin


def compiler() -> Compiler | None:
    """The compiler that builds use here, if there is one."""
    return _nvrtc() or _nvcc()


def _cache_directory() -> Path | None:
    """Where builds are kept; None for a user without a home, as containers run under numbers that nobody has."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-diag"
    except RuntimeError:
        return None


class Compiler(Protocol):
    """What turns a source into a cubin; its version is part of a build's name in the cache."""

    version: str

    def compile(self, source: Path, architecture: str, options: Sequence[str]) -> bytes:
        """Compile a source; a rejected one is a `CudaError`."""


class _Nvrtc:
    """NVIDIA's run-time compiler, a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"

    def compile(self, source: Path, architecture: str, options: Sequence[str]) -> bytes:
        library, program = self._library, ctypes.c_void_p()
        arguments = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{source.parent}", *options]
        encoded = [argument.encode() for argument in arguments]
        library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
        try:
            if library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)):
                log = self._fetch("nvrtcGetProgramLog", program)
                raise CudaError(f"{self.version} rejects {source.name}: {_first_error(log.decode(errors='replace'))}")
            return self._fetch("nvrtcGetCUBIN", program)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, name)(program, buffer)
        return buffer.raw


class _Nvcc:
    """The toolkit's compiler, a program."""

    def __init__(self, program: str) -> None:
        self._program = program
        banner = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        self.version = f"nvcc {banner.strip().splitlines()[-1] if banner.strip() else '?'}"

    def compile(self, source: Path, architecture: str, options: Sequence[str]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernel.cubin"
            target = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
            command = [self._program, "-cubin", target, "-std=c++17", *options, "-o", str(output), str(source)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise CudaError(f"{self.version} rejects {source.name}: {_first_error(result.stderr)}")
            return output.read_bytes()


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


@functools.cache
def _nvrtc() -> _Nvrtc | None:
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    package = importlib.util.find_spec("nvidia")  # the CUDA wheels; a namespace, with nothing to import
    folders = [Path(root) for root in (package.submodule_search_locations or [])] if package else []
    wheels = [str(path) for name in names for root in folders for path in sorted(root.glob(f"*/lib/{name}"))]
    return next((found for candidate in [*names, *wheels] if (found := _open_nvrtc(candidate))), None)


def _open_nvrtc(path: str) -> _Nvrtc | None:
    try:
        # It opens its builtins by their bare name, which 13.0 finds beside itself only if they are loaded already.
        beside = Path(path).parent.glob("libnvrtc-builtins.so.*") if "/" in path else ()
        for builtins in beside:
            ctypes.CDLL(str(builtins))
        return _Nvrtc(ctypes.CDLL(path))
    except OSError:
        return None


@functools.cache
def _nvcc() -> _Nvcc | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    program = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    return _Nvcc(program) if program else None


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_Arguments = ctypes.c_void_p * 1


@functools.lru_cache
def _config(grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, overlap: bool) -> _Config:
    """Where and how a kernel is launched. Threads share it, so it is not to be changed."""
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    return _Config(grid, (threads, 1, 1), shared_bytes, stream, ctypes.pointer(attribute), int(overlap))


class Module:
    """A cubin loaded into the current CUDA context.

    Load it before a CUDA graph is captured: loading is not a stream operation.
    """

    def __init__(self, cubin: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._handle, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)), "load")
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._handle), cubin), "load")

    def kernel(self, name: str, shared_bytes: int = 0) -> Kernel:
        """The kernel of that name, allowed `shared_bytes` of dynamic shared memory a block."""
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()), name)
        setting = self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        self._check(setting, name)
        return Kernel(self, function, name, shared_bytes)

    def launch(self, config: _Config, function: ctypes.c_void_p, arguments: ctypes.Array[ctypes.c_void_p]) -> int:
        """Put a kernel of this module on a stream, and return the driver's status."""
        launch = self._driver.cuLaunchKernelEx
        status: int = launch(ctypes.byref(config), function, arguments, None)
        if status == _INVALID_CONTEXT:  # a thread's that has not used the device: torch gives it one when it has to
            self._driver.cuCtxSetCurrent(self._context)
            status = launch(ctypes.byref(config), function, arguments, None)
        return status

    def _check(self, status: int, what: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"CUDA driver: {what}: {(text.value or b'unknown error').decode()} ({status})")


class Kernel:
    """One kernel of a loaded module, called with its launch shape and one parameter structure."""

    def __init__(self, module: Module, function: ctypes.c_void_p, name: str, shared_bytes: int) -> None:
        self._module, self._function, self._name, self._shared_bytes = module, function, name, shared_bytes

    def launch(
        self, grid: tuple[int, int, int], threads: int, stream: int, params: ctypes.Structure, *, overlap: bool = False
    ) -> None:
        """Put the kernel on a stream.

        Args:
            grid: blocks along x, y and z.
            threads: threads of a block.
            stream: the `cuda_stream` of a torch stream.
            params: the kernel's only parameter, copied at the call.
            overlap: let it start before the kernel ahead of it ends (it then waits with `griddepcontrol.wait`).

        Raises:
            CudaError: the driver refuses the launch.
        """
        config = _config(grid, threads, self._shared_bytes, stream, overlap)
        arguments = _Arguments(ctypes.addressof(params))
        self._module._check(self._module.launch(config, self._function, arguments), self._name)
