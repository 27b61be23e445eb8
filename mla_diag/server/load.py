"""Requests that make the steps one wants to see run: one wave of prompts, all sent together.

One wave, because SGLang prefills whatever waits before it decodes: its prefill steps come first and its decode steps
then have the whole batch from the first on. Several waves of one token each do not stay in the prefill stage, since the
overlap scheduler runs a decode step for a request before it knows that the request is done.
"""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from dataclasses import dataclass
from typing import Any

from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.client import Client

# In every vocabulary, and past the special tokens that come first in most.
TOKENS = range(10, 1000)
# Tokens past the steps that are profiled: the first comes from the prefill, and the profiler stops a step late.
_MARGIN = 8


@dataclass(frozen=True)
class LoadPlan:
    """One wave of requests; lengths in tokens.

    Attributes:
        batch: Requests on each data-parallel rank.
        input_len: Of each prompt.
        cached_len: Of it, in the cache when the wave comes: what makes prefill read the pool.
        output_len: New tokens for each prompt.
        prefill_steps: Forward passes that its prefill takes on a rank, if nothing else waits.
    """

    batch: int
    input_len: int
    cached_len: int
    output_len: int
    prefill_steps: int = 1


def plan_load(
    server: ServerInfo, *, batch: int, input_len: int, cached_len: int | None, output_len: int | None, steps: int
) -> LoadPlan:
    """The wave that has so many decode steps, checked against what the server can hold.

    Args:
        server: What the server says of itself.
        batch: Requests on each data-parallel rank.
        input_len: Tokens a prompt.
        cached_len: Of them, cached before; None for half.
        output_len: New tokens a prompt; None for as many as the steps take.
        steps: Decode steps that are to be profiled.

    Raises:
        UsageError: The server cannot hold them, or they end before so many steps.
    """
    if server.disaggregation in ("prefill", "decode"):
        raise UsageError(
            f"this server only does the {server.disaggregation} part of requests and takes them from its router; use "
            "--no-load and send requests there"
        )
    least = steps + 2
    if output_len is not None and output_len < least:
        raise UsageError(f"--output-len {output_len}: over before {steps} steps are profiled; give {least} or more")
    wanted = output_len or (steps + _MARGIN) * server.draft_tokens
    kept = server.radix_cache is not False
    cached = (input_len // 2 if cached_len is None else cached_len) if kept else 0
    if cached_len and not kept:
        raise UsageError("--cached-len: this server keeps no prefixes (--disable-radix-cache); give 0")
    if cached >= input_len:
        raise UsageError(f"--cached-len {cached}: leaves nothing of the {input_len} tokens to prefill; give less")
    if server.longest_input is not None and input_len > server.longest_input:
        raise UsageError(f"--input-len {input_len}: this server takes prompts of {server.longest_input} tokens at most")
    needed = batch * (input_len + wanted)
    if server.pool_tokens is not None and needed > server.pool_tokens:
        raise UsageError(
            f"--batch {batch}: takes {needed:,} tokens of KV and this server's pool has {server.pool_tokens:,}; "
            "lower --batch or --input-len"
        )
    chunk = server.chunked_prefill_size
    fresh = batch * (input_len - cached)
    return LoadPlan(batch, input_len, cached, wanted, 1 if chunk is None else -(-fresh // chunk))


_first_tokens = itertools.cycle(random.sample(TOKENS, len(TOKENS)))


class Load:
    """One wave of requests to a server, run in a thread of its own.

    Args:
        client: The server.
        plan: The wave.
        replicas: Data-parallel ranks to give it to.
    """

    def __init__(self, client: Client, plan: LoadPlan, replicas: int = 1) -> None:
        self.plan = plan
        self.error: ServerError | None = None
        self._client = client
        self._count = plan.batch * replicas
        self._prefixes = [random_tokens(plan.cached_len) for _ in range(self._count)]
        self._ids = [f"mla-diag-{uuid.uuid4().hex}" for _ in range(self._count)]
        self._stopped = threading.Event()
        # Not the thread's own state: Ctrl-C in a join with a timeout makes a thread that runs look dead (Python 3.11).
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def cache_prefixes(self) -> None:
        """Have the server compute and keep the prefixes of the prompts.

        Raises:
            ServerError: It refused.
        """
        if self.plan.cached_len:
            self._client.generate(generate_request(self._prefixes, 1))

    def start(self) -> None:
        """Send the wave."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether requests are under way."""
        return self._thread.ident is not None and not self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the wave to end; False if it has not by then.

        Raises:
            ServerError: The server failed the requests.
        """
        self._ended.wait(seconds)
        if self.error is not None and not self._stopped.is_set():
            raise self.error
        return self._ended.is_set()

    def stop(self) -> None:
        """End the requests that are under way, now."""
        if not self.running or self._stopped.is_set():
            return
        self._stopped.set()
        for request_id in self._ids:
            self._client.abort(request_id)

    def _run(self) -> None:
        suffix_len = self.plan.input_len - self.plan.cached_len
        prompts = [prefix + random_tokens(suffix_len) for prefix in self._prefixes]
        try:
            self._client.generate({**generate_request(prompts, self.plan.output_len), "rid": self._ids})
        except ServerError as error:
            self.error = error
        finally:
            self._ended.set()


def generate_request(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """What asks `/generate` for so many tokens of each prompt, and no fewer."""
    return {"input_ids": prompts, "sampling_params": sampling(new_tokens)}


def sampling(new_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters that yield so many tokens, no fewer, and always the same."""
    return {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **more}


def random_tokens(count: int) -> list[int]:
    """Tokens of which the first is none of the last 989 prompts' of this process.

    One cached token of one prompt is enough for SGLang to prefill a whole batch by the paged kernel in place of the
    ragged one (sglang/srt/layers/attention/flashinfer_mla_backend.py, init_forward_metadata).
    """
    return [next(_first_tokens), *random.choices(TOKENS, k=count - 1)] if count else []
