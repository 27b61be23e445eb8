r"""Names as a reader may see them: a trace's may hold escape sequences that colour a terminal, or break its lines.

Only what is read by people goes through here; JSON has every name as it is.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import msgspec

Shown = TypeVar("Shown")


def visible(shown: Shown) -> Shown:
    r"""The same with every character in it that cannot be seen written out, as `\x1b` or `\n`.

    Those are the characters that Unicode has for control, format (such as those that turn the direction of text),
    separators other than the space, and what is no character.

    Args:
        shown: A text, or a report: texts, lists, dictionaries and structs of such. Before its layout, whose widths are
            those of what is seen.
    """
    return _visible(shown)  # type: ignore[no-any-return]


def _visible(shown: Any) -> Any:
    if isinstance(shown, str):
        return shown if isinstance(shown, Enum) or shown.isprintable() else "".join(map(_written_out, shown))
    if isinstance(shown, msgspec.Struct):
        members = {name: getattr(shown, name) for name in shown.__struct_fields__}
        return msgspec.structs.replace(shown, **_visible(members))
    if isinstance(shown, dict):
        return {_visible(name): _visible(member) for name, member in shown.items()}
    return [_visible(member) for member in shown] if isinstance(shown, list) else shown


def _written_out(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
