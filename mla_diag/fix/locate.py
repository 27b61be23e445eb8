"""The installed SGLang and FlashInfer, read from their files: an import takes seconds, wants a GPU and may fail."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from mla_diag.errors import UsageError
from mla_diag.fix.flow import mentions_pool

# Below an installation's root, where attention backends live.
_BACKENDS = ("srt/layers/attention", "srt/hardware_backend")
# Below a directory that --sglang may name: the package, site-packages, a checkout, a venv, an image's file system.
_LAYOUTS = (
    ".",
    "sglang",
    "python/sglang",
    "lib*/python3*/site-packages/sglang",
    "lib*/python3*/dist-packages/sglang",
    "usr/local/lib*/python3*/*-packages/sglang",
    "usr/lib*/python3*/*-packages/sglang",
    "opt/*/lib*/python3*/site-packages/sglang",
    "root/.venv/lib*/python3*/site-packages/sglang",
    "sgl-workspace/sglang/python/sglang",
)
_SITE_PACKAGES = tuple(layout.removesuffix("/sglang") for layout in _LAYOUTS if "-packages" in layout)
# Prints where a Python would import packages from, without importing them.
_WHERE = """
import importlib.util, json
specs = {name: importlib.util.find_spec(name) for name in ("sglang", "flashinfer")}
print(json.dumps({name: list(spec.submodule_search_locations or []) if spec else [] for name, spec in specs.items()}))
"""
_WRAPPER = "BatchMLAPagedAttentionWrapper"


@dataclass(frozen=True)
class FlashInfer:
    """The FlashInfer that the located SGLang would import.

    Attributes:
        root: its package directory.
        version: its version, None if it does not say.
        plan: parameters of `BatchMLAPagedAttentionWrapper.plan`, without self.
        run: parameters of its `run`, without self.
    """

    root: Path
    version: str | None
    plan: tuple[str, ...]
    run: tuple[str, ...]


@dataclass(frozen=True)
class Installation:
    """One installed SGLang.

    Attributes:
        root: its package directory, the one with `srt` in it.
        version: its version, None if it does not say.
        flashinfer: the FlashInfer beside it, None if there is none.
    """

    root: Path
    version: str | None
    flashinfer: FlashInfer | None

    def backends(self) -> list[Path]:
        """The attention backends that mention the KV pool, in the order of their paths."""
        found = [path for directory in _BACKENDS for path in (self.root / directory).rglob("*.py")]
        return sorted(path for path in found if "attention" in path.parts and mentions_pool(path.read_bytes()))


@dataclass(frozen=True)
class Gpu:
    """The first GPU of this machine: its name and compute capability."""

    name: str
    capability: tuple[int, int]


def find_installation(directory: Path | None = None) -> Installation:
    """Find SGLang.

    Args:
        directory: the package, the site-packages or venv that it is in, a checkout, or a container's mounted file
            system; None for the SGLang of this Python, else of the active virtual environment.

    Raises:
        UsageError: none is there, or several, or it may not be looked for there.
    """
    try:
        roots = list(_candidates(directory) if directory is not None else _active())
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be looked into for an SGLang: {error.strerror}") from error
    where = f"{directory}" if directory is not None else "this Python and the active environment"
    if not roots:
        raise UsageError(
            f"{where}: no SGLang found; name its site-packages, venv, checkout or container mount with --sglang DIR"
        )
    if len(roots) > 1:
        raise UsageError(f"{where}: several SGLangs found, name one with --sglang: {', '.join(map(str, roots))}")
    (root,) = roots
    if directory is None:
        places = _flashinfer_of_this_python()
    else:
        places = [place for layout in _SITE_PACKAGES for place in sorted(directory.glob(layout))]
    return _installation(root, places)


def find_installation_of(python: str, environment: Mapping[str, str]) -> Installation:
    """Find the SGLang that another Python would import; it is asked where, and imports nothing.

    Args:
        python: the interpreter.
        environment: all variables that it runs with, PYTHONPATH among them.

    Raises:
        UsageError: it has none.
    """
    try:
        ran = subprocess.run(
            [python, "-c", _WHERE], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(f"{python}: does not say where its SGLang is; name it with --sglang DIR") from error
    roots = [Path(location).resolve() for location in found["sglang"]]
    root = next((root for root in roots if (root / "srt").is_dir()), None)
    if root is None:
        raise UsageError(f"{python}: has no SGLang; name the one that the server runs with --sglang DIR")
    return _installation(root, [Path(location).parent for location in found["flashinfer"]])


def find_python(installation: Installation, directory: Path | None = None) -> tuple[Path, tuple[Path, ...]]:
    """Find the Python that would import an installation, and with it its torch and FlashInfer.

    Args:
        installation: from `find_installation`.
        directory: what that was given.

    Returns:
        Its executable, and what has to be on its PYTHONPATH: nothing, or the directory that SGLang is in where that is
        no Python's own.
    """
    site = installation.root.parent
    if site in {Path(entry).resolve() for entry in sys.path if entry}:
        return Path(sys.executable), ()
    home = re.fullmatch(r"(.+)/lib\d*/python(3\.\d+)/(?:site|dist)-packages", site.as_posix())
    if home is not None:
        own = shutil.which(f"python{home[2]}", path=f"{home[1]}/bin")
        same = shutil.which(f"python{home[2]}")
        if own or same:
            return (Path(own), ()) if own else (Path(same or ""), (site,))
    # A checkout: the environment that it is installed into, editable.
    environments = _environments() if directory is None else [directory]
    pythons = [environment / "bin" / "python" for environment in environments]
    found = next((python for python in pythons if python.exists()), None)
    return (found.absolute(), ()) if found is not None else (Path(sys.executable), (site,))


def find_gpu() -> Gpu | None:
    """The GPU that nvidia-smi names first; None where there is no nvidia-smi or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"(.+), (\d+)\.(\d+)", answer)
    return None if match is None else Gpu(name=match[1], capability=(int(match[2]), int(match[3])))


def _candidates(directory: Path) -> Iterator[Path]:
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory")
    found = [path for layout in _LAYOUTS for path in sorted(directory.glob(f"{layout}/srt/layers/attention"))]
    roots = dict.fromkeys(path.resolve().parents[2] for path in found)
    yield from roots or _editable(directory)


def _active() -> Iterator[Path]:
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    roots = [Path(location).resolve() for location in locations]
    roots = [root for root in roots if (root / "srt").is_dir()]
    if not roots:
        roots = [root for environment in _environments() for root in _candidates(environment)]
    yield from dict.fromkeys(roots)


def _environments() -> list[Path]:
    """The active virtual environments."""
    named = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    return [Path(each) for each in named if each and Path(each).is_dir()]


def _editable(directory: Path) -> Iterator[Path]:
    """An editable install's sources, which its dist-info names (PEP 610); below `directory` if that is a mount."""
    for layout in (".", *_SITE_PACKAGES):
        for record in sorted(directory.glob(f"{layout}/sglang-*.dist-info/direct_url.json")):
            url = urlparse(json.loads(record.read_text()).get("url", ""))
            source = unquote(url.path)
            for base in (directory / source.lstrip("/"), Path(source)):
                root = base / "sglang"
                if url.scheme == "file" and (root / "srt").is_dir():
                    yield root.resolve()
                    break


def _installation(root: Path, places: list[Path]) -> Installation:
    return Installation(root=root, version=_version(root, "sglang"), flashinfer=_flashinfer([root.parent, *places]))


def _flashinfer_of_this_python() -> list[Path]:
    spec = importlib.util.find_spec("flashinfer")
    return [Path(location).parent for location in (spec.submodule_search_locations or [])] if spec else []


def _flashinfer(places: list[Path]) -> FlashInfer | None:
    """The FlashInfer beside SGLang, or for a checkout, of the place that was named or of its Python."""
    root = next((place / "flashinfer" for place in places if (place / "flashinfer").is_dir()), None)
    if root is None:
        return None
    for path in sorted(root.glob("mla*.py")) + sorted(root.glob("mla/**/*.py")):
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ClassDef) and node.name == _WRAPPER:
                return FlashInfer(
                    root, _version(root, "flashinfer*"), _parameters(node, "plan"), _parameters(node, "run")
                )
    return FlashInfer(root, _version(root, "flashinfer*"), (), ())


def _parameters(wrapper: ast.ClassDef, method: str) -> tuple[str, ...]:
    """The parameters of a method; its last definition is the real one, the others are overloads."""
    for node in reversed(wrapper.body):
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return tuple(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))[1:]
    return ()


def _version(root: Path, distribution: str) -> str | None:
    for name in ("_version.py", "version.py", "_build_meta.py"):
        path = root / name
        if path.exists():
            for node in ast.walk(_parse(path)):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    # SGLang's version.py falls back to this where it was never built.
                    if "__version__" in names and not str(node.value.value).startswith("0.0.0"):
                        return str(node.value.value)
    for metadata in sorted(root.parent.glob(f"{distribution}-*.dist-info/METADATA")):
        match = re.search(r"^Version: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1]
    project = root.parent / "pyproject.toml"
    match = (
        re.search(r'^version = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
        if project.exists()
        else None
    )
    return match[1] if match else None


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])
