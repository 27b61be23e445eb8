"""From a stream of JSON text to chunks of whole events, without parsing it.

A chunk is cut where one event ends and the next begins, which is looked for, not parsed. The next must begin with the
name of a member: no string of valid JSON can hold that, because its quotes would be escaped.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mla_diag.errors import UnreadableInputError
from mla_diag.trace.remote import TraceFile
from mla_diag.trace.repair import border, lenient_object

CHUNK_BYTES = 4 * 1024 * 1024
# Metadata may follow the events. Holding this much back keeps it out of every chunk but the last.
_HELD_BACK = 512 * 1024

# A head of this size without events is some other JSON; Kineto's is a few KiB, and a few MiB with thousands of ranks.
_HEAD_BYTES = 256 * 1024 * 1024
# Metadata that is not quite JSON is repaired, at a price, for so many brackets that may be the one before it.
_LENIENT_ENDS = 16

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_MEMBER = re.compile(rb'\s*\{\s*"([^"\\]*)"\s*:')
_END = re.compile(r"\}\s*\]")
_json = json.JSONDecoder(strict=False)
_BOM = b"\xef\xbb\xbf"
_FIRST = re.compile(rb"(?:" + _BOM + rb")?\s*([\[{]|\Z)")


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

    def __init__(self, path: TraceFile, blocks: Iterable[bytes]) -> None:
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
        between: re.Pattern[bytes] | None = None
        for block in self._blocks:
            pending += block
            if len(pending) < CHUNK_BYTES + _HELD_BACK:
                continue
            between = between or _border(pending)
            cut = _last_border(between, pending, len(pending) - _HELD_BACK)
            if cut is not None:
                yield Chunk(pending[: cut.start() + 1], offset)
                offset += cut.end()
                pending = pending[cut.end() :]
        start = pending.lstrip()[:1]
        if start not in (b"", b"{", b"]"):
            at = offset + len(pending) - len(pending.lstrip())
            raise UnreadableInputError(
                f"{self._path}: JSON, but not a profiler trace: byte {at:,} is {start!r} where an event has '{{'"
            )
        last, closed = self._last_events(pending)
        if not closed:
            self.cut_at = offset + len(pending)
        if last.strip():
            yield Chunk(last, offset)

    def _find_events(self) -> tuple[bytes, int]:
        """Read up to the first event; return the text from there and its offset."""
        head = bytearray()
        for block in self._blocks:
            searched = max(0, len(head) - 64)
            head += block
            first = _FIRST.match(head)
            if first is None:
                break
            if first[1] == b"[":
                self._bare_array = True
                return bytes(head[first.end() :]), first.end()
            if found := _EVENTS.search(head, searched):
                before = bytes(head[first.start(1) : found.start()]).rstrip().rstrip(b",")
                self.metadata = lenient_object(before + b"}") or {}
                return bytes(head[found.end() :]), found.end()
            if len(head) > _HEAD_BYTES:
                raise UnreadableInputError(
                    f'{self._path}: JSON, but not a profiler trace: no "traceEvents" in its first {len(head):,} bytes'
                )
        raise UnreadableInputError(f"{self._path}: {_why_not_a_trace(bytes(head))}")

    def _last_events(self, pending: bytes) -> tuple[bytes, bool]:
        """The events of the last text, without what follows them, and whether the bracket that closes them is there."""
        text = pending.decode("utf-8", "surrogateescape")
        if (start := text.lstrip()).startswith("]"):
            return b"", self._trails(start[1:], lenient=True)  # there are no events
        for number, end in enumerate(_END.finditer(text)):
            if self._trails(text[end.end() :], lenient=number < _LENIENT_ENDS):
                return text[: end.start() + 1].encode("utf-8", "surrogateescape"), True
        return _whole_events(pending), False

    def _trails(self, rest: str, *, lenient: bool) -> bool:
        """Whether this follows the events: nothing, or the other members of the object, which are kept, and its end."""
        rest = rest.strip()
        if self._bare_array:
            return not rest
        if rest == "}":
            return True
        if not (rest.startswith(",") and rest.endswith("}")):
            return False
        members = "{" + rest[1:]
        try:
            _, end = _json.raw_decode(members)
        except (ValueError, RecursionError):
            end = len(members) if lenient else 0
        if end < len(members):
            return False
        trailer = lenient_object(members.encode("utf-8", "surrogateescape"), alone=True)
        self.metadata.update(trailer or {})
        return trailer is not None


def _whole_events(pending: bytes) -> bytes:
    """The text of a trace that is cut off, without the event that the cut has left incomplete."""
    last = _last_border(_border(pending), pending, len(pending))
    start = last.end() if last else 0
    text = pending[start:].decode("utf-8", "surrogateescape")
    blank = len(text) - len(text.lstrip())
    try:
        _, end = _json.raw_decode(text, blank)
    except (ValueError, RecursionError):
        if lenient_object(pending[start:]) is not None:
            return pending
        return pending[: last.start() + 1] if last else b""
    return pending[:start] + text[:end].encode("utf-8", "surrogateescape")


def _border(text: bytes) -> re.Pattern[bytes]:
    """What stands between two events, given a text that begins with one, which may begin unlike any we know."""
    first = _FIRST_MEMBER.match(text)
    return border(*first.groups()) if first else border()


def _last_border(between: re.Pattern[bytes], text: bytes, before: int) -> re.Match[bytes] | None:
    """The last border between two events that ends before a position, looking at growing windows from there."""
    start, window = before, 64 * 1024
    while start > 0:
        start = max(0, before - window)
        if borders := deque(between.finditer(text, start, before), maxlen=1):
            return borders[0]
        window *= 8
    return None


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
