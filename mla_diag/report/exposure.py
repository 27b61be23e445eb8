"""What is said of a server without profiling it, for a person: the verdict, the cost, the floor of a decode step."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from rich.console import Console

from mla_diag.diagnose.gap import Floor, Gap
from mla_diag.report.visible import visible
from mla_diag.server.copy_cost import CopyCost
from mla_diag.server.exposure import Exposure

_WIDTH = 120
_NARROWEST = 30
_INDENT = 12


def print_exposure(exposure: Exposure, console: Console) -> None:
    """Print all of it."""
    for line in _lines(visible(exposure)):
        console.print(line, soft_wrap=True)


def _lines(exposure: Exposure) -> Iterator[str]:
    yield _headline(exposure)
    for stage in exposure.stages:
        verdict = {True: "copies", False: "does not copy", None: "not known"}[stage.copies]
        yield from _item(stage.stage.value, f"{stage.backend or 'backend not given'}: {verdict}: {stage.why}")
        if stage.copies and stage.site:
            yield from _item("", stage.site)
    known = [f"{name} {fact.value} ({fact.source})" for name, fact in exposure.facts.items() if fact.value is not None]
    yield from _item("known", "; ".join(known))
    if exposure.copy is not None:
        yield from _cost_lines(exposure.copy)
    if exposure.floor is not None:
        yield from floor_lines(exposure.floor)
    if exposure.gap is not None:
        yield from gap_lines(exposure.gap)
    for number, remedy in enumerate(exposure.remedies):
        yield from _item("" if number else "what to do", remedy)
    for number, unknown in enumerate(exposure.unknown):
        yield from _item("" if number else "not known", unknown)


def _headline(exposure: Exposure) -> str:
    if exposure.exposed is None:
        return "UNKNOWN: too little is known to say whether this server copies its KV pool"
    if not exposure.exposed:
        return "NOT EXPOSED: this server does not copy its KV pool"
    cost = exposure.copy
    much = ""
    if cost is not None:
        much = (
            f", {cost.ms_per_layer:.2f} ms a layer"
            if cost.ms_per_step is None
            else f", {cost.ms_per_step:.1f} ms a step"
        )
    return f"EXPOSED: this server copies its whole KV pool in every layer{much}"


def _cost_lines(cost: CopyCost) -> Iterator[str]:
    layers = "layers unknown" if cost.layers is None else f"{cost.layers} layers"
    total = cost.bytes_per_layer if cost.bytes_per_step is None else cost.bytes_per_step
    yield from _item(
        "cost",
        f"{cost.rows:,} rows x {cost.width} x 3 bytes (1 read, 2 written), {layers}: {total / 1e9:.3g} GB "
        f"{'a layer' if cost.bytes_per_step is None else 'a step'} at {cost.bytes_per_second / 1e12:.2f} TB/s",
    )
    yield from _item("", f"rate: {cost.rate_source}")


def floor_lines(floor: Floor) -> Iterator[str]:
    """The floor of a decode step, with its inputs."""
    experts = "" if floor.experts_read is None else f", about {floor.experts_read:.1f} experts a layer"
    yield from _item(
        "floor",
        f"{floor.ms:.2f} ms a decode step: {floor.weight_bytes / 1e9:.3g} GB of weights "
        f"({floor.weight_bits:.3g} bits, {floor.quantization or 'not quantised'}{experts}) and "
        f"{floor.kv_bytes / 1e9:.3g} GB of KV (batch {floor.batch}, {floor.context:,} tokens each) on one rank, at "
        f"{floor.bandwidth / 1e12:.2f} TB/s ({floor.bandwidth_source})",
    )


def gap_lines(gap: Gap) -> Iterator[str]:
    """A decode step beside its floor, and how much of it the copy is."""
    if not gap.measured:
        share = gap.copy_ms / gap.step_ms
        least = f"a decode step takes at least {gap.step_ms:.1f} ms, {share:.0%} of it the copy"
        yield from _item("gap", f"unless this SGLang was fixed, {least}")
        return
    text = f"{gap.step_ms:.2f} ms of device time a decode step ({gap.wall_ms:.2f} ms of wall time)"
    if gap.gap_ms > 0:
        copied = f"{gap.copy_ms:.2f} of them the copy" if gap.copy_ms else "none of them a copy"
        text += f": {gap.gap_ms:.2f} ms above the floor, {copied} of the pool"
    yield from _item("measured", text)
    if not gap.copy_ms and gap.copy_by_flags_ms is not None:
        # A step shorter than the copy holds none, whatever the trace can tell of its kernels.
        proven = gap.step_ms < gap.copy_by_flags_ms
        yield from _item(
            "",
            f"a server with these flags copies its pool for {gap.copy_by_flags_ms:.1f} ms a step, and no copy was "
            f"measured: this SGLang {'was fixed' if proven else 'was fixed, or the copy was not recognised'}",
        )


def _item(name: str, text: str) -> Iterator[str]:
    # Where there is no terminal, as wide as the documentation.
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
    room = max(width - _INDENT - 2, _NARROWEST)
    lines = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False)
    for number, line in enumerate(lines):
        yield f"  {name if not number else '':<{_INDENT}}{line}"
