"""What a server's users feel, over HTTP: time to first token, time per output token, tokens per second.

A row is a number of requests of one length, sent together as one streamed `/generate`, as SGLang's own
`bench_one_batch_server` does. Every wave has fresh random prompts. One that begins with the token of an earlier one has
that in the prefix cache, which is enough for another prefill kernel: a server of our own forgets its prefixes before
first tokens repeat, and of any server those prompts are counted of which it had a beginning.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.errors import RefusedError, ServerError, UsageError
from mla_diag.server.capture import Say
from mla_diag.server.client import Client
from mla_diag.server.load import TOKENS, generate_request, random_tokens

__all__ = ["ROWS", "LeftOut", "Measured", "Plan", "Row", "Spread", "measure_rows"]


class Row(msgspec.Struct, frozen=True):
    """Requests sent together, and tokens of each prompt."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


ROWS = (Row(1, 2000), Row(1, 30000), Row(16, 2000))


@dataclass(frozen=True)
class Plan:
    """How rows are measured.

    Attributes:
        rows: What to measure.
        new_tokens: Of each request; at least 2, because the time per output token is that of those after the first.
        repeats: Waves of each row that count.
        warmup: Waves of each row before them that do not.
    """

    rows: Sequence[Row] = ROWS
    new_tokens: int = 65
    repeats: int = 5
    warmup: int = 1


class Spread(msgspec.Struct, frozen=True):
    """One figure over the waves of a row."""

    median: float
    least: float
    most: float


class Measured(msgspec.Struct, frozen=True):
    """One row.

    Attributes:
        row: What was sent.
        new_tokens: Of each request.
        repeats: Waves that the figures rest on.
        ttft_ms: From sending a wave to a request's first token: of a wave its median request.
        tpot_ms: Between two tokens of a request, once all requests of the wave have their first.
        tokens_per_second: New tokens of all requests over the time from sending the wave to its last token.
        cached_prompts: Of all prompts of those waves, those of which the server had a beginning in its prefix cache.
    """

    row: Row
    new_tokens: int
    repeats: int
    ttft_ms: Spread
    tpot_ms: Spread
    tokens_per_second: Spread
    cached_prompts: int = 0


class LeftOut(msgspec.Struct, frozen=True):
    """A row that this server cannot run, and why."""

    row: Row
    reason: str


class _CannotRunError(Exception):
    """The server does not run a row as it is meant: the reason is for the reader."""


@dataclass(frozen=True)
class _Wave:
    """Figures of one wave: seconds, tokens a second, and prompts that the server had some of."""

    ttft: float
    tpot: float
    rate: float
    cached: int


@dataclass
class _Request:
    """When tokens of one request came, in seconds from sending, and how many there were by then."""

    first: float
    first_tokens: int
    last: float
    tokens: int
    cached: bool


class _Prompts:
    """New prompts for one server, of which as few as can be begin with a token that is in its prefix cache."""

    def __init__(self, client: Client, server: ServerInfo, ours: bool) -> None:
        self._client = client
        # Prompts of which only a token is alike share no page of several.
        self._flushes = ours and server.radix_cache is not False and (server.page_size or 1) == 1
        self._sent = 0

    def draw(self, row: Row) -> list[list[int]]:
        """Those of a wave."""
        if self._flushes and self._sent + row.batch > len(TOKENS):
            # Not before every wave, because SGLang then gives the memory back that the next prefill allocates anew. A
            # server that will not, as without its admin's key, says itself of which prompts it had some.
            with suppress(RefusedError):
                self._client.flush_cache()
            self._sent = 0
        self._sent += row.batch
        return [random_tokens(row.context) for _ in range(row.batch)]


def measure_rows(
    client: Client, server: ServerInfo, plan: Plan, say: Say, *, ours: bool = False
) -> Iterator[Measured | LeftOut]:
    """Measure rows one after the other.

    Args:
        client: The server.
        server: What it says of itself.
        plan: What to send.
        say: Told what is being waited for.
        ours: Whether it has just been started for this and serves nobody else, so that its cache may be emptied.

    Yields:
        Each row, as soon as it is measured or found to be more than the server can run.

    Raises:
        UsageError: The server does a part of requests only, and takes them from its router.
        ServerError: The server went away, or failed to answer.
    """
    if server.disaggregation in ("prefill", "decode"):
        raise UsageError(
            f"this server only does the {server.disaggregation} part of requests and takes them from its router; "
            "give a server that does both"
        )
    prompts = _Prompts(client, server, ours)
    for row in plan.rows:
        reason = _too_large(row, plan.new_tokens, server)
        if reason is None:
            try:
                yield _measure(client, row, plan, prompts, say)
                continue
            except _CannotRunError as error:
                reason = str(error)
        yield LeftOut(row, reason)


def _too_large(row: Row, new_tokens: int, server: ServerInfo) -> str | None:
    """Why the server cannot hold a row by its own word; None if it can, or does not say."""
    if server.longest_input is not None and row.context > server.longest_input:
        return f"this server takes prompts of {server.longest_input:,} tokens at most"
    needed = -(-row.batch // server.data_parallel) * (row.context + new_tokens)
    if server.pool_tokens is not None and needed > server.pool_tokens:
        return f"takes {needed:,} tokens of KV and this server's pool has {server.pool_tokens:,}"
    return None


def _measure(client: Client, row: Row, plan: Plan, prompts: _Prompts, say: Say) -> Measured:
    waves = []
    for number in range(plan.warmup + plan.repeats):
        counted = number - plan.warmup + 1
        say(f"{row}: " + (f"wave {counted} of {plan.repeats}" if counted > 0 else "warm-up"))
        wave = _run_wave(client, row, prompts.draw(row), plan.new_tokens)
        if counted > 0:
            waves.append(wave)
    return Measured(
        row=row,
        new_tokens=plan.new_tokens,
        repeats=plan.repeats,
        ttft_ms=_spread([wave.ttft * 1e3 for wave in waves]),
        tpot_ms=_spread([wave.tpot * 1e3 for wave in waves]),
        tokens_per_second=_spread([wave.rate for wave in waves]),
        cached_prompts=sum(wave.cached for wave in waves),
    )


def _run_wave(client: Client, row: Row, prompts: list[list[int]], new_tokens: int) -> _Wave:
    body = generate_request(prompts, new_tokens)
    requests: dict[int, _Request] = {}
    start = time.perf_counter()
    try:
        for event in client.stream(body):
            now = time.perf_counter() - start
            tokens, cached = _told(event)
            request = requests.setdefault(event.get("index", 0), _Request(now, tokens, now, tokens, cached))
            if tokens > request.tokens:
                request.last, request.tokens = now, tokens
    except RefusedError as error:
        raise _CannotRunError(str(error).removeprefix(f"{client.url}: ")) from None
    return _figures(list(requests.values()), row, new_tokens)


def _told(event: dict[str, object]) -> tuple[int, bool]:
    """How many tokens a request has by now, and whether the server had some of its prompt."""
    meta = event.get("meta_info")
    said = meta if isinstance(meta, dict) else {}
    tokens = said.get("completion_tokens")
    if not isinstance(tokens, int):
        raise ServerError("the server streams no completion_tokens, as an SGLang server does; check the address")
    return tokens, bool(said.get("cached_tokens"))


def _figures(requests: list[_Request], row: Row, new_tokens: int) -> _Wave:
    short = min((request.tokens for request in requests), default=0)
    if len(requests) < row.batch or short < new_tokens:
        raise _CannotRunError(f"a request ended after {short} of {new_tokens} new tokens: no room for more, or aborted")
    # The last to begin: while it decodes, nothing is left to prefill and the batch is whole.
    latest = max(requests, key=lambda request: request.first)
    if latest.first > min(request.last for request in requests):
        raise _CannotRunError(f"the server did not run all {row.batch} requests together; see its max_running_requests")
    if latest.tokens == latest.first_tokens:
        raise _CannotRunError("all tokens of a request came at once; start the server with --stream-interval 1")
    return _Wave(
        ttft=statistics.median(request.first for request in requests),
        tpot=(latest.last - latest.first) / (latest.tokens - latest.first_tokens),
        rate=row.batch * new_tokens / max(request.last for request in requests),
        cached=sum(request.cached for request in requests),
    )


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
