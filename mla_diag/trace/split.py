"""From a stream of JSON text to chunks of whole events, without parsing it.

A chunk is cut where one event ends and the next begins. The text between two events is looked for, not parsed, so a cut
can fall on a string that looks like a border; the decoder notices, because no wrongly cut chunk is valid JSON.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mla_diag.errors import UnreadableInputError
from mla_diag.trace.repair import lenient_object

CHUNK_BYTES = 4 * 1024 * 1024
# Metadata may follow the events. Holding this much back keeps it out of every chunk but the last.
_HELD_BACK = 512 * 1024

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_BOM = b"\xef\xbb\xbf"


class Chunk(NamedTuple):
    """Whole events, separated by commas, without brackets around them."""

    text: bytes
    offset: int
    """Where the text starts, in bytes of decompressed JSON."""


class EventChunks:
    """The events of one trace's text in chunks, and the metadata around them.

    Knows Kineto's own layout, traces written as one line, indented ones with metadata before or after the events, and a
    bare array of events.

    Attributes:
        metadata: What stands beside `traceEvents`; complete after iteration.
        cut_at: After iteration, the byte of the JSON text where it stops before its end, or None.
    """

    def __init__(self, path: Path, blocks: Iterable[bytes]) -> None:
        self.metadata: dict[str, Any] = {}
        self.cut_at: int | None = None
        self._path = path
        self._blocks = iter(blocks)
        self._bare_array = False

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks in file order.

        Raises:
            UnreadableInputError: The text is not JSON, or JSON without trace events.
        """
        pending, offset = self._find_events()
        for block in self._blocks:
            pending += block
            if len(pending) < CHUNK_BYTES + _HELD_BACK:
                continue
            cut = _last_border(pending, len(pending) - _HELD_BACK)
            if cut is not None:
                yield Chunk(pending[: cut.start() + 1], offset)
                offset += cut.end()
                pending = pending[cut.end() :]
        last, rest = self._end_of_events(pending)
        if rest is None:
            self.cut_at = offset + len(pending)
        if last.strip():
            yield Chunk(last, offset)

    def _find_events(self) -> tuple[bytes, int]:
        """Read up to the first event; return the text from there and its offset."""
        head = b""
        for block in self._blocks:
            searched = max(0, len(head) - 64)
            head += block
            start = head.removeprefix(_BOM).lstrip()
            if not start:
                continue
            if start[:1] == b"[":
                self._bare_array = True
                offset = len(head) - len(start) + 1
                return head[offset:], offset
            if start[:1] != b"{":
                break
            if found := _EVENTS.search(head, searched):
                before = start[: len(start) - len(head) + found.start()].rstrip().rstrip(b",")
                self.metadata = lenient_object(before + b"}") or {}
                return head[found.end() :], found.end()
        raise UnreadableInputError(f"{self._path}: {_why_not_a_trace(head)}")

    def _end_of_events(self, pending: bytes) -> tuple[bytes, bytes | None]:
        """Split the last text at the bracket that closes the events; the second part is None if there is none."""
        if (start := pending.lstrip())[:1] == b"]":
            return b"", start[1:]
        for end in _END.finditer(pending):
            rest = pending[end.end() :]
            if self._closes(rest):
                return pending[: end.start() + 1], rest
        border = _last_border(pending, len(pending))
        if lenient_object(pending[border.end() if border else 0 :]) is not None:
            return pending, None
        return pending[: border.start() + 1] if border else b"", None

    def _closes(self, rest: bytes) -> bool:
        """Whether this can follow the events: the end of the array, or the other members of the object and its end."""
        if self._bare_array:
            return not rest.strip()
        members = rest.strip().removeprefix(b",").lstrip()
        if members[:1] not in (b'"', b"}"):
            return False
        trailer = lenient_object(b"{" + members)
        if trailer is None:
            return False
        self.metadata.update(trailer)
        return True


def _last_border(text: bytes, before: int) -> re.Match[bytes] | None:
    """The last border between two events that ends before a position, looking at growing windows from there."""
    window = 64 * 1024
    while True:
        start = max(0, before - window)
        borders = deque(_BORDER.finditer(text, start, before), maxlen=1)
        if borders or start == 0:
            return borders[0] if borders else None
        window *= 8


def _why_not_a_trace(head: bytes) -> str:
    text = head.removeprefix(_BOM).lstrip()
    if not text:
        return f"holds nothing but {len(head):,} bytes of white space; give it a torch.profiler trace"
    if text[:1] != b"{":
        return (
            f"not JSON: byte {len(head) - len(text):,} is {text[:1]!r} where a trace has '{{'; "
            "give it a torch.profiler trace (.json or .json.gz)"
        )
    if lenient_object(text) is None:
        return (
            f'the JSON stops or breaks within its first {len(head):,} bytes, before any "traceEvents"; '
            "capture it again, or copy it again if it was still being written"
        )
    return 'JSON, but not a profiler trace: it has no "traceEvents"; give it what torch.profiler exported'
