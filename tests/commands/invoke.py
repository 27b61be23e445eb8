"""The command line as a user runs it: within this process, or in one of its own, which takes a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mla_diag.cli import main


class Invoke:
    """Runs `mla-diag` with some arguments; what it prints and its status are as a process would have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        given = list(map(str, arguments))
        self._monkeypatch.setattr(sys, "argv", ["mla-diag", *given])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        shown = self._capsys.readouterr()
        code = left.value.code
        return subprocess.CompletedProcess(given, code if isinstance(code, int) else 0, shown.out, shown.err)


def run_process(*arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `mla-diag` in a process of its own, for `timeout` seconds at most."""
    command = [sys.executable, "-m", "mla_diag", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
