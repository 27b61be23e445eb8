"""The rules: one module a kind of finding, each with its page under docs/findings/.

A rule is a function from one stage of one rank's trace to findings; the order here is that of equally costly findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Finding
from mla_diag.diagnose.rules import whole_pool_copy

Rule = Callable[[StageCase], Iterator[Finding]]

RULES: dict[str, Rule] = {
    whole_pool_copy.KIND: whole_pool_copy.find,
}
KINDS = tuple(RULES)
