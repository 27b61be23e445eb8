"""A fix of one installation: what it would change, and its application."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_diag.errors import UnknownCodeError
from mla_diag.fix.journal import Change, Journal, JournalError, Record
from mla_diag.fix.locate import Installation
from mla_diag.fix.rewrite import rewrite
from mla_diag.fix.sites import DISPATCH, BackendFile, read_backend
from mla_diag.fix.strategy import Strategy, kernel_files

_STRATEGY = re.compile(rb"(?m)^STRATEGY = .*$")
_ORDER = re.compile(rb"(?m)^ORDER = .*$")
_MODEL_RUNNER = Path("srt/model_executor/model_runner.py")


@dataclass(frozen=True)
class Patch:
    """What a fix would change.

    Attributes:
        files: the backends that have sites, those that stay as they are too.
        changes: the files to rewrite and to add; none if there is nothing to fix.
    """

    files: tuple[BackendFile, ...]
    changes: tuple[Change, ...]

    def diff(self) -> Iterator[str]:
        """Lines of a unified diff of the rewritten files; of the added ones, a line each."""
        for change in self.changes:
            if change.before is None:
                lines = len(change.after.splitlines())
                yield f"new file {(Path('sglang') / change.path).as_posix()}, {lines} lines\n"
            yield from diff_of(change)


def diff_of(change: Change) -> Iterator[str]:
    """Lines of a rewritten file's unified diff; none for an added file."""
    if change.before is None:
        return
    name = (Path("sglang") / change.path).as_posix()
    before, after = (text.decode("utf-8", "replace").splitlines(True) for text in (change.before, change.after))
    yield from difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2)


def read_backends(installation: Installation) -> list[BackendFile]:
    """Read every attention backend that has to do with the pool.

    Raises:
        UnknownCodeError: one is not readable as Python.
    """
    files = []
    for path in installation.backends():
        try:
            files.append(read_backend(path, path.read_bytes()))
        except ValueError as error:
            raise UnknownCodeError(f"{error}; nothing has been touched") from error
    return files


def plan_patch(installation: Installation, strategy: Strategy, order: Sequence[str] | None = None) -> Patch:
    """Work out a fix of files that have none.

    Args:
        installation: the SGLang to fix.
        strategy: what is to read the pool.
        order: names of the strategies that `auto` is to try, the first first; None for the dispatch's own order.

    Raises:
        UnknownCodeError: a backend that matters is not understood, half changed, or fixed without a journal.
    """
    files = [file for file in read_backends(installation) if file.sites or file.patched]
    for file in files:
        if file.patched and not file.sites:
            raise UnknownCodeError(f"{file.path}: carries a fix that no journal accounts for; reinstall SGLang")
        if file.problem is not None and (file.needed or file.patched):
            raise UnknownCodeError(f"{file.path}:{file.problem}; nothing has been touched")
    fixable = [file for file in files if file.problem is None]
    runner = installation.root / _MODEL_RUNNER
    if fixable and (not runner.exists() or b"kv_cache_dtype" not in runner.read_bytes()):
        raise UnknownCodeError(f"{runner}: keeps no kv_cache_dtype for the plans to be given; nothing has been touched")
    changes = [_rewritten(installation, file) for file in fixable]
    for directory in sorted({change.path.parent for change in changes}):
        changes += _added(installation, directory, _companions(strategy, order))
    return Patch(tuple(files), tuple(changes))


def apply(installation: Installation, strategy: Strategy, order: Sequence[str] | None = None) -> Patch | None:
    """Fix an installation; all its files or none. The arguments are those of `plan_patch`.

    Returns:
        What was changed; None if this fix was there already.

    Raises:
        UnknownCodeError: see `plan_patch`.
        JournalError: a file cannot be written or has changed since an earlier fix, or another process is at work.
    """
    journal = Journal(installation.root)
    with journal.locked():
        journal.recover()
        record = journal.record()
        if record is not None:
            if not journal.changed_since(record) and _is_current(installation, record, strategy):
                return None
            foreign = journal.foreign(record)
            if not foreign:
                journal.revert()
            elif any(_is_patched(installation.root / each.path) for each in record.files if each.before is not None):
                names = ", ".join(map(str, foreign))
                raise JournalError(f"{names}: changed since the fix; reinstall SGLang, then --apply")
            else:
                # Another SGLang was installed over a fixed one: the journal is about files that are gone.
                journal.forget()
        patch = plan_patch(installation, strategy, order)
        if patch.changes:
            journal.apply(patch.changes, sglang=installation.version, strategy=strategy.value)
        return patch


def is_fixed(installation: Installation, strategy: Strategy) -> bool:
    """Whether this fix is there already, untouched, so that `apply` would change nothing."""
    journal = Journal(installation.root)
    record = journal.record()
    return (
        record is not None
        and record.state == "applied"
        and not journal.changed_since(record)
        and _is_current(installation, record, strategy)
    )


def revert(installation: Installation) -> list[Path]:
    """Undo a fix.

    Returns:
        The files that are as they were again, or gone.

    Raises:
        JournalError: there is none, or a file has changed since.
    """
    journal = Journal(installation.root)
    with journal.locked():
        if journal.recover() and journal.record() is None:
            return []
        return journal.revert()


def _rewritten(installation: Installation, file: BackendFile) -> Change:
    """The change to one file, checked: it compiles, has no site left and every use of the pool is routed."""
    after = rewrite(file)
    try:
        compile(after, str(file.path), "exec", dont_inherit=True)
        again = read_backend(file.path, after)
    except (SyntaxError, ValueError) as error:
        raise UnknownCodeError(f"{file.path}: would not compile when rewritten ({error}); nothing touched") from error
    if again.sites or again.problem:
        raise UnknownCodeError(f"{file.path}: a cast would remain when rewritten; nothing has been touched")
    return Change(file.path.relative_to(installation.root), file.source.module.bytes, after)


def _companions(strategy: Strategy, order: Sequence[str] | None) -> dict[str, bytes]:
    """What goes beside the backends, by file name: the dispatch, set to strategy and order, and the kernels."""
    dispatch = (Path(__file__).parent / "dispatch.py").read_bytes()
    dispatch = _STRATEGY.sub(f'STRATEGY = "{strategy.value}"'.encode(), dispatch, count=1)
    if order is not None:
        names = ", ".join(f'"{name}"' for name in order)
        dispatch = _ORDER.sub(f"ORDER = ({names},)".encode(), dispatch, count=1)
    return {f"{DISPATCH}.py": dispatch} | {path.name: path.read_bytes() for path in kernel_files()}


def _added(installation: Installation, directory: Path, companions: dict[str, bytes]) -> list[Change]:
    added = [Change(directory / name, None, content) for name, content in companions.items()]
    for change in added:
        path = installation.root / change.path
        if path.exists():
            raise UnknownCodeError(f"{path}: is there already; nothing has been touched")
    return added


def _is_current(installation: Installation, record: Record, strategy: Strategy) -> bool:
    """Whether an untouched fix is of this strategy and of this mla-diag, in whatever order `auto` was measured."""
    added = [installation.root / entry.path for entry in record.files if entry.before is None]
    found = {path.name: _ORDER.sub(b"", path.read_bytes()) for path in added}
    return found == {name: _ORDER.sub(b"", content) for name, content in _companions(strategy, None).items()}


def _is_patched(path: Path) -> bool:
    return path.exists() and DISPATCH.encode() in path.read_bytes()
