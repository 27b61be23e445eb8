"""What a fix found or did, as data: what `mla-diag fix --format json` writes.

docs/report-schema.md documents the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from mla_diag.bench.rows import Ceilings
from mla_diag.bench.strategies import Card as MeasuredCard
from mla_diag.bench.strategies import Measured, order
from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Tool
from mla_diag.fix.journal import Change
from mla_diag.fix.locate import FlashInfer, Gpu, Installation
from mla_diag.fix.patch import Patch, diff_of
from mla_diag.fix.sites import BackendFile
from mla_diag.fix.strategy import Outlook, Strategy
from mla_diag.fix.verify import Proof


class Outcome(str, Enum):
    """How one call of `fix` ended."""

    FIXABLE = "fixable"
    NOTHING_TO_FIX = "nothing-to-fix"
    FIXED_ALREADY = "fixed-already"
    CUT_OFF = "cut-off"
    APPLIED = "applied"
    VERIFIED = "verified"
    NOT_FIXED = "not-fixed"
    REVERTED = "reverted"


class Package(msgspec.Struct, frozen=True):
    """An installed package: its version, None if it does not say, and its directory."""

    version: str | None
    root: str


class Card(msgspec.Struct, frozen=True):
    """A GPU: its name and compute capability, such as [9, 0]."""

    name: str
    capability: list[int]


class SiteEntry(msgspec.Struct, frozen=True):
    """One cast of the whole pool.

    Attributes:
        file: Below SGLang's directory.
        line: From 1.
        function: Class and method.
        code: The cast, on one line.
        pool: What handed the pool out.
        kind: How the attention behind it addresses the pool: `CSR indices`, `page table`, `other`.
        fixable: Whether a fix changes it.
        problem: Why not, as "LINE: reason".
    """

    file: str
    line: int
    function: str
    code: str
    pool: str
    kind: str
    fixable: bool
    problem: str | None


class OutlookEntry(msgspec.Struct, frozen=True):
    """Whether a strategy can work here; None where that takes a GPU that this machine does not have."""

    strategy: Strategy
    works: bool | None
    why: str


class Measurement(msgspec.Struct, frozen=True):
    """What strategies were measured to do on this machine, with the server's own libraries.

    Attributes:
        device: The card.
        ceilings: What it does at best.
        note: What keeps a strategy from doing better here; empty if nothing does.
        strategies: Each strategy, and the cast.
        order: The strategies that `auto` will try, the fastest first.
    """

    device: str
    ceilings: Ceilings
    note: str
    strategies: list[Measured]
    order: tuple[str, ...]

    @classmethod
    def of(cls, card: MeasuredCard, found: list[Measured]) -> Measurement:
        """Rank what was found."""
        return cls(card.device, card.ceilings, card.note, found, order(found))


class ChangeEntry(msgspec.Struct, frozen=True):
    """One file that a fix changes or has changed.

    Attributes:
        file: Below SGLang's directory.
        change: `rewritten` or `added`; after `--revert`, `restored` or `removed`.
        diff: The unified diff of a rewritten file.
    """

    file: str
    change: str
    diff: str | None


class VerdictEntry(msgspec.Struct, frozen=True):
    """One line of the dtype map; `line` is None for what concerns a whole file."""

    file: str
    line: int | None
    function: str
    code: str
    verdict: str
    holds: bool | None


class FixAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `fix`; what a call does not look at is None.

    Attributes:
        outcome: How it ended.
        sglang: The installation.
        flashinfer: The FlashInfer beside it.
        gpu: This machine's first GPU.
        strategy: What was asked for, or what the fix that is there already was made with.
        measured: What `--apply` measured on this machine before it touched a file.
        outlooks: Each strategy's chances here, in the order that `auto` tries them where nothing was measured.
        sites: Every cast of the whole pool.
        changes: The files that change or have changed.
        verdicts: The dtype map of `--verify`.
        uncovered: Casts that no fix covers, with the reason.
    """

    outcome: Outcome
    sglang: Package
    flashinfer: Package | None = None
    gpu: Card | None = None
    strategy: str | None = None
    measured: Measurement | None = None
    outlooks: list[OutlookEntry] | None = None
    sites: list[SiteEntry] | None = None
    changes: list[ChangeEntry] | None = None
    verdicts: list[VerdictEntry] | None = None
    uncovered: list[str] | None = None
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()


def account_of_patch(
    outcome: Outcome,
    installation: Installation,
    gpu: Gpu | None,
    strategy: str,
    ways: Iterable[Outlook],
    patch: Patch | None = None,
    measured: Measurement | None = None,
) -> FixAccount:
    """The account of a dry run or an application; without a patch or a measurement where there was none."""
    return FixAccount(
        outcome=outcome,
        sglang=_package(installation),
        flashinfer=None if installation.flashinfer is None else _package(installation.flashinfer),
        gpu=None if gpu is None else Card(gpu.name, list(gpu.capability)),
        strategy=strategy,
        measured=measured,
        outlooks=[OutlookEntry(way.strategy, way.works, way.why) for way in ways],
        sites=None if patch is None else _sites(patch.files, installation),
        changes=None if patch is None else [_change(change) for change in patch.changes],
    )


def account_of_proof(installation: Installation, proof: Proof) -> FixAccount:
    """The account of `--verify`."""
    outcome = Outcome.VERIFIED if proof.holds else Outcome.NOT_FIXED if proof.verdicts else Outcome.NOTHING_TO_FIX
    return FixAccount(
        outcome=outcome,
        sglang=_package(installation),
        verdicts=[
            VerdictEntry(each.path.as_posix(), each.line or None, each.function, each.code, each.verdict, each.holds)
            for each in proof.verdicts
        ],
        uncovered=list(proof.uncovered),
    )


def account_of_revert(installation: Installation, files: Sequence[Path]) -> FixAccount:
    """The account of `--revert`; no files where all that it did was to undo a fix that had been cut off."""
    changes = [
        ChangeEntry(path.relative_to(installation.root).as_posix(), "restored" if path.exists() else "removed", None)
        for path in files
    ]
    return FixAccount(outcome=Outcome.REVERTED, sglang=_package(installation), changes=changes)


def _package(package: Installation | FlashInfer) -> Package:
    return Package(package.version, str(package.root))


def _sites(files: Iterable[BackendFile], installation: Installation) -> list[SiteEntry]:
    return [
        SiteEntry(
            file=file.path.relative_to(installation.root).as_posix(),
            line=site.line,
            function=site.function,
            code=site.code,
            pool=site.pool,
            kind=site.kind.value,
            fixable=file.problem is None,
            problem=file.problem,
        )
        for file in files
        for site in file.sites
    ]


def _change(change: Change) -> ChangeEntry:
    added = change.before is None
    return ChangeEntry(
        change.path.as_posix(), "added" if added else "rewritten", None if added else "".join(diff_of(change))
    )
