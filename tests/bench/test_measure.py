"""Rows over HTTP: what is sent, how the figures are made of when tokens came, and what a server cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mla_diag.bench.measure import LeftOut, Measured, Plan, Row, measure_rows
from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.client import Client
from mla_diag.server.load import TOKENS
from tests.server.stand_in import INFO, StandIn

SERVER = parse_server_info(INFO)


def measure(stand_in: StandIn, *rows: Row, ours: bool = False, **plan: int) -> list[Measured | LeftOut]:
    wanted = Plan(rows, **({"new_tokens": 5, "repeats": 1, "warmup": 0} | plan))
    with Client(stand_in.url) as client:
        return list(measure_rows(client, parse_server_info(stand_in.info), wanted, lambda _: None, ours=ours))


def measured(stand_in: StandIn, *rows: Row, ours: bool = False, **plan: int) -> Measured:
    (found,) = measure(stand_in, *rows, ours=ours, **plan)
    assert isinstance(found, Measured), found
    return found


def left_out(stand_in: StandIn, *rows: Row, **plan: int) -> str:
    (found,) = measure(stand_in, *rows, **plan)
    assert isinstance(found, LeftOut), found
    return found.reason


def test_all_prompts_of_a_wave_are_sent_at_once_and_no_two_begin_alike():
    with StandIn() as server:
        found = measured(server, Row(3, 40), repeats=2, warmup=1)
        waves = server.asked("generate")
    assert [len(wave["input_ids"]) for wave in waves] == [3, 3, 3]
    prompts = [tuple(prompt) for wave in waves for prompt in wave["input_ids"]]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({prompt[:8] for prompt in prompts}) == 9
    assert waves[0]["sampling_params"] == {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert (found.row, found.new_tokens, found.repeats) == (Row(3, 40), 5, 2)


MANY = Row(400, 5)


def prompts_after_each_flush(server: StandIn) -> list[list[int]]:
    """First tokens of all prompts from the start, or one flush of the cache, to the next."""
    spans: list[list[int]] = [[]]
    for _, path, _, body in server.requests:
        if path.endswith("/flush_cache"):
            spans.append([])
        elif path.endswith("/generate"):
            spans[-1] += [prompt[0] for prompt in body["input_ids"]]
    return spans


def test_a_server_of_our_own_forgets_its_prefixes_before_first_tokens_repeat():
    """One cached token of one prompt has SGLang prefill the whole batch by another kernel."""
    with StandIn() as server:
        found = measured(server, MANY, repeats=5, ours=True)
        spans = prompts_after_each_flush(server)
    assert [len(span) for span in spans] == [800, 800, 400]
    assert all(len(set(span)) == len(span) for span in spans)
    assert found.cached_prompts == 0


def test_no_cache_is_emptied_where_a_token_alone_is_no_prefix():
    for info in ({"page_size": 64}, {"disable_radix_cache": True}):
        with StandIn(info=INFO | info) as server:
            measured(server, MANY, repeats=5, ours=True)
            assert server.asked("flush_cache") == []


def test_prompts_that_somebody_elses_server_knows_in_part_are_counted_and_its_cache_is_left_alone():
    with StandIn() as server:
        assert measured(server, MANY, repeats=2).cached_prompts == 0
        found = measured(server, MANY, repeats=2, warmup=1)
        assert server.asked("flush_cache") == []
    # The warm-up took the last 190 first tokens and 210 known ones; the two waves that count find all of theirs.
    assert found.cached_prompts == 2 * 400


def test_a_server_that_may_not_be_flushed_is_measured_and_its_known_prompts_counted():
    with StandIn(answers={"flush_cache": (403, "Forbidden")}) as server:
        assert measured(server, MANY, repeats=3, ours=True).cached_prompts == 3 * 400 - len(TOKENS)


def test_the_first_token_the_others_and_the_whole_wave_are_timed_apart():
    with StandIn(prefill_seconds=0.2, token_seconds=0.05) as server:
        found = measured(server, Row(2, 10))
    assert 200 <= found.ttft_ms.median < 250
    assert 50 <= found.tpot_ms.median < 62
    assert 2 * 5 / 0.5 <= found.tokens_per_second.median <= 2 * 5 / 0.4


def test_the_spread_is_over_the_waves_that_count():
    with StandIn(prefill_seconds=0.02) as server:
        found = measured(server, Row(1, 10), repeats=3)
    spread = found.ttft_ms
    assert 20 <= spread.least < spread.median < spread.most


def test_requests_that_a_server_runs_in_turns_are_no_batch():
    """Their time per output token would be that of a smaller one."""
    with StandIn(together=2, token_seconds=0.01) as server:
        assert "did not run all 4 requests together" in left_out(server, Row(4, 10))


def test_a_request_that_the_server_cuts_short_is_left_out():
    with StandIn(most_tokens=3) as server:
        assert "ended after 3 of 5 new tokens" in left_out(server, Row(1, 10))


@pytest.mark.parametrize(
    ("info", "row", "words"),
    [
        ({"max_req_input_len": 99}, Row(1, 100), "prompts of 99 tokens at most"),
        ({}, Row(100, 5000), "takes 500,500 tokens of KV and this server's pool has 495,552"),
    ],
)
def test_what_a_server_cannot_hold_is_never_sent(info: dict[str, Any], row: Row, words: str):
    with StandIn(info=INFO | info) as server:
        assert words in left_out(server, row)
        assert server.asked("generate") == []


def test_replicas_share_the_batch():
    with StandIn(info=INFO | {"dp_size": 2}) as server:
        measured(server, Row(100, 5000), new_tokens=2)


def test_a_row_that_the_server_refuses_is_left_out_and_the_next_is_measured():
    class Picky(StandIn):
        def _answer(self, endpoint: str, authorization: str | None, body: Any) -> tuple[int, str]:
            if endpoint == "generate" and len(body["input_ids"][0]) > 50:
                return 400, '{"error": {"message": "longer than the model\'s context length"}}'
            return super()._answer(endpoint, authorization, body)

    with Picky() as server:
        long, short = measure(server, Row(1, 60), Row(1, 40))
    assert isinstance(long, LeftOut)
    assert "longer than the model's context length" in long.reason
    assert isinstance(short, Measured)


def test_a_server_that_fails_ends_it():
    with StandIn(answers={"generate": (500, "CUDA out of memory")}) as server, pytest.raises(ServerError, match="CUDA"):
        measure(server, Row(1, 10), Row(1, 20))


def test_a_part_of_a_disaggregated_server_is_refused():
    with pytest.raises(UsageError, match="only does the decode part"):
        list(measure_rows(None, replace(SERVER, disaggregation="decode"), Plan(), print))  # type: ignore[arg-type]
