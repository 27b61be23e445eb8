"""A small installation of SGLang to fix: the two backends, in its shape, and what they import."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mla_diag.fix.locate import Installation, find_installation

DATA = Path(__file__).parent / "data"
CSR = "srt/layers/attention/flashinfer_mla_backend.py"
PAGE_TABLE = "srt/layers/attention/flashattention_backend.py"


def install(directory: Path) -> Path:
    """Put the installation's files into a site-packages and return its root."""
    attention = directory / "sglang" / "srt" / "layers" / "attention"
    attention.mkdir(parents=True)
    for path in DATA.glob("*.py"):
        shutil.copy(path, attention)
    runner = directory / "sglang" / "srt" / "model_executor" / "model_runner.py"
    runner.parent.mkdir()
    runner.write_text("class ModelRunner:\n    def __init__(self, dtype):\n        self.kv_cache_dtype = dtype\n")
    # A package without one gives way to any SGLang further back on the path.
    (directory / "sglang" / "__init__.py").write_text("")
    (directory / "sglang" / "version.py").write_text('__version__ = "0.5.17"\n')
    return directory / "sglang"


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """A fresh installation."""
    install(tmp_path / "site-packages")
    return find_installation(tmp_path / "site-packages")


def contents(root: Path) -> dict[str, bytes]:
    """Every file of an installation, compiled code aside."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Replace a text that is there exactly once."""
    path = root / name
    text = path.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    path.write_text(text.replace(old, new))
