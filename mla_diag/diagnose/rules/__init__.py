"""The rules: one module a kind of finding, each with its page under docs/findings/.

A rule is a function from one stage of one rank's trace to findings, or, where ranks are compared, from the reports of
all stages of all ranks. The order here is that of equally costly findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mla_diag.diagnose.case import StageCase
from mla_diag.diagnose.diagnosis import Finding, StageReport, TraceReport
from mla_diag.diagnose.rules import (
    dropped_events,
    exposed_communication,
    host_bound,
    host_sync,
    slow_copy,
    small_op_storm,
    straggler_rank,
    underfilled_kernel,
    whole_pool_copy,
)

Rule = Callable[[StageCase], Iterator[Finding]]
CrossRule = Callable[[Sequence[StageReport], Sequence[TraceReport]], Iterator[Finding]]

RULES: dict[str, Rule] = {
    whole_pool_copy.KIND: whole_pool_copy.find,
    slow_copy.KIND: slow_copy.find,
    small_op_storm.KIND: small_op_storm.find,
    underfilled_kernel.KIND: underfilled_kernel.find,
    host_bound.KIND: host_bound.find,
    host_sync.KIND: host_sync.find,
    exposed_communication.KIND: exposed_communication.find,
    dropped_events.KIND: dropped_events.find,
}
CROSS_RULES: dict[str, CrossRule] = {
    straggler_rank.KIND: straggler_rank.find,
}
KINDS = (*RULES, *CROSS_RULES)
