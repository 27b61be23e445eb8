"""What can read the pool in place of the cast, on this machine, with this FlashInfer."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from mla_diag.errors import UsageError
from mla_diag.fix.locate import FlashInfer, Gpu


class Strategy(str, Enum):
    """How a patched backend reads the pool; `mla_diag.fix.dispatch` says what each does and falls back to."""

    AUTO = "auto"
    KERNEL = "kernel"
    NATIVE = "native"
    GATHER = "gather"


@dataclass(frozen=True)
class Outlook:
    """Whether a strategy can work here.

    Attributes:
        strategy: which.
        works: True or False; None where it depends on a GPU that this machine does not have.
        why: what it does, or what is missing.
    """

    strategy: Strategy
    works: bool | None
    why: str


@cache
def kernel_files() -> tuple[Path, ...]:
    """The files of mla-diag's kernels, to be copied beside the backends.

    They are mla_fp8_operator.py, what it imports beside itself, and the CUDA sources of what has some. Empty where this
    mla-diag comes without its kernels.
    """
    directory = Path(__file__).parents[1] / "kernels"
    found: list[Path] = []
    pending = [directory / "mla_fp8_operator.py"]
    while pending:
        path = pending.pop()
        if path in found or not path.exists():
            continue
        found.append(path)
        if path.suffix == ".py":
            imports = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ImportFrom))
            pending += [directory / f"{node.module}.py" for node in imports if node.level == 1]
            pending.append(path.with_suffix(".cu"))
        else:
            includes = re.findall(r'(?m)^#include "(.+)"$', path.read_text(encoding="utf-8"))
            pending += [directory / name for name in includes]
    return tuple(found)


def outlooks(gpu: Gpu | None, flashinfer: FlashInfer | None) -> list[Outlook]:
    """Each strategy's outlook, in the order that `auto` tries them."""
    return [_kernel(gpu), _native(gpu, flashinfer), _gather()]


def check(chosen: Strategy, ways: list[Outlook]) -> None:
    """Refuse a strategy that cannot work here.

    Raises:
        UsageError: it cannot, and why.
    """
    for way in ways:
        if way.strategy is chosen and way.works is False:
            raise UsageError(f"--strategy {chosen.value}: {way.why}")


def _kernel(gpu: Gpu | None) -> Outlook:
    if not kernel_files():
        return Outlook(Strategy.KERNEL, False, "this mla-diag comes without its kernels, kernels/mla_fp8_operator.py")
    if gpu is not None and gpu.capability < (8, 0):
        return Outlook(Strategy.KERNEL, False, f"it needs SM80 or newer, not {_named(gpu)}")
    why = "reads the FP8 pool as it lies, in both backends, in CUDA graphs too"
    return Outlook(Strategy.KERNEL, None if gpu is None else True, why)


def _native(gpu: Gpu | None, flashinfer: FlashInfer | None) -> Outlook:
    if flashinfer is None:
        return Outlook(Strategy.NATIVE, False, "there is no FlashInfer beside this SGLang")
    if "ckv_scale" not in flashinfer.run:
        version = flashinfer.version or "of unknown version"
        why = f"FlashInfer {version} has no FP8 MLA: its run() takes no ckv_scale (0.6.14 was the first to)"
        return Outlook(Strategy.NATIVE, False, why)
    if gpu is not None and gpu.capability[0] != 9:
        return Outlook(Strategy.NATIVE, False, f"FlashInfer's FP8 MLA needs SM90, not {_named(gpu)}")
    why = "FlashInfer's FP8 MLA, on SM90; flashinfer backend only, fa3 keeps its cast"
    return Outlook(Strategy.NATIVE, None if gpu is None else True, why)


def _gather() -> Outlook:
    why = "casts only referenced rows, outside CUDA graphs; graphs, so most decode steps, keep the cast"
    return Outlook(Strategy.GATHER, True, why)


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} (SM{gpu.capability[0]}{gpu.capability[1]})"
