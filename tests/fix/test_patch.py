"""A fix of an installation as a whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mla_diag.errors import UnknownCodeError
from mla_diag.fix.journal import Journal, JournalError
from mla_diag.fix.locate import Installation
from mla_diag.fix.patch import apply, is_fixed, plan_patch, revert
from mla_diag.fix.strategy import Strategy, kernel_files
from mla_diag.fix.verify import verify
from tests.fix.conftest import CSR, DATA, PAGE_TABLE, contents, edit

DISPATCH = "srt/layers/attention/mla_fp8_dispatch.py"


def test_apply_verify_revert(installation: Installation) -> None:
    before = contents(installation.root)
    patch = apply(installation, Strategy.GATHER)
    assert patch is not None
    assert {str(change.path) for change in patch.changes} >= {CSR, PAGE_TABLE, DISPATCH}
    assert b'\nSTRATEGY = "gather"\n' in (installation.root / DISPATCH).read_bytes()
    assert verify(installation).holds
    revert(installation)
    assert contents(installation.root) == before


def test_both_kernels_go_beside_the_backends_and_come_away_again(installation: Installation) -> None:
    attention = (installation.root / DISPATCH).parent
    before = set(attention.iterdir())
    apply(installation, Strategy.AUTO)
    added = {path.name: path.read_bytes() for path in set(attention.iterdir()) - before}
    added.pop(Path(DISPATCH).name)
    assert added == {path.name: path.read_bytes() for path in kernel_files()}
    kept = [Path(entry.path).name for entry in Journal(installation.root).record().files if entry.before is None]
    assert set(kept) == {*added, Path(DISPATCH).name}
    (attention / "mla_fp8_sm90.cu").write_text("// edited\n")
    wrong = [verdict for verdict in verify(installation).verdicts if verdict.holds is False]
    assert [verdict.path.name for verdict in wrong] == ["mla_fp8_sm90.cu"]
    with pytest.raises(JournalError, match=r"mla_fp8_sm90\.cu: changed by something else"):
        revert(installation)
    (attention / "mla_fp8_sm90.cu").write_bytes(added["mla_fp8_sm90.cu"])
    revert(installation)
    assert set(attention.iterdir()) == before


def test_copied_kernels_run_and_build_in_the_other_package(installation: Installation) -> None:
    """In a process that has SGLang's directory and not mla-diag: attention, and where there is a compiler, a cubin."""
    pytest.importorskip("torch")
    apply(installation, Strategy.AUTO)
    program = """
        import sys, torch
        sys.modules["mla_diag"] = None  # what is copied must not need it
        from sglang.srt.layers.attention import mla_fp8_cuda, mla_fp8_operator, mla_fp8_sm90
        pool = torch.randn(8, 1, 576).to(torch.float8_e4m3fn)
        query = torch.randn(1, 4, 576).bfloat16()
        indptr, indices = torch.tensor([0, 5]).int(), torch.tensor([7, 3, 1, 0, 2]).int()
        out, _ = mla_fp8_operator.attend(query, pool, sm_scale=0.1, kv_indptr=indptr, kv_indices=indices)
        keys = pool[indices.long(), 0].float()
        want = (query[0].float() @ keys.T * 0.1).softmax(-1) @ keys[:, :512]
        assert (out[0].float() - want).norm() < 1e-2 * want.norm()
        if mla_fp8_cuda.compiler() is not None:
            tile = next(iter(mla_fp8_sm90.TILES.values()))
            assert mla_fp8_cuda.build(mla_fp8_sm90.SOURCE, "sm_90a", tile.defines).startswith(b"\x7fELF")
    """
    site = installation.root.parent
    environment = os.environ | {"PYTHONPATH": str(site), "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(site / "cache")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_measured_order_is_written_down_and_another_measurement_is_no_other_fix(installation: Installation) -> None:
    """Two strategies that are about as fast change places from one measurement to the next."""
    before = contents(installation.root)
    assert not is_fixed(installation, Strategy.AUTO)
    apply(installation, Strategy.AUTO, ("gather", "kernel"))
    assert b'\nORDER = ("gather", "kernel",)\n' in (installation.root / DISPATCH).read_bytes()
    assert is_fixed(installation, Strategy.AUTO)
    assert not is_fixed(installation, Strategy.KERNEL)
    assert apply(installation, Strategy.AUTO, ("kernel", "gather")) is None
    assert verify(installation).holds
    revert(installation)
    assert contents(installation.root) == before


def test_dry_run_touches_nothing(installation: Installation) -> None:
    before = contents(installation.root)
    patch = plan_patch(installation, Strategy.AUTO)
    text = "".join(patch.diff())
    assert "+from . import mla_fp8_dispatch\n" in text
    assert f"new file sglang/{DISPATCH}, " in text
    assert contents(installation.root) == before


def test_second_apply_changes_nothing(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    once = contents(installation.root)
    assert apply(installation, Strategy.AUTO) is None
    assert contents(installation.root) == once


def test_two_applies_at_once_leave_one_fix(installation: Installation) -> None:
    program = f"""
        import sys
        from pathlib import Path
        from mla_diag.fix.journal import JournalError
        from mla_diag.fix.locate import find_installation
        from mla_diag.fix.patch import apply
        from mla_diag.fix.strategy import Strategy, kernel_files
        try:
            apply(find_installation(Path({str(installation.root)!r})), Strategy.AUTO)
        except JournalError as error:
            sys.exit(str(error))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert any(process.returncode == 0 for process in both)
    assert all(text == "" or "another mla-diag fix is at work here" in text for text in said)
    assert verify(installation).holds


def test_another_strategy_replaces_the_first(installation: Installation) -> None:
    before = contents(installation.root)
    apply(installation, Strategy.AUTO)
    apply(installation, Strategy.NATIVE)
    assert b'\nSTRATEGY = "native"\n' in (installation.root / DISPATCH).read_bytes()
    revert(installation)
    assert contents(installation.root) == before


def test_half_changed_file_stops_all(installation: Installation) -> None:
    edit(
        installation.root,
        CSR,
        "get_key_buffer(layer.layer_id).to(q.dtype)\n        if",
        "get_key_buffer(layer.layer_id)\n        if",
    )
    before = contents(installation.root)
    with pytest.raises(UnknownCodeError, match=rf"{CSR}:\d+: .*nothing has been touched"):
        apply(installation, Strategy.AUTO)
    assert contents(installation.root) == before


def test_fix_without_a_journal_stops_all(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    shutil.rmtree(installation.root / ".mla-diag")
    with pytest.raises(UnknownCodeError, match="carries a fix that no journal accounts for; reinstall SGLang"):
        apply(installation, Strategy.AUTO)


def test_half_of_a_fix_without_a_journal_stops_all(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    shutil.rmtree(installation.root / ".mla-diag")
    shutil.copy(DATA / Path(CSR).name, installation.root / CSR)
    before = contents(installation.root)
    with pytest.raises(UnknownCodeError):
        apply(installation, Strategy.AUTO)
    assert contents(installation.root) == before


def test_sglang_installed_over_a_fix_is_fixed_anew(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    for name in (CSR, PAGE_TABLE):
        (installation.root / name).unlink()
        shutil.copy(DATA / Path(name).name, installation.root / name)
    assert apply(installation, Strategy.AUTO) is not None
    assert verify(installation).holds


def test_edited_fix_is_not_overwritten(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    edit(installation.root, CSR, "# The whole pool, every layer, every step.", "# Mine.")
    before = contents(installation.root)
    for again in (lambda: apply(installation, Strategy.GATHER), lambda: revert(installation)):
        with pytest.raises(JournalError, match="changed"):
            again()
    assert contents(installation.root) == before
    assert not verify(installation).holds


@pytest.mark.parametrize("name", [CSR, DISPATCH])
def test_a_file_that_is_as_it_was_before_the_fix_costs_no_original(installation: Installation, name: str) -> None:
    """`git checkout` of one backend, a dispatch deleted: --apply dropped the journal, with a backend still patched."""
    before = contents(installation.root)

    def put_back() -> None:
        if name == DISPATCH:
            (installation.root / name).unlink()
        else:
            (installation.root / name).write_bytes(before[name])

    apply(installation, Strategy.AUTO)
    put_back()
    assert apply(installation, Strategy.AUTO) is not None
    assert verify(installation).holds
    put_back()
    revert(installation)
    assert contents(installation.root) == before


def test_one_backend_of_another_sglang_costs_no_original(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    (installation.root / CSR).write_text("# of another release\n")
    before = contents(installation.root)
    for again in (lambda: apply(installation, Strategy.AUTO), lambda: revert(installation)):
        with pytest.raises(JournalError, match="changed"):
            again()
    assert contents(installation.root) == before


def test_sglang_that_casts_nothing_has_nothing_to_fix(installation: Installation) -> None:
    for name in (CSR, PAGE_TABLE):
        (installation.root / name).unlink()
    patch = apply(installation, Strategy.AUTO)
    assert patch is not None
    assert not patch.changes
    assert Journal(installation.root).record() is None


def test_runner_without_a_kv_dtype_stops_all(installation: Installation) -> None:
    edit(installation.root, "srt/model_executor/model_runner.py", "self.kv_cache_dtype", "self.pool_dtype")
    with pytest.raises(UnknownCodeError, match="keeps no kv_cache_dtype"):
        apply(installation, Strategy.AUTO)


def test_file_in_the_dispatchs_place_is_not_overwritten(installation: Installation) -> None:
    (installation.root / DISPATCH).write_text("mine = True\n")
    with pytest.raises(UnknownCodeError, match=r"mla_fp8_dispatch\.py: is there already"):
        apply(installation, Strategy.AUTO)


def test_backend_of_other_hardware_stops_nothing(installation: Installation) -> None:
    other = installation.root / "srt" / "layers" / "attention" / "xpu_backend.py"
    shutil.copy(DATA / Path(PAGE_TABLE).name, other)
    before = other.read_bytes()
    apply(installation, Strategy.AUTO)
    assert other.read_bytes() == before
    proof = verify(installation)
    assert proof.holds
    assert [line.partition(" ")[2].partition(":")[0] for line in proof.uncovered] == [
        "FlashAttentionBackend.forward_extend",
        "FlashAttentionBackend.forward_decode",
    ]


def test_verify_of_an_unfixed_sglang_names_what_is_wrong(installation: Installation) -> None:
    proof = verify(installation)
    assert not proof.holds
    wrong = [verdict.verdict for verdict in proof.verdicts if verdict.holds is False]
    assert wrong.count("casts the whole pool") == 5
    assert wrong.count("planned with the model's dtype for the pool") == 4
    ragged = [verdict for verdict in proof.verdicts if "begin_forward" in verdict.code]
    assert [verdict.holds for verdict in ragged] == [None]


def test_verify_sees_a_cast_put_back_behind_the_dispatch(installation: Installation) -> None:
    apply(installation, Strategy.AUTO)
    edit(installation.root, CSR, "q.dtype, decode_wrapper\n        )", "q.dtype, decode_wrapper\n        ).to(q.dtype)")
    wrong = [verdict.verdict for verdict in verify(installation).verdicts if verdict.holds is False]
    assert "casts the whole pool" in wrong
