"""Measure what can stand in the cast's place on this machine, with the server's own libraries, and rank it.

Each strategy runs in a process of the Python that serves (`strategy_process`): what crashes or hangs there is a result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import geometric_mean
from typing import IO, Any

import msgspec

from mla_diag.bench.rows import Ceilings, Row, Shape
from mla_diag.bench.start import kill_session, start_session

__all__ = ["SHAPES", "Card", "Measured", "NotMeasuredError", "Verdict", "measure", "order"]

#: Few and many heads, one long request and many requests: where alternatives change places.
SHAPES = (
    *(Shape(16, batch, context) for batch, context in ((1, 2048), (1, 32768), (16, 8192), (64, 8192))),
    *(Shape(128, batch, context) for batch, context in ((1, 32768), (16, 8192))),
)
#: A strategy's relative error may be as large as this, above what rounding the output to BF16 costs (1.65e-3) and below
#: what an error in the computation does; or as large as the shipped cast's at that shape, times `WORSE`.
TOLERANCE = 2e-3
WORSE = 1.1
#: For one strategy; FlashInfer may have to compile its kernels first.
TIMEOUT_S = 300.0

_PACKAGE = Path(__file__).parents[1]


class NotMeasuredError(Exception):
    """Nothing can be measured with that Python; the message is why."""


class Verdict(Enum):
    """What measuring a strategy says of it."""

    RIGHT = "right"
    FAILED = "failed"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class Card:
    """What is measured on.

    Attributes:
        device: its name.
        ceilings: what it does at best.
        note: what keeps a strategy from doing better here, if anything.
    """

    device: str
    ceilings: Ceilings
    note: str


@dataclass(frozen=True)
class Measured:
    """One strategy on this machine.

    Attributes:
        strategy: kernel, native, gather or cast.
        verdict: FAILED where its error is too large or it raises, crashes or hangs; UNMEASURED where what it needs is
            not installed.
        why: what is wrong or missing.
        rows: one a shape, as far as it came.
    """

    strategy: str
    verdict: Verdict
    why: str
    rows: tuple[Row, ...]

    @property
    def us(self) -> float:
        """Geometric mean of the times in microseconds, of a strategy that is right."""
        return geometric_mean([row.us for row in self.rows if row.us is not None])


def measure(
    strategies: Sequence[str],
    python: Path,
    search: Sequence[Path] = (),
    *,
    shapes: Sequence[Shape] = SHAPES,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Card, list[Measured]]:
    """Measure strategies one after the other.

    Args:
        strategies: keys of `mla_diag.bench.kernel.STRATEGIES`.
        python: the Python that serves.
        search: directories that are on its PYTHONPATH when it does.
        shapes: the decode steps.
        timeout_s: after which a strategy counts as hanging.

    Returns:
        The card, and what was found of each strategy.

    Raises:
        NotMeasuredError: torch, Triton, the GPU or room on it is missing, or nothing ran.
    """
    card: Card | None = None
    answers: dict[str, _Answer] = {}
    for strategy in strategies:
        request = {
            "strategy": strategy,
            "shapes": [asdict(shape) for shape in shapes],
            "ceilings": None if card is None else asdict(card.ceilings),
        }
        answer = _ask(request, python, search, timeout_s)
        card = card or answer.card
        if any("OutOfMemoryError" in text for text in (answer.failure, *(row.reason for row in answer.rows))):
            raise NotMeasuredError("the GPU has too little free memory; stop what runs on it, then --apply again")
        if card is None:
            raise NotMeasuredError(answer.failure)
        answers[strategy] = answer
    shipped = {row.shape: row.error for row in answers["cast"].rows if row.error} if "cast" in answers else {}
    measured = [_judged(strategy, answer, shipped) for strategy, answer in answers.items()]
    if card is None or all(row.us is None for each in measured for row in each.rows):
        raise NotMeasuredError(
            "; ".join(f"{each.strategy}: {each.why}" for each in measured) or "no strategy to measure"
        )
    return card, measured


def order(measured: Sequence[Measured]) -> tuple[str, ...]:
    """The strategies that `auto` should try, fastest first.

    What could not be measured comes after what was, in the order given. What is no faster than the cast is left out;
    the cast itself stands there only where nothing is better.
    """
    right = sorted((each for each in measured if each.verdict is Verdict.RIGHT), key=lambda each: each.us)
    names = [each.strategy for each in right]
    if names[:1] == ["cast"]:
        return ("cast",)
    if "cast" in names:
        names = names[: names.index("cast")]
    names += [each.strategy for each in measured if each.verdict is Verdict.UNMEASURED and each.strategy != "cast"]
    return tuple(names) or ("cast",)


@dataclass(frozen=True)
class _Answer:
    """What a process said, and what ended it if it did not end well."""

    card: Card | None
    rows: tuple[Row, ...]
    failure: str


def _judged(strategy: str, answer: _Answer, shipped: Mapping[Shape, float]) -> Measured:
    missing = [row.reason for row in answer.rows if row.reason.startswith(("ImportError", "ModuleNotFoundError"))]
    if missing:
        return Measured(strategy, Verdict.UNMEASURED, missing[0], answer.rows)
    wrong = [f"at {_named(row.shape)} {trouble}" for row in answer.rows if (trouble := _trouble(row, shipped))]
    why = wrong[0] if wrong else answer.failure
    return Measured(strategy, Verdict.FAILED if why else Verdict.RIGHT, why, answer.rows)


def _trouble(row: Row, shipped: Mapping[Shape, float]) -> str:
    if row.error is None:
        return row.reason
    # What is as good as what SGLang ships takes nothing from its users: FlashInfer's own error can be 2.4e-3. A cast
    # that is far off itself vouches for nothing.
    most = max(TOLERANCE, WORSE * min(shipped.get(row.shape, 0.0), 2 * TOLERANCE))
    return f"its relative error is {row.error:.1e}, not under {most:.1e}" if row.error >= most else ""


def _named(shape: Shape) -> str:
    return f"{shape.batch} x {shape.context}, {shape.heads} heads,"


def _ask(request: dict[str, Any], python: Path, search: Sequence[Path], timeout_s: float) -> _Answer:
    with tempfile.TemporaryDirectory(prefix="mla-diag-") as folder, tempfile.TemporaryFile() as said:
        # A directory of mla-diag alone: the one it is installed in may hold a torch of its own, which would go first.
        (Path(folder) / "mla_diag").symlink_to(_PACKAGE)
        paths = [folder, *map(str, search), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [str(python), "-m", "mla_diag.bench.strategy_process", json.dumps(request)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            process = start_session(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
            )
        except OSError as error:
            return _Answer(None, (), f"{python}: {error.strerror}")
        try:
            output, _ = process.communicate(timeout=timeout_s)
            failure = _end(process.returncode, said)
        except subprocess.TimeoutExpired:
            kill_session(process)
            output, _ = process.communicate()
            failure = f"no answer in {timeout_s:.0f} s"
        except BaseException:
            kill_session(process)
            raise
    lines = output.split(b"\n")[:-1]
    card = msgspec.json.decode(lines[0], type=Card) if lines else None
    return _Answer(card, tuple(msgspec.json.decode(line, type=Row) for line in lines[1:]), failure)


def _end(status: int, said: IO[bytes]) -> str:
    """Why a process ended badly: the signal, or the last line that it printed."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return (lines[-1][:200] if lines else f"it exited with status {status}") if status else ""
