"""`mla-diag demo`: the whole story on a laptop, from recordings that come with the package."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mla_diag.commands import compare, explain
from mla_diag.commands.common import plain_console

_PACKAGE = Path(__file__).parents[1]
# Inside an installed package, or `traces/` of a checkout.
_DIRECTORIES = (_PACKAGE / "recordings", _PACKAGE.parent / "traces")

_IN_THE_END = """\
The prefill step's wall time is the host's: without CUDA graphs it launches each kernel by itself, and the device waits
for it, before and after. What the fix changes is what the device does.
On your own server: mla-diag doctor --url http://localhost:30000"""


def recording(name: str) -> Path:
    """A bundled recording."""
    file = f"{name}.trace.json.gz"
    return next(path for directory in _DIRECTORIES if (path := directory / file).exists())


def run() -> None:
    """Explain a server that copies its pool, then show what it gains where attention reads the pool as it is."""
    console = plain_console()
    _say(console, "An MLA model on one H200: SGLang 0.5.17 as shipped, FP8 KV pool, one request of 2,000 tokens.\n")
    explain.run([recording("base-eager-decode-stack")], top=4)
    _say(console, "\nThe same server with CUDA graphs and a cached prefix, before and after `mla-diag fix --apply`:\n")
    compare.run(recording("shipped-both-stages"), recording("kernel-both-stages"), top=3)
    _say(console, f"\n{_IN_THE_END}")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=not console.is_terminal)
