"""What `--fail-on` and `--ignore` mean."""

from __future__ import annotations

from typing import Any

import pytest

from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.step_spans import Stage
from mla_diag.diagnose.verdict import FailOn, check_ignored, parse_fail_on
from mla_diag.errors import UsageError

KINDS = ["whole-pool-copy", "host-bound"]


def finding(kind: str = "whole-pool-copy", cost: float | None = 3.0, share: float | None = 0.06) -> Finding:
    fields: dict[str, Any] = dict.fromkeys(Finding.__struct_fields__, "")
    fields |= {"kind": kind, "cost_ms_per_step": cost, "share": share, "stage": Stage.DECODE, "trace": 0, "rank": 0}
    return Finding(**fields | {"evidence": {}, "cause": None})


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("whole-pool-copy", FailOn("whole-pool-copy")),
        ("whole-pool-copy:5%", FailOn("whole-pool-copy", share=0.05)),
        ("host-bound:2.5ms", FailOn("host-bound", milliseconds=2.5)),
        ("any:1 ms", FailOn("any", milliseconds=1.0)),
    ],
)
def test_parse(text: str, meaning: FailOn):
    assert parse_fail_on(text, KINDS) == meaning


@pytest.mark.parametrize("text", ["pool", "whole-pool-copy:5", "whole-pool-copy:x%", "any:-1ms", ""])
def test_nonsense_is_refused(text: str):
    with pytest.raises(UsageError, match="--fail-on"):
        parse_fail_on(text, KINDS)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("whole-pool-copy", True),
        ("any", True),
        ("host-bound", False),
        ("whole-pool-copy:5%", True),
        ("whole-pool-copy:7%", False),
        ("whole-pool-copy:3ms", True),
        ("whole-pool-copy:3.1ms", False),
    ],
)
def test_holds(text: str, holds: bool):
    assert parse_fail_on(text, KINDS).holds(finding()) is holds


def test_a_finding_of_unknown_cost_holds_without_a_limit_only():
    unknown = finding(cost=None, share=None)
    assert parse_fail_on("any", KINDS).holds(unknown)
    assert not parse_fail_on("any:5%", KINDS).holds(unknown)
    assert not parse_fail_on("any:1ms", KINDS).holds(unknown)


def test_ignore_knows_its_kinds():
    assert check_ignored(["host-bound"], KINDS) == {"host-bound"}
    with pytest.raises(
        UsageError, match="--ignore host: no such kind of finding; there are whole-pool-copy, host-bound"
    ):
        check_ignored(["host"], KINDS)
