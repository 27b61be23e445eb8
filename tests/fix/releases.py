"""Runs the fix over the real wheels of SGLang and writes docs/compatibility.md.

    python tests/fix/releases.py [--wheels DIR] [--from 0.4.6.post5] [--to 0.5.23] [--output docs/compatibility.md]
                                 [--known-sites mla_diag/diagnose/known_sites.json]

A wheel is downloaded without its dependencies and only its attention backends are unpacked. Each is fixed, compiled,
verified and reverted; a release that cannot be is listed with the reason, and the script then exits with 1. The lines
of the casts found on the way are what `explain` names where a trace has no stacks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from mla_diag.errors import MlaDiagError
from mla_diag.fix.locate import Installation, find_installation
from mla_diag.fix.patch import Patch, apply, revert
from mla_diag.fix.sites import Kind
from mla_diag.fix.strategy import Strategy
from mla_diag.fix.verify import verify

_UNPACKED = re.compile(
    r"sglang/(_?version\.py|srt/(layers/attention|hardware_backend)/.*\.py|srt/model_executor/model_runner\.py)"
    r"|sglang-[^/]*\.dist-info/METADATA"
)
_COLUMNS = ("release", "FlashInfer", "flashinfer: sites", "plans", "fa3: sites")
_COLUMNS += ("applied", "compiled", "verified", "reverted", "left alone")
_HEADER = """\
# SGLang releases that `mla-diag fix` knows

Made by `make releases` from the wheels on PyPI: each release is fixed, compiled, verified (`--verify`: no cast of the
whole pool remains, each plan is given the pool's dtype) and reverted to identical bytes. The two columns of sites count
the casts replaced in `flashinfer_mla_backend.py` (from 0.5.15 on the extend branch has a second one, of the buffer that
decode context parallelism gathers into) and in `flashattention_backend.py`. A release not listed is handled by what its
code does: if it is understood it is fixed, and otherwise `mla-diag fix` exits with 5 and touches nothing.

FlashInfer is the version that the release pins. Its FP8 MLA, strategy `native`, is there from 0.6.14 on.

"""


class UnreachableError(Exception):
    """The package index does not answer."""


@dataclass(frozen=True)
class Outcome:
    """What came of one release; `problem` is None where all went well."""

    release: str
    flashinfer: str
    patch: Patch | None
    left_alone: tuple[str, ...]
    problem: str | None

    def row(self) -> str:
        """The release's row of the table."""
        sites = (
            [(file, site) for file in self.patch.files if file.problem is None for site in file.sites]
            if self.patch
            else []
        )
        counts = {kind: sum(site.kind is kind for _, site in sites) for kind in Kind}
        plans = sum(len(file.plans) for file in {id(f): f for f, _ in sites}.values())
        done = (
            ["yes" if sites else "nothing to do"] * 4 if self.problem is None else [f"no: {self.problem}", "", "", ""]
        )
        cells = (self.release, self.flashinfer, counts[Kind.CSR], plans, counts[Kind.PAGE_TABLE], *done)
        return f"| {' | '.join(map(str, cells))} | {', '.join(self.left_alone)} |"

    def known_sites(self) -> dict[str, dict[str, int]]:
        """For each backend the line of the cast in each of its methods."""
        sites: dict[str, dict[str, int]] = {}
        for file in self.patch.files if self.patch else ():
            for site in file.sites if file.problem is None else ():
                if site.pool == "get_key_buffer":
                    sites.setdefault(file.path.name, {})[site.function.rpartition(".")[2]] = site.line
        return sites


def releases(first: str, last: str) -> list[str]:
    """Released versions of SGLang, oldest first.

    Raises:
        UnreachableError: the index does not list them.
    """
    answer = _pip("index", "versions", "sglang")
    listed = re.search(r"Available versions: (.+)", answer)
    if listed is None:
        raise UnreachableError("pip index versions sglang: no list of versions")
    versions = sorted(map(Version, listed[1].split(", ")))
    return [str(version) for version in versions if Version(first) <= version <= Version(last)]


def check(release: str, wheels: Path) -> Outcome:
    """Fix, verify and revert one release.

    Raises:
        UnreachableError: its wheel cannot be had.
    """
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory)
        with zipfile.ZipFile(_wheel(release, wheels)) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if _UNPACKED.fullmatch(name)])
        metadata = next(site.glob("sglang-*.dist-info/METADATA")).read_text(encoding="utf-8")
        pin = re.search(r"^Requires-Dist: flashinfer[_-]python.*?==\s*([\w.]+)", metadata, re.MULTILINE)
        installation = find_installation(site)
        before = _digests(installation)
        patch, left_alone, problem = None, (), None
        try:
            patch = apply(installation, Strategy.AUTO)
            # Compiled in apply; verified here from the files as they lie.
            proof = verify(installation)
            paths = {line.partition(":")[0] for line in proof.uncovered}
            left_alone = tuple(sorted(re.sub(r"^srt/(layers/attention/)?", "", path) for path in paths))
            if patch is not None and patch.changes:
                if not proof.holds:
                    problem = "not verified"
                revert(installation)
        except MlaDiagError as error:
            problem = str(error).replace(f"{site}/", "")
        if _digests(installation) != before:
            problem = f"{problem or 'reverted'}, but the files differ from what they were"
        return Outcome(release, pin[1] if pin else "", patch, left_alone, problem)


def _wheel(release: str, wheels: Path) -> Path:
    pattern = f"sglang-{release}-*.whl"
    if not list(wheels.glob(pattern)):
        _pip("download", f"sglang=={release}", "--no-deps", "--only-binary=:all:", "--dest", str(wheels))
    return next(wheels.glob(pattern))


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnreachableError(f"pip {' '.join(arguments[:2])}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout


def _digests(installation: Installation) -> dict[str, str]:
    return {
        str(path.relative_to(installation.root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(installation.root.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Check the releases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="keep downloaded wheels here")
    parser.add_argument("--from", dest="first", default="0.4.6.post5")
    parser.add_argument("--to", dest="last", default="0.5.23")
    parser.add_argument("--output", type=Path, help="write the table here; else print it")
    parser.add_argument("--known-sites", type=Path, help="write the casts' lines here")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        wheels = options.wheels or Path(temporary)
        for release in releases(options.first, options.last):
            outcomes.append(check(release, wheels))
            print(outcomes[-1].row(), file=sys.stderr, flush=True)
    if options.known_sites is not None:
        known = {outcome.release: outcome.known_sites() for outcome in outcomes}
        rows = ",\n".join(f"{json.dumps(release)}: {json.dumps(sites)}" for release, sites in known.items())
        options.known_sites.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *(outcome.row() for outcome in outcomes)]
    table = "\n".join(lines) + "\n"
    if options.output is None:
        print(table, end="")
    else:
        options.output.write_text(_HEADER + table, encoding="utf-8")
    return int(any(outcome.problem is not None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
