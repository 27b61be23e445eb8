"""`mla-diag demo`: the whole story on a laptop, from a recording that comes with the package."""

from __future__ import annotations

from pathlib import Path

from mla_diag.commands import explain

_RECORDING = "base-eager-decode-stack.trace.json.gz"


def recording() -> Path:
    """The bundled recording: inside an installed package, or in `traces/` of a checkout."""
    package = Path(__file__).parents[1]
    return next(
        path for path in (package / "recordings" / _RECORDING, package.parent / "traces" / _RECORDING) if path.exists()
    )


def run() -> None:
    """Explain the recording."""
    explain.run([recording()], top=8)
