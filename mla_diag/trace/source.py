"""From a path to the bytes of its JSON text, decompressed in a thread while the caller decodes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from isal import isal_zlib
from isal.igzip_lib import IsalError

from mla_diag.errors import UnreadableInputError

GZIP_MAGIC = b"\x1f\x8b"
# Compressed traces shrink 12 to 30 times: a read of this size gives a few MiB of text.
_READ_BYTES = 256 * 1024
_GZIP_WBITS = 31
_BLOCKS_AHEAD = 4

Progress = Callable[[int, int], None]
"""Called with the bytes read from the file so far and the file's size."""


class TraceBytes:
    """The decompressed bytes of one trace file, to be iterated once.

    Whether the file is gzip is told from its content. A gzip stream that is cut off or damaged gives what can be
    decompressed and then stops; `damage` says what happened.

    Attributes:
        path: The file.
        damage: After iteration, why the bytes stop early, or None if the file was read to its end.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        """Open nothing yet, but check that there is something to open.

        Raises:
            UnreadableInputError: The file is missing, a directory, unreadable, or empty.
        """
        self.path = path
        self.damage: str | None = None
        self._progress = progress
        self._stop = threading.Event()
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                self._gzip = file.read(2) == GZIP_MAGIC
        except OSError as error:
            raise UnreadableInputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
        if self._size == 0:
            raise UnreadableInputError(f"{path}: the file is empty (0 bytes); was the profiler still exporting it?")

    def __iter__(self) -> Iterator[bytes]:
        """Yield blocks of decompressed bytes, none of them empty."""
        blocks: queue.Queue[bytes | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        worker = threading.Thread(target=self._fill, args=(blocks,), name="decompress", daemon=True)
        worker.start()
        try:
            while (block := blocks.get()) is not None:
                if isinstance(block, BaseException):
                    raise block
                yield block
        finally:
            self._stop.set()
            while worker.is_alive():  # a consumer that leaves early must not leave the worker waiting for room
                with contextlib.suppress(queue.Empty):
                    blocks.get(timeout=0.05)
            worker.join()

    def _fill(self, blocks: queue.Queue[bytes | BaseException | None]) -> None:
        try:
            for block in self._gunzip() if self._gzip else self._raw():
                if self._stop.is_set():
                    break
                blocks.put(block)
            blocks.put(None)
        except OSError as error:
            blocks.put(UnreadableInputError(f"{self.path}: reading failed: {error.strerror}"))
        except BaseException as error:  # handed to the consumer, who raises it
            blocks.put(error)

    def _raw(self) -> Iterator[bytes]:
        done = 0
        with self.path.open("rb") as file:
            while block := file.read(8 * _READ_BYTES):
                done += len(block)
                self._report(done)
                yield block

    def _gunzip(self) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(_GZIP_WBITS)
        done = 0
        for data in self._raw():
            for start in range(0, len(data), _READ_BYTES):
                piece = data[start : start + _READ_BYTES]
                while piece:
                    if member.eof:  # a gzip file may hold several members; what follows and is none is padding
                        if not piece.startswith(GZIP_MAGIC):
                            return
                        member = isal_zlib.decompressobj(_GZIP_WBITS)
                    try:
                        text = member.decompress(piece)
                    except IsalError as error:  # type: ignore[misc]  # its stub declares a variable
                        self.damage = f"the gzip data is damaged near byte {done + start:,} ({error})"
                        return
                    piece = member.unused_data
                    if text:
                        yield text
            done += len(data)
        if not member.eof:
            self.damage = f"the gzip data stops at byte {done:,} without its end marker"

    def _report(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._size)
