"""Every `mla-diag` command in the documentation is one: its name and each of its options are the command line's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mla_diag.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A command stands in a code block, or between backticks, and ends at a comment, a pipe or where the prose goes on.
IN_BLOCK = re.compile(r"^ {4,}(?:\$ )?(?:[A-Z_]+=\S+ )*mla-diag (.*?)(?:\s{2,}#.*| #.*| \| .*)?$", re.MULTILINE)
IN_PROSE = re.compile(r"`mla-diag ([^`]+)`")
# A table of options: `| `--name VALUE` | does |`, several to a cell.
OPTIONS = re.compile(r"^\| (`-.*?) \|", re.MULTILINE)
GUIDES = {"bench": ["bench server", "bench kernel"]}
COMMANDS = typer.main.get_command(app)


def documented() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in (*IN_BLOCK.finditer(text), *IN_PROSE.finditer(text)):
            yield page, " ".join(found[1].split())


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """The command that words begin with, and its options."""
    command, names = COMMANDS, []
    while hasattr(command, "commands") and len(names) < len(words) and words[len(names)] in command.commands:
        names.append(words[len(names)])
        command = command.commands[names[-1]]
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return " ".join(names), found | {"-h", "--help"}


@pytest.mark.parametrize(("page", "line"), [pytest.param(*each, id=each[1]) for each in documented()])
def test_a_documented_command_exists_with_its_options(page: Path, line: str):
    words = shlex.split(line.replace("…", "").replace("'", "") if line.count("'") % 2 else line)
    name, known = options_of(words)
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert name or used <= known, f"{page.name}: mla-diag {line}: no such command"
    assert used <= known, f"{page.name}: mla-diag {line}: {name} has no {used - known}"


@pytest.mark.parametrize("name", ["bench", "compare", "doctor", "explain", "fix", "profile"])
def test_a_guide_has_the_options_of_its_command_and_no_others(name: str):
    text = (ROOT / "docs" / "guide" / f"{name}.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(--?[a-z][a-z-]*)", " ".join(OPTIONS.findall(text))))
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    known = {option for command in GUIDES.get(name, [name]) for option in options_of(command.split())[1]}
    assert listed <= known, f"{name}.md tells of {listed - known}"
    # The long form of -o need not stand beside the short one, nor a default beside what turns it off.
    left = {option for option in known - mentioned if option.startswith("--")} - {"--help", "--output"}
    left -= {option.replace("--no-", "--") for option in mentioned}
    assert not left, f"{name}.md does not tell of {left}"
