"""Which findings make a command fail: what `--fail-on` and `--ignore` ask for, in CI over recorded traces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mla_diag.diagnose.diagnosis import Finding
from mla_diag.errors import UsageError

_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|%)?")


@dataclass(frozen=True)
class FailOn:
    """A kind of finding that is not accepted, from some cost on.

    Attributes:
        kind: The kind, or `any`.
        milliseconds: A step; findings that cost less are accepted.
        share: Of the step, 0 to 1; findings of a smaller share are accepted.
    """

    kind: str
    milliseconds: float = 0.0
    share: float = 0.0

    def holds(self, finding: Finding) -> bool:
        """Whether a finding is what is not accepted. One whose cost is unknown is, unless a limit is given."""
        if self.kind not in ("any", finding.kind):
            return False
        return (finding.cost_ms_per_step or 0.0) >= self.milliseconds and (finding.share or 0.0) >= self.share


def parse_fail_on(text: str, kinds: Iterable[str]) -> FailOn:
    """Read `KIND`, `KIND:2ms` or `KIND:5%`.

    Raises:
        UsageError: There is no such kind, or the limit is none.
    """
    kind, _, limit = text.partition(":")
    _check_kind(kind, [*kinds, "any"], "--fail-on")
    if not limit:
        return FailOn(kind)
    match = _LIMIT.fullmatch(limit.strip())
    if match is None or match[2] is None:
        raise UsageError(f"--fail-on {text}: {limit!r} is no limit; write {kind}:2ms or {kind}:5%")
    value = float(match[1])
    return FailOn(kind, milliseconds=value) if match[2] == "ms" else FailOn(kind, share=value / 100)


def check_ignored(ignored: Iterable[str], kinds: Iterable[str]) -> frozenset[str]:
    """The kinds to leave out.

    Raises:
        UsageError: There is no such kind.
    """
    known = list(kinds)
    for kind in ignored:
        _check_kind(kind, known, "--ignore")
    return frozenset(ignored)


def _check_kind(kind: str, kinds: list[str], option: str) -> None:
    if kind not in kinds:
        raise UsageError(f"{option} {kind}: no such kind of finding; there are {', '.join(kinds)}")
