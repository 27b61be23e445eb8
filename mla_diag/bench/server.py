"""What a benchmark of a server found: the server before and after a fix, side by side.

docs/report-schema.md documents the fields for readers of the JSON.
"""

from __future__ import annotations

import msgspec

from mla_diag.bench.agreement import Agreement
from mla_diag.bench.measure import LeftOut, Measured, Row
from mla_diag.diagnose.compare import Comparison
from mla_diag.diagnose.diagnosis import SCHEMA_VERSION, Tool
from mla_diag.diagnose.server_info import ServerInfo

__all__ = ["Gain", "ServerBench", "ServerSide", "gains"]


class ServerSide(msgspec.Struct):
    """A server and what was measured of it; None where it does not say.

    Attributes:
        sglang: Its release.
        kv_cache_dtype: As given to the server, such as `fp8_e4m3` or `auto`.
        pool_tokens: Tokens that its KV pool holds.
        decode_backend: Its attention backend for decode.
        prefill_backend: Its attention backend for prefill.
        rows: What was measured, in the order asked for.
        left_out: What it cannot run.
        profile: The directory with its traces and their report; None if it was not profiled.
    """

    sglang: str | None
    kv_cache_dtype: str | None
    pool_tokens: int | None
    decode_backend: str | None
    prefill_backend: str | None
    rows: list[Measured] = []
    left_out: list[LeftOut] = []
    profile: str | None = None

    @classmethod
    def of(cls, server: ServerInfo) -> ServerSide:
        """A server of which nothing has been measured yet."""
        return cls(
            sglang=server.version,
            kv_cache_dtype=server.kv_cache_dtype,
            pool_tokens=server.pool_tokens,
            decode_backend=server.backend(decode=True),
            prefill_backend=server.backend(decode=False),
        )


class Gain(msgspec.Struct, frozen=True):
    """How many times as good a row became, by its medians: above 1 is better, for times and for the rate.

    Attributes:
        row: What was sent.
        ttft: Time to first token before over after.
        tpot: Time per output token before over after.
        tokens_per_second: Tokens per second after over before.
    """

    row: Row
    ttft: float
    tpot: float
    tokens_per_second: float


class ServerBench(msgspec.Struct):
    """A benchmark of a server, filled in as it goes.

    Attributes:
        command: The command line that was served; None for a server that somebody else runs.
        url: The server's address.
        before: The server as it was, and the only one where no fix was applied.
        after: The same with the fix.
        fixed: The SGLang that a fix was applied to; None where none was.
        strategy: The fix's.
        reverted: Whether the fix has been taken back.
        gains: The rows that both have.
        comparison: Of the two profiles, as `compare` writes it.
        repeatability: How the logits of the server as it was agree with those of a second pass through the same tokens.
        agreement: How its logits agree with the fixed server's.
        notes: What a reader should know, such as why there was nothing to fix or no profile.
    """

    command: str | None
    url: str
    before: ServerSide | None = None
    after: ServerSide | None = None
    fixed: str | None = None
    strategy: str | None = None
    reverted: bool = False
    gains: list[Gain] = []
    comparison: Comparison | None = None
    repeatability: list[Agreement] = []
    agreement: list[Agreement] = []
    notes: list[str] = []
    schema_version: int = SCHEMA_VERSION
    tool: Tool = Tool()


def gains(before: ServerSide, after: ServerSide) -> list[Gain]:
    """Compare the rows that both sides have."""
    later = {measured.row: measured for measured in after.rows}
    return [
        Gain(
            row=old.row,
            ttft=old.ttft_ms.median / new.ttft_ms.median,
            tpot=old.tpot_ms.median / new.tpot_ms.median,
            tokens_per_second=new.tokens_per_second.median / old.tokens_per_second.median,
        )
        for old in before.rows
        if (new := later.get(old.row)) is not None
    ]
