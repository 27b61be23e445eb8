"""SGLang and FlashInfer are found and read without importing them, wherever they are."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from mla_diag.errors import UsageError
from mla_diag.fix import locate
from mla_diag.fix.locate import find_gpu, find_installation, find_installation_of, find_python
from tests.fix.conftest import CSR, PAGE_TABLE, install


@pytest.mark.parametrize(
    ("inside", "named"),
    [
        ("site-packages", "site-packages"),
        ("site-packages", "site-packages/sglang"),
        ("checkout/python", "checkout"),
        ("venv/lib/python3.11/site-packages", "venv"),
        ("venv/lib64/python3.12/site-packages", "venv"),
        ("mount/usr/local/lib/python3.12/dist-packages", "mount"),
        ("mount/opt/venv/lib/python3.11/site-packages", "mount"),
        ("mount/sgl-workspace/sglang/python", "mount"),
    ],
)
def test_sglang_is_found_in(tmp_path: Path, inside: str, named: str) -> None:
    root = install(tmp_path / inside)
    found = find_installation(tmp_path / named)
    assert found.root == root
    assert found.version == "0.5.17"
    assert [path.relative_to(root).as_posix() for path in found.backends()] == [PAGE_TABLE, CSR]


def test_editable_install_is_followed_into_the_mount(tmp_path: Path) -> None:
    root = install(tmp_path / "mount" / "src" / "sglang" / "python")
    record = tmp_path / "mount" / "usr/local/lib/python3.12/dist-packages/sglang-0.5.17.dist-info/direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": "file:///src/sglang/python", "dir_info": {"editable": True}}))
    assert find_installation(tmp_path / "mount").root == root


def test_several_installations_are_listed(tmp_path: Path) -> None:
    for version in ("3.11", "3.12"):
        install(tmp_path / "lib" / f"python{version}" / "site-packages")
    with pytest.raises(UsageError, match=r"several SGLangs found, name one with --sglang: .*3\.11.*, .*3\.12"):
        find_installation(tmp_path)


def test_place_without_sglang_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no SGLang found; name its site-packages, venv, checkout or container mount"):
        find_installation(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        find_installation(tmp_path / "nowhere")


def test_another_python_is_asked_and_imports_nothing(tmp_path: Path) -> None:
    """As for a checkout on PYTHONPATH with its FlashInfer elsewhere."""
    root, other = install(tmp_path / "checkout"), tmp_path / "other"
    for package in (root, other / "flashinfer"):
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (other / "flashinfer" / "version.py").write_text('__version__ = "0.6.15"\n')
    found = find_installation_of(sys.executable, os.environ | {"PYTHONPATH": f"{root.parent}:{other}"})
    assert (found.root, found.version) == (root, "0.5.17")
    assert found.flashinfer is not None
    assert (found.flashinfer.root, found.flashinfer.version) == (other / "flashinfer", "0.6.15")


def test_another_python_without_sglang_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()  # a directory of that name is none
    with pytest.raises(UsageError, match="has no SGLang; name the one that the server runs with --sglang"):
        find_installation_of(sys.executable, os.environ | {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(UsageError, match="does not say where its SGLang is"):
        find_installation_of("/bin/false", os.environ)


def test_active_environment_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = install(tmp_path / "lib" / "python3.11" / "site-packages")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
    assert find_installation().root == root


VERSIONS = {
    "version.py": ("sglang/version.py", '__version__ = "0.4.6.post5"\n', "0.4.6.post5"),
    "_version.py": ("sglang/_version.py", "version: str\n__version__ = version = '0.5.23'\n", "0.5.23"),
    "dist-info": ("sglang-0.5.4.dist-info/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.4\n", "0.5.4"),
    "pyproject": ("pyproject.toml", '[project]\nname = "sglang"\nversion = "0.4.9"\n', "0.4.9"),
}


@pytest.mark.parametrize(("name", "text", "version"), VERSIONS.values(), ids=VERSIONS.keys())
def test_version_comes_from(tmp_path: Path, name: str, text: str, version: str) -> None:
    root = install(tmp_path)
    (root / "version.py").write_text(
        'try:\n    from sglang._version import v\nexcept ImportError:\n    __version__ = "0.0.0.dev0"\n'
    )
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert find_installation(tmp_path).version == version


def test_unknown_version_is_said_to_be_so(tmp_path: Path) -> None:
    (install(tmp_path) / "version.py").unlink()
    assert find_installation(tmp_path).version is None


WRAPPER = """
class BatchMLAPagedAttentionWrapper:
    @overload
    def run(self, q_nope): ...

    def plan(self, qo_indptr, kv_indptr, *, scale_mode="default"): ...

    @flashinfer_api(trace=trace)
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, ckv_scale=None): ...
"""


@pytest.mark.parametrize("module", ["mla.py", "mla/_core.py", "mla/_batch_mla/_wrapper.py"])
def test_flashinfers_signatures_are_read_where_its_releases_keep_them(tmp_path: Path, module: str) -> None:
    install(tmp_path)
    path = tmp_path / "flashinfer" / module
    path.parent.mkdir(parents=True)
    path.write_text(WRAPPER)
    (tmp_path / "flashinfer" / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    found = find_installation(tmp_path).flashinfer
    assert found is not None
    assert found.version == "0.7.2"
    assert found.plan == ("qo_indptr", "kv_indptr", "scale_mode")
    assert found.run == ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "ckv_scale")


def test_no_flashinfer_is_none(tmp_path: Path) -> None:
    install(tmp_path)
    assert find_installation(tmp_path).flashinfer is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo 'NVIDIA H200, 9.0'; echo 'NVIDIA H200, 9.0'", ("NVIDIA H200", (9, 0))),
        ("echo 'NVIDIA RTX PRO 6000, 12.0'", ("NVIDIA RTX PRO 6000", (12, 0))),
        ("echo 'No devices were found'", None),
        ("echo 'Failed to initialize NVML'; exit 9", None),
    ],
)
def test_gpu_as_nvidia_smi_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: tuple[str, tuple[int, int]] | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    shell = shutil.which("sh")
    assert shell is not None
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(shell).parent}")
    gpu = find_gpu()
    assert (None if gpu is None else (gpu.name, gpu.capability)) == expected


def test_no_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpu() is None


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_python_of_a_venv_is_its_own(tmp_path: Path) -> None:
    root = install(tmp_path / "venv" / "lib" / "python3.11" / "site-packages")
    python = executable(tmp_path / "venv" / "bin" / "python3.11")
    for named in (tmp_path / "venv", root):
        assert find_python(find_installation(named), named) == (python, ())


def test_the_python_of_a_mount_is_one_of_its_version_with_the_mounts_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "mount" / "usr" / "local" / "lib" / "python3.12" / "dist-packages")
    python = executable(tmp_path / "bin" / "python3.12")
    monkeypatch.setenv("PATH", str(python.parent))
    assert find_python(find_installation(tmp_path / "mount"), tmp_path / "mount") == (python, (root.parent,))


def test_the_python_of_a_directory_of_packages_is_this_one(tmp_path: Path) -> None:
    installation = find_installation(install(tmp_path))
    assert find_python(installation, tmp_path) == (Path(sys.executable), (tmp_path,))


def test_the_python_of_packages_on_the_path_is_this_one_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert find_python(find_installation(install(tmp_path))) == (Path(sys.executable), ())


def test_the_python_of_a_checkout_is_of_the_environment_it_is_installed_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = install(tmp_path / "checkout" / "python")
    record = tmp_path / "venv/lib/python3.11/site-packages/sglang-0.5.17.dist-info/direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": f"file://{checkout.parent}", "dir_info": {"editable": True}}))
    python = executable(tmp_path / "venv" / "bin" / "python")
    installation = find_installation(tmp_path / "venv")
    assert installation.root == checkout
    assert find_python(installation, tmp_path / "venv") == (python, ())
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    assert find_python(installation) == (python, ())
