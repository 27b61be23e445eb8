"""What a command that waits says meanwhile."""

from __future__ import annotations

import sys
import time

from rich.text import Text

from mla_diag.commands.common import plain_console

_SAY_EVERY = 30.0  # seconds, where there is no terminal to keep one line up to date


class Progress:
    """One line on standard error: kept up to date on a terminal, now and then repeated elsewhere."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()

    def say(self, what: str) -> None:
        """Show what is being waited for."""
        if self._status is not None:
            self._status.update(Text(what))  # a string would be read as markup
        elif time.monotonic() - self._said >= _SAY_EVERY:
            self._said = time.monotonic()
            print(f"mla-diag: {what}", file=sys.stderr, flush=True)

    def note(self, what: str) -> None:
        """Say something that stays."""
        self._console.print(f"mla-diag: {what}", soft_wrap=True)
