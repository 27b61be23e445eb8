"""All files change or none does, whatever stops it, and the way back gives the same bytes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mla_diag.fix.journal import Change, Journal, JournalError

BEFORE = {"one.py": b"one = 1\n", "two.py": b"two = 2\r\n", "three.py": b"three = 3\n"}
AFTER = {"one.py": b"one = 11\n", "two.py": b"two = 22\r\n", "three.py": b"three = 33\n", "new.py": b"new = 4\n"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "sglang"
    root.mkdir()
    for name, content in BEFORE.items():
        (root / name).write_bytes(content)
    return root


def changes() -> list[Change]:
    return [Change(Path(name), BEFORE.get(name), content) for name, content in AFTER.items()]


def apply(root: Path) -> None:
    Journal(root).apply(changes(), sglang="0.5.17", strategy="auto")


def state(root: Path) -> dict[str, bytes]:
    """What is in the directory, the journal's own directory told by its name alone."""
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in sorted(root.iterdir())}


def killed_at(root: Path, call: str, count: int) -> int:
    """Run an apply in a process that kills itself with SIGKILL as it makes its count-th call of `Path.<call>`."""
    program = f"""
        import os, pathlib, signal
        from pathlib import Path
        from tests.fix.test_journal import apply
        real, calls = pathlib.Path.{call}, []
        def deadly(self, *args, **kwargs):
            calls.append(self)
            if len(calls) == {count}:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *args, **kwargs)
        pathlib.Path.{call} = deadly
        apply(Path({str(root)!r}))
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False).returncode


def test_apply_and_revert_give_the_same_bytes(root: Path) -> None:
    apply(root)
    assert {name: content for name, content in state(root).items() if name != ".mla-diag"} == AFTER
    Journal(root).revert()
    assert state(root) == BEFORE


def test_mode_and_times_are_kept(root: Path) -> None:
    (root / "one.py").chmod(0o750)
    os.utime(root / "one.py", ns=(10**18, 10**18))
    before = (root / "one.py").stat()
    apply(root)
    assert (root / "one.py").stat().st_mode == before.st_mode
    assert (root / "new.py").stat().st_mode == before.st_mode
    Journal(root).revert()
    after = (root / "one.py").stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_ino) == (before.st_mode, before.st_mtime_ns, before.st_ino)


def test_other_links_of_a_file_are_not_written_to(root: Path, tmp_path: Path) -> None:
    # uv links installed files to its cache, so writing in place would change every environment.
    (tmp_path / "cache.py").hardlink_to(root / "one.py")
    apply(root)
    assert (tmp_path / "cache.py").read_bytes() == BEFORE["one.py"]
    Journal(root).revert()
    assert (tmp_path / "cache.py").samefile(root / "one.py")


def test_symbolic_link_comes_back_as_one(root: Path, tmp_path: Path) -> None:
    (root / "one.py").rename(tmp_path / "elsewhere.py")
    (root / "one.py").symlink_to("../elsewhere.py")
    apply(root)
    assert (tmp_path / "elsewhere.py").read_bytes() == BEFORE["one.py"]
    Journal(root).revert()
    assert (root / "one.py").readlink() == Path("../elsewhere.py")


def test_compiled_code_is_removed(root: Path) -> None:
    cache = root / "__pycache__"
    cache.mkdir()
    for name in ("one.cpython-311.pyc", "one.cpython-312.opt-1.pyc", "other.cpython-311.pyc"):
        (cache / name).touch()
    apply(root)
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]
    (cache / "two.cpython-311.pyc").touch()
    (cache / "new.cpython-311.pyc").touch()
    Journal(root).revert()
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]


@pytest.mark.parametrize("count", range(1, 7))
def test_kill_between_files_recovers_to_none(root: Path, count: int) -> None:
    # The renames of an apply: the journal's, those of the four files, and the journal's once more.
    assert killed_at(root, "replace", count) == -signal.SIGKILL
    assert Journal(root).recover()
    assert state(root) == BEFORE
    assert not Journal(root).recover()


@pytest.mark.parametrize("call", ["mkdir", "hardlink_to", "chmod"])
def test_kill_while_staging_recovers_to_none(root: Path, call: str) -> None:
    assert killed_at(root, call, 1) == -signal.SIGKILL
    Journal(root).recover()
    assert state(root) == BEFORE


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_between_files_leaves_all_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Ctrl-C in `fix --apply` left a backend patched, without a word."""
    replace, done = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        done.append(path)
        if len(done) == count + 1:  # the journal is written by such a rename too
            raise KeyboardInterrupt
        return replace(path, target)

    before = state(root)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply(root)
    monkeypatch.undo()
    assert state(root) == before


def test_kill_after_the_last_rename_is_an_applied_fix(root: Path) -> None:
    assert killed_at(root, "glob", 1) == -signal.SIGKILL
    assert not Journal(root).recover()
    record = Journal(root).record()
    assert record is not None
    assert record.state == "applied"
    assert not Journal(root).changed_since(record)


def test_kill_in_a_revert_is_finished_by_the_next(root: Path) -> None:
    apply(root)
    program = f"""
        import os, pathlib, signal
        real, calls = pathlib.Path.replace, []
        def deadly(self, target):
            calls.append(self)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, target)
        pathlib.Path.replace = deadly
        from mla_diag.fix.journal import Journal
        Journal(pathlib.Path({str(root)!r})).revert()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert state(root) != BEFORE
    assert Journal(root).recover()
    assert state(root) == BEFORE


def test_full_disk_leaves_all_as_it_was(root: Path) -> None:
    # A limit on the size of a file stands for the disk: the write fails in the same place and way.
    large = [*changes(), Change(Path("large.py"), None, b"#" * 100_000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(JournalError, match=r"large\.py: File too large; nothing has been changed"):
            Journal(root).apply(large, sglang=None, strategy="auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert state(root) == BEFORE


def test_read_only_site_leaves_all_as_it_was(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = f"""
        import os, sys
        from pathlib import Path
        from mla_diag.fix.journal import JournalError
        from tests.fix.test_journal import apply
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            apply(Path({str(root)!r}))
        except JournalError as error:
            sys.exit(str(error))
    """
    if os.geteuid() == 0:
        # Root may write anywhere, so another user tries, who must be able to come here.
        for directory in (root.parent, tmp_path_factory.getbasetemp(), tmp_path_factory.getbasetemp().parent):
            directory.chmod(0o755)
    root.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True)
    root.chmod(0o755)
    assert done.stderr == f"{root / '.mla-diag'}: Permission denied; nothing has been changed\n"
    assert state(root) == BEFORE


def test_second_apply_at_once_is_turned_away(root: Path) -> None:
    first, second = Journal(root).locked(), Journal(root).locked()
    with first, pytest.raises(JournalError, match="another mla-diag fix is at work here"), second:
        pass
    with Journal(root).locked():
        apply(root)


def test_edit_by_another_tool_is_never_overwritten(root: Path) -> None:
    apply(root)
    (root / "two.py").write_bytes(b"two = 'mine'\n")
    with pytest.raises(JournalError, match=r"two\.py: changed by something else after the fix"):
        Journal(root).revert()
    assert (root / "two.py").read_bytes() == b"two = 'mine'\n"
    assert (root / "one.py").read_bytes() == AFTER["one.py"]


def test_edit_after_a_kill_is_never_overwritten(root: Path) -> None:
    killed_at(root, "replace", 4)
    (root / "one.py").write_bytes(b"one = 'mine'\n")
    with pytest.raises(JournalError, match=r"one\.py: changed by something else while a fix was half done"):
        Journal(root).recover()
    assert (root / "one.py").read_bytes() == b"one = 'mine'\n"


def test_file_that_changed_since_it_was_read_stops_all(root: Path) -> None:
    (root / "two.py").write_bytes(b"two = 'mine'\n")
    with pytest.raises(JournalError, match=r"two\.py: changed while it was read; nothing has been changed"):
        apply(root)
    assert state(root) == BEFORE | {"two.py": b"two = 'mine'\n"}


def test_damaged_journal_is_an_error_of_one_line(root: Path) -> None:
    apply(root)
    (root / ".mla-diag" / "journal.json").write_bytes(b'{"state": "appl')
    with pytest.raises(JournalError, match=r"journal\.json: unreadable \([^\n]+$"):
        Journal(root).record()
