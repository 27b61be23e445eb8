"""Figures in sentences."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """A number of things: `1 step`, `1,200 events`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
