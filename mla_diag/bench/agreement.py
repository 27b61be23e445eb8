"""Whether a server says the same before and after a change: its logits over the same tokens, teacher-forced.

Greedy text would not do: the first near tie sends it another way, and what follows says nothing. So both servers are
made to go through the same tokens, in decode by a bias (`logit_bias`, in SGLang from 0.5.0) that outweighs every logit
but leaves the others as they are, in prefill by a prompt of which the first half is in the cache, so that the rest
attends to the pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.client import Client
from mla_diag.server.load import TOKENS, sampling

__all__ = ["Agreement", "Logits", "StageLogits", "agree", "record_logits"]

PROMPTS = 8
STEPS = 64  # of decode, and tokens of prefill, a prompt: 512 positions of each
_CONTEXT = 1000  # tokens before them, where the server can hold as many
_SAMPLED = 256  # tokens whose logits are compared; all of a large vocabulary would be gigabytes of JSON
_BIAS = 100.0  # no model's logits lie so far apart; float32 still tells them to 1e-5 beside it


@dataclass(frozen=True)
class StageLogits:
    """Logits over one pass through the tokens.

    Attributes:
        sampled: [positions, 256], logits of the same tokens everywhere, less their mean: what softmax ignores.
        top: [positions], the likeliest token of the whole vocabulary, the forced one apart.
    """

    sampled: npt.NDArray[np.float64]
    top: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Logits:
    """What one server says at each position, by stage.

    Attributes:
        decode: Of the forced tokens.
        prefill: Of the prompts' second part.
        context: Tokens of each prompt before those; other contexts are other tokens.
    """

    decode: StageLogits
    prefill: StageLogits
    context: int


class Agreement(msgspec.Struct, frozen=True):
    """How alike the logits of two passes are in one stage.

    Attributes:
        stage: Decode or prefill.
        positions: Positions compared.
        cosine: Between the sampled logits of a position, the mean.
        worst_cosine: The same at the position where it is least.
        max_error: The largest difference between two logits.
        rms_error: The root mean square of all differences.
        top1: Share of positions where both find the same token likeliest.
    """

    stage: Stage
    positions: int
    cosine: float
    worst_cosine: float
    max_error: float
    rms_error: float
    top1: float


def record_logits(client: Client, server: ServerInfo, *, again: bool = False) -> Logits:
    """Take a server through tokens that depend on nothing but how much it can hold.

    Args:
        client: The server, with no other requests.
        server: What it says of itself.
        again: Whether it is to find the prompts in its cache, as a second pass does. Otherwise the cache is emptied: a
            single prompt of which one token is cached has SGLang prefill its whole batch by another kernel.

    Raises:
        ServerError: It refused, or answered without the log-probabilities.
        UsageError: It is too small for any context, or keeps no prefixes.
    """
    context = _context(server)
    draw = random.Random(context)
    prefixes = [draw.choices(TOKENS, k=context) for _ in range(PROMPTS)]
    suffixes = [draw.choices(TOKENS, k=STEPS + 1) for _ in range(PROMPTS)]
    forced = draw.sample(TOKENS, PROMPTS)
    sampled = draw.sample([token for token in TOKENS if token not in forced], _SAMPLED)
    asked = {"return_logprob": [True] * PROMPTS, "token_ids_logprob": [sampled] * PROMPTS}
    if not again:
        client.flush_cache()
    decode = client.generate({
        "input_ids": prefixes,
        "sampling_params": [sampling(STEPS, logit_bias={str(token): _BIAS}) for token in forced],
        "top_logprobs_num": [2] * PROMPTS,
        **asked,
    })  # fmt: skip
    # The prompts above are in the cache now, up to where log-probabilities are asked for.
    prefill = client.generate({
        "input_ids": [[*prefix, *suffix] for prefix, suffix in zip(prefixes, suffixes, strict=True)],
        "sampling_params": [sampling(1)] * PROMPTS,
        "logprob_start_len": [context] * PROMPTS,
        "top_logprobs_num": [1] * PROMPTS,
        **asked,
    })  # fmt: skip
    try:
        return Logits(_stage(decode, "output", forced), _stage(prefill, "input", [None] * PROMPTS), context)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(
            f"{client.url}: answers without the log-probabilities that were asked for ({type(error).__name__}: "
            f"{error}); SGLang can be teacher-forced from 0.5.0 on"
        ) from error


def agree(before: Logits, after: Logits) -> list[Agreement]:
    """Compare two passes through the same tokens, stage by stage.

    Raises:
        ValueError: They are not of the same tokens.
    """
    if before.context != after.context:
        raise ValueError(f"prompts of {before.context} tokens against {after.context}")
    return [
        _agree(Stage.DECODE, before.decode, after.decode),
        _agree(Stage.PREFILL, before.prefill, after.prefill),
    ]


def _agree(stage: Stage, before: StageLogits, after: StageLogits) -> Agreement:
    if before.sampled.shape != after.sampled.shape:
        raise ValueError(f"{before.sampled.shape} logits against {after.sampled.shape}")
    difference = after.sampled - before.sampled
    norms = np.linalg.norm(before.sampled, axis=1) * np.linalg.norm(after.sampled, axis=1)
    products = (before.sampled * after.sampled).sum(1)
    cosines = np.divide(products, norms, out=np.ones_like(products), where=norms > 0)
    return Agreement(
        stage=stage,
        positions=len(difference),
        cosine=float(cosines.mean()),
        worst_cosine=float(cosines.min()),
        max_error=float(np.abs(difference).max()),
        rms_error=float(np.sqrt((difference**2).mean())),
        top1=float((before.top == after.top).mean()),
    )


def _context(server: ServerInfo) -> int:
    """Tokens of each prompt before those that are compared; the pool is to hold all prompts at once."""
    if server.radix_cache is False:
        raise UsageError("the server keeps no prefixes (--disable-radix-cache), so that no prefill would read the pool")
    rest = 2 * STEPS
    room = _CONTEXT
    if server.pool_tokens is not None:
        room = min(room, server.pool_tokens // PROMPTS - rest)
    if server.longest_input is not None:
        room = min(room, server.longest_input - rest)
    # By halves, since a pool's size follows the memory that is free at the start and both servers are to get the same.
    context = next((_CONTEXT >> halves for halves in range(5) if _CONTEXT >> halves <= room), None)
    if context is None:
        raise UsageError(f"the server cannot hold {PROMPTS} prompts of {(_CONTEXT >> 4) + rest} tokens")
    return context


def _stage(answers: Sequence[dict[str, Any]], side: str, forced: Sequence[int | None]) -> StageLogits:
    sampled, top = [], []
    for answer, token in zip(answers, forced, strict=True):
        meta = answer["meta_info"]
        # Nothing comes before the first token of what is asked about, so there may be no entry for it.
        rows = [row for row in meta[f"{side}_token_ids_logprobs"] if row]
        bests = [row for row in meta[f"{side}_top_logprobs"] if row]
        if len(rows) != len(bests) or not rows:
            raise ValueError(f"{len(rows)} positions, {len(bests)} of them with a likeliest token")
        sampled += [[entry[0] for entry in sorted(row, key=lambda entry: entry[1])] for row in rows]
        top += [next(entry[1] for entry in row if entry[1] != token) for row in bests]
    logits = np.asarray(sampled, dtype=np.float64)
    return StageLogits(logits - logits.mean(axis=1, keepdims=True), np.asarray(top, dtype=np.int64))
