"""A run of the kernel benchmark as data: to be written, read again and shown where there is no GPU and no torch.

docs/report-schema.md documents the fields.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mla_diag.bench.rows import Ceilings, Row
from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Tool
from mla_diag.errors import UnreadableInputError


class Record(msgspec.Struct, frozen=True):
    """One run of the benchmark.

    Attributes:
        device: the card.
        ceilings: what it does at best.
        rows: what was measured, in the order of measuring.
    """

    device: str
    ceilings: Ceilings
    rows: list[Row]
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()


def read_record(path: Path) -> Record:
    """Read what `mla-diag bench kernel --json` wrote.

    Raises:
        UnreadableInputError: the file cannot be read, is no such thing, or of another version.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise UnreadableInputError(f"{path}: cannot be read: {error.strerror}; check --from") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableInputError(f"{path}: not what `mla-diag bench kernel --json` writes ({error})") from error
    if record.schema_version != SCHEMA_VERSION:
        raise UnreadableInputError(
            f"{path}: a run of schema version {record.schema_version}, and this mla-diag reads {SCHEMA_VERSION}; "
            "measure again"
        )
    if any(row.roofline_us <= 0 or (row.us is not None and row.us <= 0) for row in record.rows):
        raise UnreadableInputError(f"{path}: not what `mla-diag bench kernel --json` writes (a time is not above 0)")
    return record
