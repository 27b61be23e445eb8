"""From a path to the bytes of its JSON text, decompressed in a thread while the caller decodes."""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from isal import isal_zlib
from isal.igzip_lib import IsalError

from mla_diag.errors import UnreadableInputError
from mla_diag.trace.remote import TraceFile

GZIP_MAGIC = b"\x1f\x8b"
# Compressed traces shrink 12 to 30 times: a read of this size gives a few MiB of text.
_READ_BYTES = 131072
_TEXT_BYTES = 8 * _READ_BYTES
_SALVAGE_BYTES = 64
_GZIP_WBITS = 31
_BLOCKS_AHEAD = 4

Progress = Callable[[int, int], None]
"""Called with the bytes read from the file so far and the file's size, 0 for a pipe."""


class TraceBytes:
    """The decompressed bytes of one trace, a file or a pipe, to be iterated once.

    Whether it is gzip is told from its content. A gzip stream that is cut off or damaged gives what can be decompressed
    and then stops; `damage` says what happened.

    Attributes:
        path: The file.
        damage: After iteration, why the bytes stop early, or None if the file was read to its end.
    """

    def __init__(self, path: TraceFile, progress: Progress | None = None) -> None:
        self.path = path
        self.damage: str | None = None
        self._progress = progress
        self._done = 0
        self._stop = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        """Yield blocks of decompressed bytes, none of them empty.

        Raises:
            UnreadableInputError: The file is missing, a directory, unreadable, or empty.
        """
        blocks: queue.Queue[bytes | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        threading.Thread(target=self._fill, args=(blocks,), name="decompress", daemon=True).start()
        try:
            while (block := blocks.get()) is not None:
                if isinstance(block, BaseException):
                    raise block
                yield block
        finally:
            self._stop.set()

    def _fill(self, blocks: queue.Queue[bytes | BaseException | None]) -> None:
        last: BaseException | None = None
        try:
            with self.path.open("rb") as file:
                for block in self._text(file):
                    if not self._put(blocks, block):
                        return
        except OSError as error:
            last = UnreadableInputError(f"{self.path}: cannot be read: {error.strerror or error}; check the path")
            last.__cause__ = error
        except BaseException as error:  # handed to the consumer, who raises it
            last = error
        self._put(blocks, last)

    def _put(self, blocks: queue.Queue[bytes | BaseException | None], block: bytes | BaseException | None) -> bool:
        """Hand over a block; False once the consumer has left, who must not leave this thread waiting for room."""
        while not self._stop.is_set():
            try:
                blocks.put(block, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _text(self, file: BinaryIO) -> Iterator[bytes]:
        head = file.read(len(GZIP_MAGIC))
        if not head:
            raise UnreadableInputError(
                f"{self.path}: the file is empty (0 bytes); was the profiler still exporting it?"
            )
        if head != GZIP_MAGIC:
            yield from self._pieces(file, head, _TEXT_BYTES)
            return
        given = 0
        try:
            for text in _gunzip(self._pieces(file, head, _READ_BYTES), isal_zlib.decompressobj):
                given += len(text)
                yield text
        except EOFError:
            self.damage = f"the gzip data stops at byte {self._done:,} without its end marker"
        except IsalError as error:  # type: ignore[misc]  # its stub declares a variable
            self.damage = f"the gzip data is damaged before byte {self._done:,} ({error})"
            if file.seekable() and (text := _salvage(file, given)):
                yield text

    def _pieces(self, file: BinaryIO, head: bytes, size: int) -> Iterator[bytes]:
        total = os.fstat(file.fileno()).st_size
        piece = head + file.read(size - len(head))
        while piece:
            self._done += len(piece)
            if self._progress is not None:
                self._progress(self._done, total)
            yield piece
            piece = file.read(size)


def _gunzip(pieces: Iterable[bytes], new_member: Callable[[int], Any]) -> Iterator[bytes]:
    """Decompress the members of a gzip file; zeros between and after them are padding, as other tools have it.

    Raises:
        EOFError: The last member has no end.
    """
    member = new_member(_GZIP_WBITS)
    for piece in pieces:
        data = piece
        while data:
            if member.eof:
                data = data.lstrip(b"\0")
                if not data:
                    break
                if not GZIP_MAGIC.startswith(data[: len(GZIP_MAGIC)]):
                    return  # what follows is no member
                member = new_member(_GZIP_WBITS)
            text = member.decompress(data)
            data = member.unused_data
            if text:
                yield text
    if not member.eof:
        raise EOFError


def _salvage(file: BinaryIO, given: int) -> bytes:
    """What a damaged gzip file still holds past the first `given` bytes of its text.

    The fast decompressor says that a piece is damaged and gives none of it. Small pieces lose less.
    """
    file.seek(0)
    saved: list[bytes] = []
    try:
        for text in _gunzip(iter(lambda: file.read(_SALVAGE_BYTES), b""), zlib.decompressobj):
            if len(text) > given:
                saved.append(text[given:])
            given = max(0, given - len(text))
    except (zlib.error, EOFError):
        pass
    return b"".join(saved)
