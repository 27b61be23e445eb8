"""No name in a trace colours a terminal, breaks a line or turns its direction; JSON has it as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_diag.diagnose.step_spans import Stage
from mla_diag.report.visible import visible
from tests.commands.invoke import Invoke
from tests.trace_builder import TraceBuilder

KERNEL, OP, STEP = "red\x1b[31m\n\rkernel", "op\t\x85\u202etxet", "step[DECODE bs=1\x07]"


def built(path: Path, duration: int) -> Path:
    builder = TraceBuilder()
    for at in range(0, 10_000, 1000):
        builder.span(STEP, at, 900)
        builder.dispatch(OP, at + 10, [(KERNEL, at + 100 + 2 * number, 1) for number in range(duration)])
    return builder.write(path)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain [red] \\n ö 核 …", "plain [red] \\n ö 核 …"),
        (KERNEL, r"red\x1b[31m\n\rkernel"),
        (OP, r"op\t\x85\u202etxet"),
    ],
)
def test_a_text_is_written_out_where_it_cannot_be_seen(text: str, seen: str):
    assert visible(text) == seen
    assert visible([{text: text}]) == [{seen: seen}]


def test_what_is_no_name_stays_what_it_is():
    assert visible([Stage.DECODE, None, 1.5]) == [Stage.DECODE, None, 1.5]
    assert visible(Stage.DECODE) is Stage.DECODE


@pytest.mark.parametrize("command", ["explain", "compare", "explain --fail-on", "explain --output"])
def test_what_people_read_has_no_control_characters(run: Invoke, tmp_path: Path, command: str):
    traces = [built(tmp_path / "a\x1b[1m.json", 200), built(tmp_path / "b.json", 150)]
    report = tmp_path / "report.txt"
    arguments = {
        "explain": ["explain", *traces],
        "compare": ["compare", *traces],
        "explain --fail-on": ["explain", traces[0], "--fail-on", "any"],
        "explain --output": ["explain", traces[0], "--output", report],
    }[command]
    result = run(*arguments)
    text = result.stdout + result.stderr + (report.read_text(encoding="utf-8") if report.exists() else "")
    assert r"op\t\x85\u202etxet  red\x1b[31m\n\rkernel" in text
    assert all(character.isprintable() or character == "\n" for character in text)
    assert all(line.startswith("mla-diag: ") for line in result.stderr.splitlines())


def test_json_has_names_as_they_are(run: Invoke, tmp_path: Path):
    (stage,) = json.loads(run("explain", built(tmp_path / "a.json", 200), "--format", "json").stdout)["stages"]
    assert (stage["ops"][0]["op"], stage["ops"][0]["kernel"]) == (OP, KERNEL)
    assert list(stage["step_names"]) == [STEP]
