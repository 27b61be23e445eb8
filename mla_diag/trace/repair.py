"""What to do with JSON that is not quite JSON: profilers have written every kind below, and a trace is not taken twice.

Seen in the field: unescaped quotes in a name (pytorch#113001, kineto#1459), control characters in a name
(pytorch#136180), a bare N/A as value (kineto#131), NaN and Infinity, lone surrogates, text that is not UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_BARE_WORD = re.compile(r"(?<=[:\[,])(\s*)(?:N/A|n/a|nan|inf|-inf|-nan|None|undefined)(?=\s*[,\]}])")
# A name holds unescaped quotes: it ends at the last quote before the next member that Kineto writes.
_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|s|id|bp)"\s*:)', re.DOTALL)
_LOOSE_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)"')
_LONE_SURROGATE = re.compile(r"(?i)\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2}")
# What events begin with. Not "id", although events have it: the devices listed in the metadata begin with that.
_MEMBERS = rb"ph|name|cat|pid|tid|ts|tts|dur|tdur|args|bp|s|cname"
_json = json.JSONDecoder(strict=False, parse_constant=lambda word: None)


def border(*members: bytes) -> re.Pattern[bytes]:
    """What stands between two events, the second of which begins with a member of the trace event format.

    Args:
        members: Other members that an event may begin with.
    """
    names = b"|".join((_MEMBERS, *map(re.escape, members)))
    return re.compile(rb'\}\s*,\s*(?=\{\s*"(?:' + names + rb')"\s*:)')


_BORDER = border()


def lenient_object(text: bytes, *, alone: bool = False) -> dict[str, Any] | None:
    """The JSON object that a text begins with, malformed in the known ways or not; None if it is beyond that.

    NaN and Infinity become null, and what is no character becomes U+FFFD, so that the object can be written again.

    Args:
        text: The object and, unless it must be alone, anything after it.
        alone: Whether nothing but white space may follow.
    """
    source = _LONE_SURROGATE.sub(r"\\ufffd", text.decode("utf-8", errors="replace").lstrip())
    for attempt in (source, _quote_names(_BARE_WORD.sub(r"\1null", source))):
        try:
            value, end = _json.raw_decode(attempt)
        except (ValueError, RecursionError):
            continue
        if alone and attempt[end:].strip():
            continue
        return value if isinstance(value, dict) else None
    return None


def split_events(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Cut a chunk that does not parse into its events, each with its offset in the chunk.

    An event begins where a brace opens with a member that events begin with, so that braces inside a malformed string
    do not begin one.
    """
    starts = [0, *(match.end() for match in _BORDER.finditer(text))]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield start, text[start:end].rstrip().removesuffix(b",").rstrip()


def _quote_names(text: str) -> str:
    return _NAME.sub(lambda match: match[1] + _LOOSE_QUOTE.sub(r'\1\\"', match[2]) + match[3], text)
