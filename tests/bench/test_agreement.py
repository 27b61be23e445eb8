"""How alike two passes are found; tests/server/test_cpu_server.py takes a real server through the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mla_diag.bench.agreement import Logits, StageLogits, _context, agree, record_logits
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.client import Client
from tests.server.stand_in import StandIn

NOTHING_KNOWN = ServerInfo(*[None] * 8)


def stage(positions: int = 50, seed: int = 0) -> StageLogits:
    draw = np.random.default_rng(seed)
    sampled = draw.normal(size=(positions, 256))
    return StageLogits(sampled - sampled.mean(axis=1, keepdims=True), draw.integers(0, 1000, positions))


def test_the_same_logits_agree_and_others_do_not():
    before = Logits(stage(), stage(seed=1), 1000)
    decode, prefill = agree(before, Logits(stage(), stage(seed=2), 1000))
    assert (decode.stage, decode.positions) == (Stage.DECODE, 50)
    assert (decode.max_error, decode.rms_error, decode.top1) == (0.0, 0.0, 1.0)
    assert decode.cosine == pytest.approx(1.0)
    assert prefill.stage is Stage.PREFILL
    assert abs(prefill.cosine) < 0.1
    assert prefill.top1 < 0.1


def test_one_wrong_position_shows_in_the_worst_and_little_in_the_mean():
    good = stage(100)
    wrong = good.sampled.copy()
    wrong[7] = -wrong[7]
    top = good.top.copy()
    top[7] += 1
    found, _ = agree(Logits(good, good, 1000), Logits(StageLogits(wrong, top), good, 1000))
    assert found.worst_cosine == pytest.approx(-1.0)
    assert found.cosine == pytest.approx(0.98)
    assert found.max_error == pytest.approx(2 * np.abs(good.sampled[7]).max())
    assert found.rms_error == pytest.approx(np.sqrt((4 * good.sampled[7] ** 2).sum() / good.sampled.size))
    assert found.top1 == pytest.approx(0.99)


def test_logits_of_other_tokens_are_not_compared():
    with pytest.raises(ValueError, match=r"\(50, 256\) logits against \(49, 256\)"):
        agree(Logits(stage(), stage(), 1000), Logits(stage(49), stage(), 1000))
    with pytest.raises(ValueError, match="prompts of 1000 tokens against 500"):
        agree(Logits(stage(), stage(), 1000), Logits(stage(), stage(), 500))


def test_two_pools_of_about_one_size_get_the_same_prompts():
    """A pool follows the memory that is free when its server starts."""
    assert {_context(replace(NOTHING_KNOWN, pool_tokens=tokens)) for tokens in (5_100, 5_900)} == {500}
    assert _context(NOTHING_KNOWN) == _context(replace(NOTHING_KNOWN, pool_tokens=9_024)) == 1000
    assert _context(replace(NOTHING_KNOWN, pool_tokens=9_023)) == 500


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (replace(NOTHING_KNOWN, radix_cache=False), "keeps no prefixes"),
        (replace(NOTHING_KNOWN, pool_tokens=1000), "cannot hold 8 prompts of 190 tokens"),
        (replace(NOTHING_KNOWN, longest_input=150), "cannot hold 8 prompts of 190 tokens"),
    ],
)
def test_a_server_that_cannot_be_taken_through_is_said_before_it_is_asked(server: ServerInfo, why: str):
    with Client("http://127.0.0.1:1") as client, pytest.raises(UsageError, match=why):
        record_logits(client, server)


def test_a_server_without_log_probabilities_is_one_line():
    silent = pytest.raises(ServerError, match="answers without the log-probabilities")
    with StandIn() as server, Client(server.url) as client, silent:
        record_logits(client, replace(NOTHING_KNOWN, pool_tokens=100_000))


def test_the_cache_is_emptied_first_but_not_for_a_second_pass():
    """One cached token of one prompt had a whole batch prefilled by the paged kernel in place of the ragged one."""
    with StandIn() as server, Client(server.url) as client:
        for again, flushes in ((True, 0), (False, 1)):
            with pytest.raises(ServerError):
                record_logits(client, replace(NOTHING_KNOWN, pool_tokens=100_000), again=again)
            assert len(server.asked("flush_cache")) == flushes
