"""Keys, tokens and passwords, a server's and those it was started with: they go into no file and no output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from mla_diag.trace.remote import without_password

REDACTED = "(redacted)"
_LEFT_OUT = "..."  # what a shell takes without quotes

# In names of fields, options and variables. The last two only end one: max_new_tokens and ssl_keyfile are no secrets.
_SECRET = (
    r"(?:password|passwd|passphrase|secret|credential|api[_-]?key|access[_-]?token"
    r"|(?<=[_-])key(?![\w-])|(?<![^\W_])token(?![\w-]))"
)
_NAME = rf"(?<![\w-])[\w-]*{_SECRET}[\w-]*"
_VALUE = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\S+"""
_IN_TEXT = re.compile(rf"""({_NAME}["']?\s*[=:]\s*|(?=--){_NAME}\s+(?!-))(?:{_VALUE})""", re.IGNORECASE)
_ADDRESS = re.compile(r"://\S+")


def without_secrets(value: Any, key: str | None) -> Any:
    """A copy without what would let its reader into the server."""
    if isinstance(value, dict):
        return {
            name: REDACTED if inner and _is_secret(str(name)) else without_secrets(inner, key)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    if isinstance(value, str):
        shown = text_without_secrets(value)
        return shown.replace(key, REDACTED) if key else shown
    return value


def command_without_secrets(words: Sequence[str]) -> str:
    """A command line, as for a shell, without the values of secret options and variables."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        if before.startswith("-") and "=" not in before and _is_secret(before) and not word.startswith("--"):
            shown.append(_LEFT_OUT)
        elif equals and re.fullmatch(r"[\w-]+", name) and _is_secret(name):  # to its end, blanks and all
            shown.append(f"{name}={_LEFT_OUT}")
        else:
            shown.append(text_without_secrets(word))  # which may be a script, or JSON
    return shlex.join(shown)


def text_without_secrets(text: str) -> str:
    """A text without what it names as secret, as `--api-key x`, `HF_TOKEN=x` or `"password": "x"`, or has in URLs."""
    named = _IN_TEXT.sub(rf"\1{_LEFT_OUT}", text)
    return _ADDRESS.sub(lambda address: without_password(address[0]), named)


def _is_secret(name: str) -> bool:
    return re.search(_SECRET, name, re.IGNORECASE) is not None
