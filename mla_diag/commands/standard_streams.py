"""Standard output and error that bear whatever becomes of them: no traceback, and no other exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mla_diag.errors import UsageError


@contextmanager
def sturdy_streams() -> Iterator[None]:
    """Have what is written to standard output and error bear a closed end, a full disk and a narrow encoding.

    Where whoever reads has gone, as `| head` does, the rest is dropped and the command ends as it would have. What an
    encoding has no letters for is replaced. A stream that was closed before the command began stays silent.

    Raises:
        UsageError: Standard output cannot be written for another reason.
    """
    given = sys.stdout, sys.stderr
    # A closed descriptor would be given to the next file that is opened, a trace say, and be written over.
    sys.stdout = cast(TextIO, _Stream(_open(sys.stdout), "standard output"))
    sys.stderr = cast(TextIO, _Stream(_open(sys.stderr), None))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = given


def _open(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - a stream for the whole command
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream


class _Stream:
    """A text stream that drops what nobody reads; all else is the stream's own."""

    def __init__(self, stream: TextIO, name: str | None) -> None:
        self._stream = stream
        self._name = name  # None where a failure has nobody left to tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Send the rest nowhere, what is still buffered too: Python would stumble over that once more at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._name is not None and not isinstance(error, BrokenPipeError):
            raise UsageError(f"{self._name}: cannot be written: {error.strerror}") from error
