"""`mla-diag fix` as it is called: what it prints and the status it exits with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from mla_diag.commands import fix
from mla_diag.commands.common import Format, plain_console
from mla_diag.commands.strategies import parse_strategy
from mla_diag.errors import MlaDiagError, UnknownCodeError, UsageError
from mla_diag.fix.locate import Installation, find_installation
from mla_diag.fix.strategy import Strategy
from mla_diag.report.fix_account import FixAccount
from tests.bench.serving_python import serving_python
from tests.bench.test_process import gone
from tests.commands.invoke import Invoke
from tests.fix.conftest import CSR, PAGE_TABLE, contents, edit, install

GIT = shutil.which("git")


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def run(installation: Installation, **options: object) -> str:
    text = io.StringIO()
    console = plain_console(text)
    console.width = 200
    fix.run(sglang=installation.root, console=console, **options)  # type: ignore[arg-type]
    return text.getvalue()


def account(installation: Installation, **options: object) -> dict[str, Any]:
    """What `--format json` writes: the whole output, of the documented schema."""
    text = run(installation, output_format=Format.JSON, **options)
    msgspec.json.decode(text, type=FixAccount)
    fields: dict[str, Any] = json.loads(text)
    assert list(fields)[:2] == ["schema_version", "tool"]
    return fields


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


def test_a_path_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """rich would take `[red]` for a colour and `:warning:` for an emoji."""
    root = install(tmp_path / "of [red] and :warning:")
    fix.run(sglang=root)
    shown = capsys.readouterr().out.replace("\n", "")  # wrapped at the terminal's width
    assert "[red]" in shown
    assert ":warning:" in shown


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
    assert "no GPU here, so nothing was measured" in applied
    assert "auto takes the first that works: kernel, native, gather" in applied
    assert "mla-diag bench server --url http://localhost:30000" in applied
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
        parse_strategy("fast")
    with pytest.raises(MlaDiagError, match=r"^[^\n]+: no fix is applied here$"):
        run(installation, revert=True)


def test_nothing_to_fix_is_said(installation: Installation) -> None:
    for path in installation.backends():
        path.unlink()
    assert "there is nothing to fix" in run(installation)
    assert "nothing has been changed" in run(installation, apply=True)
    assert "there is nothing to prove" in run(installation, verify=True)


def test_json_of_a_dry_run_and_of_what_follows(installation: Installation) -> None:
    before = contents(installation.root)
    dry = account(installation)
    assert contents(installation.root) == before
    assert dry["outcome"] == "fixable"
    assert dry["sglang"] == {"version": "0.5.17", "root": str(installation.root)}
    assert (dry["flashinfer"], dry["gpu"], dry["strategy"]) == (None, None, "auto")
    assert [(way["strategy"], way["works"]) for way in dry["outlooks"]] == [
        ("kernel", None),
        ("native", False),
        ("gather", True),
    ]
    assert len(dry["sites"]) == 5
    site = next(site for site in dry["sites"] if site["kind"] == "page table")
    assert (site["file"], site["pool"], site["fixable"], site["problem"]) == (PAGE_TABLE, "get_key_buffer", True, None)
    line = (installation.root / PAGE_TABLE).read_text().splitlines()[site["line"] - 1]
    assert site["code"] in line
    rewritten = {change["file"]: change["diff"] for change in dry["changes"] if change["change"] == "rewritten"}
    assert set(rewritten) == {CSR, PAGE_TABLE}
    assert "+            mla_fp8_dispatch.plan(" in rewritten[CSR]

    applied = account(installation, apply=True)
    assert applied["outcome"] == "applied"
    assert [applied[name] for name in ("sites", "changes")] == [dry[name] for name in ("sites", "changes")]
    assert account(installation, apply=True)["outcome"] == account(installation)["outcome"] == "fixed-already"

    proof = account(installation, verify=True)
    assert proof["outcome"] == "verified"
    assert {verdict["holds"] for verdict in proof["verdicts"]} == {True, None}

    reverted = account(installation, revert=True)
    assert reverted["outcome"] == "reverted"
    assert {change["change"] for change in reverted["changes"]} == {"restored", "removed"}
    assert {change["file"] for change in reverted["changes"]} == {change["file"] for change in applied["changes"]}
    assert contents(installation.root) == before


def test_json_of_an_unfixed_sglang_comes_before_the_line_and_the_status(installation: Installation) -> None:
    text = io.StringIO()
    with pytest.raises(fix.NotFixedError):
        fix.run(sglang=installation.root, verify=True, output_format=Format.JSON, console=Console(file=text))
    fields = json.loads(text.getvalue())
    assert fields["outcome"] == "not-fixed"
    assert {verdict["verdict"] for verdict in fields["verdicts"] if verdict["holds"] is False} >= {
        "casts the whole pool"
    }


def test_json_of_a_file_that_is_left_alone_says_why(installation: Installation) -> None:
    musa = installation.root / "srt/hardware_backend/musa/attention/flashattention_backend.py"
    musa.parent.mkdir(parents=True)
    shutil.copy(installation.root / PAGE_TABLE, musa)
    sites = [site for site in account(installation)["sites"] if "musa" in site["file"]]
    assert sites
    assert all(not site["fixable"] and "other hardware (musa)" in site["problem"] for site in sites)


def test_lines_of_a_pipe_are_not_broken(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool reads them, and a pipe has no width."""
    monkeypatch.setenv("COLUMNS", "40")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        fix.run(sglang=installation.root, apply=True)
        fix.run(sglang=installation.root, apply=True)
    lines = said.getvalue().splitlines()
    assert "fixed already, strategy auto: nothing has been changed; --revert first to measure anew" in lines


def test_json_on_the_command_line(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke = Invoke(monkeypatch, capsys)
    result = invoke("fix", "--sglang", installation.root, "--verify", "--format", "json")
    assert (result.returncode, json.loads(result.stdout)["outcome"]) == (1, "not-fixed")
    assert result.stderr.startswith(f"mla-diag: {installation.root}: not fixed")
    assert invoke("fix", "--sglang", installation.root, "--format", "xml").returncode == 2


# ---- on a machine with a GPU, by a made-up nvidia-smi and server's Python --------------------------------------------


@pytest.fixture
def _h200(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200, 9.0\n")
    tool.chmod(0o755)


def in_a_venv(directory: Path, **behaviour: float | str) -> Installation:
    """An SGLang with a FlashInfer that has an FP8 MLA, and a Python that answers as `behaviour` says."""
    site = directory / "venv" / "lib" / "python3.11" / "site-packages"
    root = install(site)
    (site / "flashinfer").mkdir()
    (site / "flashinfer" / "mla.py").write_text(
        "class BatchMLAPagedAttentionWrapper:\n    def run(self, q_nope, ckv_scale): ...\n"
    )
    serving_python(directory / "venv" / "bin" / "python3.11", **behaviour)
    return find_installation(root)


def dispatch_of(installation: Installation) -> str:
    return (installation.root / "srt/layers/attention/mla_fp8_dispatch.py").read_text()


@pytest.mark.usefixtures("_h200")
def test_apply_measures_and_writes_the_order_down(tmp_path: Path) -> None:
    installation = in_a_venv(tmp_path, kernel=20.0, native=15.0, gather="wrong", cast=900.0)
    text = run(installation, apply=True)
    assert "measuring kernel, native, gather, cast with " in text
    assert "NVIDIA H200: copies at 4.00 TB/s, BF16 products at 700 TFLOP/s" in text
    assert "   16     1    2048  native               15.0    1.50 x   1.7e-03" in text
    assert "gather: fails: at 1 x 32768, 16 heads, its relative error is 3.0e-02, not under 2.0e-03" in text
    assert "auto takes the first that works: native, kernel\n" in text
    assert 'ORDER = ("native", "kernel",)' in dispatch_of(installation)
    again = run(installation, apply=True)
    assert "fixed already" in again
    assert "measuring" not in again


@pytest.mark.usefixtures("_h200")
def test_json_has_what_was_measured(tmp_path: Path) -> None:
    applied = account(in_a_venv(tmp_path, kernel=20.0, native=15.0, gather="wrong", cast=900.0), apply=True)
    assert applied["outcome"] == "applied"
    measured = applied["measured"]
    assert (measured["device"], measured["order"]) == ("NVIDIA H200", ["native", "kernel"])
    verdicts = {each["strategy"]: each["verdict"] for each in measured["strategies"]}
    assert verdicts == {"kernel": "right", "native": "right", "gather": "failed", "cast": "right"}
    assert measured["strategies"][1]["rows"][0]["us"] == 15.0
    assert applied["gpu"] == {"name": "NVIDIA H200", "capability": [9, 0]}


@pytest.mark.usefixtures("_h200")
def test_a_chosen_strategy_stays_if_it_is_right(tmp_path: Path) -> None:
    installation = in_a_venv(tmp_path, kernel=20.0, native=15.0, cast=900.0)
    run(installation, apply=True, strategy=Strategy.KERNEL)
    assert 'STRATEGY = "kernel"' in dispatch_of(installation)


@pytest.mark.usefixtures("_h200")
def test_a_chosen_strategy_that_fails_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    installation = in_a_venv(tmp_path, native="crash")
    before = contents(installation.root)
    with pytest.raises(
        UsageError, match=r"^--strategy native: measured here, it fails: it was killed by SIGSEGV; noth"
    ):
        run(installation, apply=True, strategy=Strategy.NATIVE)
    assert contents(installation.root) == before


@pytest.mark.usefixtures("_h200")
def test_what_raises_with_brackets_in_its_words_is_printed_as_it_is(tmp_path: Path) -> None:
    text = run(in_a_venv(tmp_path, native="raises", kernel="slower"), apply=True)
    assert "native: fails: at 1 x 2048, 16 heads, RuntimeError: [no] kernel image" in text
    assert "kernel: the Triton kernel in place of Hopper's own, which is faster: no compiler" in text


@pytest.mark.usefixtures("_h200")
def test_where_nothing_can_be_measured_the_usual_order_is_taken(tmp_path: Path) -> None:
    installation = in_a_venv(tmp_path, kernel="no torch")
    text = run(installation, apply=True)
    assert "\nnot measured: ModuleNotFoundError: No module named 'torch'\n" in text
    assert "auto takes the first that works: kernel, native, gather\n" in text
    assert 'ORDER = ("kernel", "native", "gather")' in dispatch_of(installation)


@pytest.mark.usefixtures("_h200")
def test_code_that_is_not_understood_is_said_before_minutes_of_measuring(tmp_path: Path) -> None:
    installation = in_a_venv(tmp_path)
    edit(installation.root, CSR, "        return o.view(-1", "        log(k_buf)\n        return o.view(-1")
    with pytest.raises(UnknownCodeError):
        run(installation, apply=True)
    assert not list(tmp_path.rglob("*.asked"))


@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_what_is_measuring_on_the_gpu(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """It has a session of its own, which no closed terminal ends."""
    installation = in_a_venv(tmp_path, kernel="hang")
    before = contents(installation.root)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "mla_diag", "fix", "--apply", "--sglang", str(installation.root)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    asked = tmp_path / "venv/bin/python3.11.asked"
    deadline = time.monotonic() + 30
    while not asked.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    measuring = int(asked.with_suffix(".pid").read_text())
    assert not gone(measuring)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (status, "")
    while not gone(measuring):
        assert time.monotonic() < deadline
    assert list(scratch.iterdir()) == []
    assert contents(installation.root) == before
