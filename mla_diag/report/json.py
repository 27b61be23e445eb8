"""What a command found as JSON: what docs/report-schema.md describes, the same for every command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from mla_diag.bench.kernel_record import Record
    from mla_diag.bench.server import ServerBench
    from mla_diag.diagnose.compare import Comparison
    from mla_diag.diagnose.diagnosis import Diagnosis
    from mla_diag.report.fix_account import FixAccount
    from mla_diag.server.exposure import Exposure


def render_json(report: Diagnosis | Comparison | Exposure | FixAccount | Record | ServerBench) -> str:
    """A report as indented JSON text, ending in a newline.

    Schema version and tool come first, so that a reader can decide what to make of the rest.
    """
    fields = msgspec.to_builtins(report)
    first = {name: fields.pop(name) for name in ("schema_version", "tool")}
    try:
        text = msgspec.json.encode(first | fields)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_printable(first | fields))
    return msgspec.json.format(text, indent=2).decode() + "\n"


def _printable(value: Any) -> Any:
    r"""The same with `\udcff` for a byte of a file's name that is no UTF-8, and that JSON cannot say."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(name): _printable(member) for name, member in value.items()}
    return [_printable(member) for member in value] if isinstance(value, list) else value
