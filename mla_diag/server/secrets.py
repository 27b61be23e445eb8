"""What a server says of itself includes how to get in; that goes into no file and no output."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "(redacted)"

_SECRET = re.compile(r"api_key|password|secret|credential|access_token", re.IGNORECASE)


def without_secrets(value: Any, key: str | None) -> Any:
    """A copy without what would let its reader into the server."""
    if isinstance(value, dict):
        return {
            name: REDACTED if inner and _SECRET.search(str(name)) else without_secrets(inner, key)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    if isinstance(value, str) and key:
        return value.replace(key, REDACTED)
    return value
