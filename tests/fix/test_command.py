"""`mla-diag fix` as it is called: what it prints and the status it exits with."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from mla_diag.commands import fix
from mla_diag.errors import MlaDiagError, UnknownCodeError, UsageError
from mla_diag.fix.locate import Installation
from mla_diag.fix.strategy import Strategy
from tests.fix.conftest import CSR, PAGE_TABLE, contents, edit

GIT = shutil.which("git")


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def run(installation: Installation, **options: object) -> str:
    text = io.StringIO()
    fix.run(sglang=installation.root, console=Console(file=text, width=200), **options)  # type: ignore[arg-type]
    return text.getvalue()


def test_dry_run_shows_sites_strategy_and_diff_and_touches_nothing(installation: Installation) -> None:
    before = contents(installation.root)
    text = run(installation)
    assert "SGLang      0.5.17" in text
    assert "FlashAttentionBackend.forward_decode" in text
    assert text.count("fixable") == 5
    assert "+            mla_fp8_dispatch.plan(" in text
    assert "copies all of get_key_buffer, for attention by page table" in text
    assert text.endswith("nothing has been changed: --apply does it\n")
    assert contents(installation.root) == before


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_diff_is_the_change_that_apply_makes(installation: Installation) -> None:
    site = installation.root.parent
    (site / "fix.diff").write_text(run(installation))
    subprocess.run([str(GIT), "apply", "--include=*.py", "fix.diff"], cwd=site, check=True)
    by_git = {name: content for name, content in contents(installation.root).items() if name in (CSR, PAGE_TABLE)}
    subprocess.run([str(GIT), "apply", "--reverse", "fix.diff"], cwd=site, check=True)
    run(installation, apply=True)
    assert by_git == {name: (installation.root / name).read_bytes() for name in by_git}


def test_apply_verify_revert(installation: Installation) -> None:
    before = contents(installation.root)
    applied = run(installation, apply=True)
    assert "applied: 2 files rewritten" in applied
    assert "restart it" in applied
    assert "no GPU here, so the gain was not measured" in applied
    assert "nothing has been changed" in run(installation, apply=True)
    proof = run(installation, verify=True)
    assert "FAIL" not in proof
    assert "self.kv_data_type = model_runner.kv_cache_dtype" in proof
    assert "no cast of the whole pool remains" in proof
    assert "fixed already, strategy auto: --verify proves it" in run(installation)
    assert "flashinfer_mla_backend.py: as it was" in run(installation, revert=True)
    assert contents(installation.root) == before


def test_verify_of_an_unfixed_sglang_exits_with_1(installation: Installation) -> None:
    with pytest.raises(fix.NotFixedError, match=r"not fixed: \d+ of \d+ lines say otherwise") as raised:
        run(installation, verify=True)
    assert raised.value.exit_code == 1


def test_unknown_code_exits_with_5_and_touches_nothing(installation: Installation) -> None:
    edit(installation.root, CSR, "        return o.view(-1", "        log(k_buf)\n        return o.view(-1")
    before = contents(installation.root)
    for apply in (False, True):
        with pytest.raises(
            UnknownCodeError, match=r"flashinfer_mla_backend\.py:\d+: log\(\) is given the pool"
        ) as raised:
            run(installation, apply=apply)
        assert raised.value.exit_code == 5
    assert contents(installation.root) == before


def test_fix_that_was_cut_off_is_said_and_undone(installation: Installation) -> None:
    before = contents(installation.root)
    run(installation, apply=True)
    journal = installation.root / ".mla-diag" / "journal.json"
    journal.write_text(journal.read_text().replace('"applied"', '"applying"'))
    assert "a fix was cut off here" in run(installation)
    with pytest.raises(fix.NotFixedError):
        run(installation, verify=True)
    assert "a fix that was cut off has been undone" in run(installation, revert=True)
    assert contents(installation.root) == before


def test_errors_are_one_line(installation: Installation) -> None:
    with pytest.raises(UsageError, match=r"^--apply, --revert and --verify: give one of them$"):
        run(installation, apply=True, revert=True)
    with pytest.raises(UsageError, match=r"^--strategy native: there is no FlashInfer beside this SGLang$"):
        run(installation, apply=True, strategy=Strategy.NATIVE)
    with pytest.raises(UsageError, match=r"^--strategy fast: not one of auto, kernel, native, gather$"):
        fix.parse_strategy("fast")
    with pytest.raises(MlaDiagError, match=r"^[^\n]+: no fix is applied here$"):
        run(installation, revert=True)


def test_nothing_to_fix_is_said(installation: Installation) -> None:
    for path in installation.backends():
        path.unlink()
    assert "there is nothing to fix" in run(installation)
    assert "nothing has been changed" in run(installation, apply=True)
    assert "there is nothing to prove" in run(installation, verify=True)
