"""Figures as a reader wants them."""

from __future__ import annotations


def milliseconds(value: float) -> str:
    """Four or more significant digits, so that figures of one column can be compared."""
    return f"{value:,.2f}" if value >= 10 else f"{value:.3f}"


def size(count: int) -> str:
    """Bytes in decimal units, as bandwidths are given."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:,.4g} {unit}"
    return f"{count} B"
