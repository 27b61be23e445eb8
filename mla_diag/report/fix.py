"""A fix for a person at a terminal: what it would change and why, what it did, and the proof of it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from mla_diag.fix.locate import Gpu, Installation
from mla_diag.fix.patch import Patch
from mla_diag.fix.sites import BackendFile, Kind
from mla_diag.fix.strategy import Outlook, Strategy
from mla_diag.fix.verify import Proof, Verdict

_READ_BY = {
    Kind.CSR: ", for attention by CSR indices",
    Kind.PAGE_TABLE: ", for attention by page table",
    Kind.OTHER: "",
}
_MARKS = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("-   ", "dim")}


def print_installation(installation: Installation, gpu: Gpu | None, console: Console) -> None:
    """Print what a fix would be of: SGLang, FlashInfer and GPU."""
    flashinfer = installation.flashinfer
    facts = (
        ("SGLang", f"{installation.version or 'version unknown'}  {installation.root}"),
        ("FlashInfer", "none beside it" if flashinfer is None else f"{flashinfer.version or 'version unknown'}"),
        ("GPU", "none here" if gpu is None else f"{gpu.name}, SM{gpu.capability[0]}{gpu.capability[1]}"),
    )
    for name, fact in facts:
        _print(console, Text.assemble((f"{name:<12}", "dim"), fact))


def print_sites(files: Iterable[BackendFile], installation: Installation, console: Console) -> None:
    """Print every cast of the whole pool, with whether it can be fixed."""
    for file in files:
        _print(console, Text(file.path.relative_to(installation.root).as_posix(), "bold"))
        for site in file.sites:
            verdict = ("fixable", "green") if file.problem is None else ("left alone", "yellow")
            _print(
                console,
                Text.assemble(f"  {site.line:>5}  ", verdict, f"  {site.function}  ", (site.code, "dim")),
                Text(f"         copies all of {site.pool}{_READ_BY[site.kind]}", "dim"),
            )
        if file.problem is not None:
            _print(console, Text(f"         because of line {file.problem}", "yellow"))


def print_outlooks(chosen: Strategy, ways: Iterable[Outlook], console: Console) -> None:
    """Print what may read the pool in place of the cast, and what was chosen."""
    _print(console, Text.assemble(("strategy    ", "dim"), (chosen.value, "bold")))
    for way in ways:
        word, style = {True: ("can", "green"), False: ("cannot", "red"), None: ("may", "yellow")}[way.works]
        _print(console, Text.assemble(f"  {way.strategy.value:<8}  ", (f"{word:<6}", style), f"  {way.why}"))


def print_diff(patch: Patch, console: Console) -> None:
    """Print the patch as a unified diff, in colour at a terminal."""
    text = "".join(patch.diff())
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default"))
    else:
        console.file.write(text)


def print_proof(proof: Proof, console: Console) -> None:
    """Print the dtype map, a verdict a line, and what no fix covers."""
    path = None
    for verdict in proof.verdicts:
        if verdict.path != path:
            path = verdict.path
            _print(console, Text(path.as_posix(), "bold"))
        _print(console, *_verdict_lines(verdict))
    for note in proof.uncovered:
        _print(console, Text(f"not covered: {note}", "yellow"))


def _verdict_lines(verdict: Verdict) -> tuple[Text, ...]:
    place = f"{verdict.line:>5}  " if verdict.line else "       "
    head = Text.assemble(f"  {place}", _MARKS[verdict.holds], f"  {verdict.verdict}", ("  " + verdict.function, "dim"))
    head.rstrip()
    return (head, Text(f"               {verdict.code}", "dim")) if verdict.code else (head,)


def _print(console: Console, *lines: Text) -> None:
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)
