"""Every kind of finding has a page that explains each field of its evidence, and the index names them all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mla_diag.diagnose import rules
from mla_diag.diagnose.rules import CROSS_RULES, KINDS, RULES

PAGES = Path(__file__).parents[3] / "docs" / "findings"
SECTIONS = ["## How it is found", "## Evidence", "## What to do", "## When it is wrong"]


def module_of(kind: str) -> Path:
    return Path(rules.__path__[0]) / f"{kind.replace('-', '_')}.py"


def evidence_keys(kind: str) -> set[str]:
    """The keys of the dictionary that the rule's module names `evidence`, as its source has them."""
    tree = ast.parse(module_of(kind).read_text())
    passed = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "evidence"]
    kept = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_evidence(node.targets[0])]
    given = [value for value in passed + kept if isinstance(value, ast.Dict)]
    return {key.value for value in given for key in value.keys if isinstance(key, ast.Constant)}


def _is_evidence(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "evidence"


def explained(kind: str) -> set[str]:
    """The names in the first column of the page's table of evidence."""
    section = (PAGES / f"{kind}.md").read_text().split("## Evidence")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_explains_every_field_of_the_evidence_and_no_other(kind: str):
    keys = evidence_keys(kind)
    assert keys
    assert explained(kind) == keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_its_sections_in_order(kind: str):
    text = (PAGES / f"{kind}.md").read_text()
    assert text.startswith(f"# {kind}\n")
    assert re.findall(r"^## .*", text, re.MULTILINE) == SECTIONS


def test_the_index_and_the_directory_hold_just_the_kinds():
    index = (PAGES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[([\w-]+)\]\(\1\.md\)", index, re.MULTILINE)) == sorted(KINDS)
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *KINDS}


def test_a_module_and_a_test_file_for_each_kind():
    assert not RULES.keys() & CROSS_RULES.keys()
    for kind in KINDS:
        assert module_of(kind).is_file()
        assert (Path(__file__).parent / f"test_{kind.replace('-', '_')}.py").is_file()
