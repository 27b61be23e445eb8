"""The proof of a fix, read off the files: no cast of the whole pool remains, and dtypes agree where they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from mla_diag.fix.flow import called_name, walk
from mla_diag.fix.journal import Journal
from mla_diag.fix.locate import Installation
from mla_diag.fix.patch import read_backends
from mla_diag.fix.sites import BackendFile, is_routed


@dataclass(frozen=True)
class Verdict:
    """One line of the dtype map.

    Attributes:
        path: the file, below the installation's root.
        line: from 1; 0 for what concerns a whole file.
        function: the class and method.
        code: what stands there, shortened.
        verdict: what it means.
        holds: whether that is as it should be; None where it does not concern the pool.
    """

    path: Path
    line: int
    function: str
    code: str
    verdict: str
    holds: bool | None


@dataclass(frozen=True)
class Proof:
    """What `verify` found.

    Attributes:
        verdicts: the dtype map, in the order of files and lines.
        uncovered: casts of the whole pool in backends that a fix leaves alone, with the reason.
    """

    verdicts: tuple[Verdict, ...]
    uncovered: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the fix."""
        return bool(self.verdicts) and all(verdict.holds is not False for verdict in self.verdicts)


def verify(installation: Installation) -> Proof:
    """Check an installation's backends, whoever fixed them.

    Raises:
        UnknownCodeError: one is not readable as Python.
        JournalError: the journal is damaged.
    """
    verdicts: list[Verdict] = []
    uncovered = []
    for file in read_backends(installation):
        path = file.path.relative_to(installation.root)
        if file.sites and not file.needed and not file.patched:
            reason = (file.problem or "").partition(": ")[2]
            uncovered += [f"{path}:{site.line} {site.function}: {reason}" for site in file.sites]
        elif file.sites or file.patched:
            verdicts += sorted(_verdicts(file, path), key=lambda verdict: verdict.line)
    verdicts += _journal_verdicts(installation)
    return Proof(tuple(verdicts), tuple(uncovered))


def _journal_verdicts(installation: Installation) -> Iterator[Verdict]:
    journal = Journal(installation.root)
    record = journal.record()
    if record is None:
        return
    changed = set(journal.changed_since(record))
    for entry in record.files:
        same = installation.root / entry.path not in changed and record.state == "applied"
        verdict = (
            "as the fix left it (SHA-256)" if same else f"not as the fix left it, or it was cut off ({record.state})"
        )
        yield Verdict(Path(entry.path), 0, "", "", verdict, same)


def _verdicts(file: BackendFile, path: Path) -> Iterator[Verdict]:
    def at(node: cst.CSTNode, verdict: str, holds: bool | None) -> Verdict:
        code = " ".join(file.source.code(node).split())
        code = code if len(code) <= 80 else f"{code[:79]}…"
        return Verdict(path, file.source.line(node), file.source.qualified_name(node), code, verdict, holds)

    for site in file.sites:
        yield at(site.call, "casts the whole pool", False)
    for call in file.pool_calls:
        if is_routed(call):
            yield at(call, "reads the pool through the dispatch", True)
        elif called_name(call) in ("run", "flash_attn_with_kvcache"):
            yield at(call, "is given the pool directly", False)
    for plan in file.plans:
        kept = file.source.code(plan.kv_dtype.value) == "self.kv_data_type"
        routed = is_routed(plan.call)
        if kept and routed:
            yield at(plan.call, "planned through the dispatch with the pool's dtype", True)
        else:
            what = "the model's dtype for the pool" if not kept else "the pool's dtype past the dispatch"
            yield at(plan.call, f"planned with {what}", False)
    for node in walk(file.source.module):
        if isinstance(node, cst.Call) and called_name(node) == "begin_forward":
            yield at(node, "ragged prefill: takes new tokens, not the pool", None)
        elif isinstance(node, cst.Assign) and _is_data_type(node.targets[0].target):
            value = file.source.code(node.value)
            if value == "model_runner.kv_cache_dtype":
                yield at(node, "the pool's dtype", True)
            elif value == "model_runner.dtype":
                yield at(node, "the model's dtype, for queries", None)


def _is_data_type(target: cst.BaseExpression) -> bool:
    return isinstance(target, cst.Attribute) and target.attr.value.endswith("data_type")
