"""All-or-nothing changes to the files of an installation, and the way back.

A directory `.mla-diag` in the installation's root keeps the originals and a journal. The journal is written before the
first file changes and says `applying` until all have, so whoever comes after a crash (`recover`) puts the originals
back. Originals are kept as hard links where the file system has them: they cost no space, and putting one back restores
content, mode, owner and time stamps at once, even on a full disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from mla_diag.errors import MlaDiagError

_DIRECTORY = ".mla-diag"
_STAGED = ".mla-diag-new"


class JournalError(MlaDiagError):
    """The files could not be changed, or are not as the journal left them."""


@dataclass(frozen=True)
class Change:
    """What one file is to become.

    Attributes:
        path: the file, below the installation's root.
        before: its present content; None for a file that is to be added.
        after: its new content.
    """

    path: Path
    before: bytes | None
    after: bytes


class Entry(msgspec.Struct, frozen=True):
    """One changed file of a journal, by SHA-256; `before` is None for a file that was added."""

    path: str
    before: str | None
    after: str


class Record(msgspec.Struct, frozen=True):
    """The journal's content."""

    state: Literal["applying", "applied", "reverting"]
    sglang: str | None
    strategy: str
    files: list[Entry]
    schema_version: int = 1


class Journal:
    """The journal of one installation. Its methods need the lock that `locked` takes."""

    def __init__(self, root: Path) -> None:
        """Open the journal of the installation in `root`, which need not have one."""
        self._root = root
        self._directory = root / _DIRECTORY
        self._file = self._directory / "journal.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others out.

        Raises:
            JournalError: another process has the lock.
        """
        # On the directory itself, so that no lock file is left in an installation.
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(
                f"{self._root}: another mla-diag fix is at work here; try again when it is done"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def record(self) -> Record | None:
        """What has been done here; None if nothing, or all of it was reverted.

        Raises:
            JournalError: the journal is damaged.
        """
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise JournalError(f"{self._file}: unreadable ({error}); reinstall SGLang and remove it") from error

    def recover(self) -> bool:
        """Undo what a killed process left half done.

        Returns:
            Whether there was anything.

        Raises:
            JournalError: a file has been changed by something else since.
        """
        record = self.record()
        if record is None:
            leftovers = self._directory.is_dir()
            shutil.rmtree(self._directory, ignore_errors=True)
            return leftovers
        if record.state == "applied":
            return False
        with self._explained("undoing a change that was cut off"):
            self._restore(record)
        return True

    def apply(self, changes: Sequence[Change], *, sglang: str | None, strategy: str) -> None:
        """Make all the changes or none.

        Args:
            changes: at least one of a file that exists.
            sglang: SGLang's version, for the record.
            strategy: the strategy that the changes were made for.

        Raises:
            JournalError: a file is not as `before` says, or cannot be written; all are as they were.
        """
        entries = [Entry(str(each.path), _digest(each.before), _digest(each.after) or "") for each in changes]
        for entry in entries:
            if _digest_of(self._root / entry.path) != entry.before:
                raise JournalError(f"{self._root / entry.path}: changed while it was read; nothing has been changed")
        model = next(self._root / each.path for each in changes if each.before is not None)
        record = Record("applying", sglang, strategy, entries)
        with self._explained("nothing has been changed"):
            try:
                self._directory.mkdir(exist_ok=True)
                self._write(record)
                for change, kept in zip(changes, self._originals(record), strict=True):
                    target = self._root / change.path
                    if change.before is not None:
                        _duplicate(target, kept)
                    _stage(target, change.after, like=target if change.before is not None else model)
                for change in changes:
                    target = self._root / change.path
                    _staged(target).replace(target)
                self._write(msgspec.structs.replace(record, state="applied"))
            except BaseException:  # an interrupt too: nobody expects half a fix from that
                self._restore(record)
                raise
        self._drop_bytecode(record)

    def revert(self) -> list[Path]:
        """Put the originals back, byte for byte.

        Returns:
            The files that were changed back or removed.

        Raises:
            JournalError: nothing has been applied, or some file has been changed by something else since.
        """
        record = self.record()
        if record is None:
            raise JournalError(f"{self._root}: no fix is applied here")
        foreign = self.foreign(record)
        if foreign:
            raise JournalError(
                f"{', '.join(map(str, foreign))}: changed by something else after the fix, so nothing is reverted; "
                f"the originals are in {self._directory}, or reinstall SGLang"
            )
        with self._explained("run --revert again"):
            self._write(msgspec.structs.replace(record, state="reverting"))
            self._restore(record)
        return [self._root / entry.path for entry in record.files]

    def forget(self) -> None:
        """Drop the journal, after SGLang has been installed over the changed files."""
        record = self.record()
        for entry in record.files if record is not None else []:
            path = self._root / entry.path
            if entry.before is None and _digest_of(path) == entry.after:
                path.unlink()
        shutil.rmtree(self._directory)

    def changed_since(self, record: Record) -> list[Path]:
        """The files that are no longer as the fix left them."""
        return [self._root / each.path for each in record.files if _digest_of(self._root / each.path) != each.after]

    def foreign(self, record: Record) -> list[Path]:
        """The files that are neither as the fix left them nor as they were before it."""
        return [
            self._root / each.path
            for each in record.files
            if _digest_of(self._root / each.path) not in (each.before, each.after)
        ]

    def _restore(self, record: Record) -> None:
        """Bring every file to its state before; those that are in it already stay."""
        for entry, kept in zip(record.files, self._originals(record), strict=True):
            target = self._root / entry.path
            _staged(target).unlink(missing_ok=True)
            present = _digest_of(target)
            if present == entry.before:
                continue
            if present != entry.after:
                raise JournalError(
                    f"{target}: changed by something else while a fix was half done; its original is {kept}"
                )
            if entry.before is None:
                target.unlink()
                continue
            if not kept.is_symlink() and _digest_of(kept) != entry.before:
                raise JournalError(f"{kept}: the kept original is damaged; reinstall SGLang")
            _duplicate(kept, _staged(target))
            _staged(target).replace(target)
        self._drop_bytecode(record)
        self._file.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _originals(self, record: Record) -> list[Path]:
        return [self._directory / f"{number}.original" for number in range(len(record.files))]

    def _write(self, record: Record) -> None:
        text = msgspec.json.format(msgspec.json.encode(record), indent=2)
        _stage(self._file, text, like=None)
        _staged(self._file).replace(self._file)
        for directory in {self._directory, *((self._root / entry.path).parent for entry in record.files)}:
            _sync(directory)

    def _drop_bytecode(self, record: Record) -> None:
        """Remove compiled code: Python tells it stale by size and seconds, which a quick edit may not change."""
        for path in (self._root / entry.path for entry in record.files if entry.path.endswith(".py")):
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                with suppress(OSError):
                    compiled.unlink()

    @contextmanager
    def _explained(self, what_now: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalError(f"{error.filename or self._root}: {error.strerror}; {what_now}") from error


def _digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _digest_of(path: Path) -> str | None:
    return _digest(path.read_bytes()) if path.exists() else None


def _staged(target: Path) -> Path:
    return target.with_name(f"{target.name}{_STAGED}")


def _stage(target: Path, content: bytes, *, like: Path | None) -> None:
    """Write content beside its target, durably, with the mode and owner of `like`."""
    staged = _staged(target)
    with staged.open("wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from error
    if like is not None:
        status = like.stat()
        staged.chmod(status.st_mode)
        with suppress(PermissionError):
            os.chown(staged, status.st_uid, status.st_gid)


def _duplicate(source: Path, copy: Path) -> None:
    """Give a file a second name: as another link of the same kind, else as a copy with its mode and times."""
    copy.unlink(missing_ok=True)
    if source.is_symlink():
        copy.symlink_to(source.readlink())
        return
    try:
        copy.hardlink_to(source)
    except OSError:
        shutil.copy2(source, copy)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
