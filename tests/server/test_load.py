"""The wave of requests: how much, of what, and that it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.client import Client
from mla_diag.server.connection import Timeouts
from mla_diag.server.load import TOKENS, Load, LoadPlan, plan_load, random_tokens
from tests.server.stand_in import INFO, StandIn

SERVER = parse_server_info(INFO)
WANTED: dict[str, Any] = {"batch": 2, "input_len": 100, "cached_len": None, "output_len": None, "steps": 5}


def test_half_of_each_prompt_is_cached_and_the_steps_are_covered():
    plan = plan_load(SERVER, **WANTED)
    assert (plan.batch, plan.input_len, plan.cached_len) == (2, 100, 50)
    assert plan.output_len >= 5 + 2


def test_speculative_decoding_takes_more_tokens_for_as_many_steps():
    assert plan_load(replace(SERVER, draft_tokens=4), **WANTED).output_len >= 4 * 5


def test_nothing_is_cached_where_the_server_keeps_no_prefixes():
    assert plan_load(replace(SERVER, radix_cache=False), **WANTED).cached_len == 0


@pytest.mark.parametrize(
    ("server", "wanted", "words"),
    [
        ({}, {"output_len": 5}, "--output-len 5: over before 5 steps"),
        ({}, {"cached_len": 100}, "--cached-len 100: leaves nothing"),
        ({"radix_cache": False}, {"cached_len": 10}, "--disable-radix-cache"),
        ({"longest_input": 99}, {}, "--input-len 100: .*99 tokens at most"),
        ({"pool_tokens": 200}, {}, "--batch 2: takes .* pool has 200"),
        ({"disaggregation": "prefill"}, {}, "--no-load"),
    ],
)
def test_what_the_server_cannot_do_is_said_before_anything_is_sent(
    server: dict[str, Any], wanted: dict[str, Any], words: str
):
    with pytest.raises(UsageError, match=words):
        plan_load(replace(SERVER, **server), **(WANTED | wanted))


def test_the_wave_begins_with_the_prefixes_that_were_cached():
    with StandIn() as server, Client(server.url) as client:
        load = Load(client, LoadPlan(batch=2, input_len=100, cached_len=40, output_len=9), replicas=3)
        load.cache_prefixes()
        load.start()
        assert load.wait(10)
        before, wave = server.asked("generate")
    assert len(wave["input_ids"]) == 6
    assert {len(prompt) for prompt in wave["input_ids"]} == {100}
    assert [prompt[:40] for prompt in wave["input_ids"]] == before["input_ids"]
    assert (before["sampling_params"]["max_new_tokens"], wave["sampling_params"]["max_new_tokens"]) == (1, 9)
    assert wave["sampling_params"]["ignore_eos"] is True


def test_a_wave_that_is_stopped_is_aborted_on_the_server():
    with StandIn(hangs={"generate"}) as server, Client(server.url, timeouts=Timeouts(generate=60)) as client:
        load = Load(client, LoadPlan(batch=2, input_len=10, cached_len=0, output_len=9))
        load.start()
        assert not load.wait(0.3)
        load.stop()
        (wave,) = server.asked("generate")
        assert [body["rid"] for body in server.asked("abort_request")] == wave["rid"]


def test_requests_that_fail_are_the_error():
    with StandIn(answers={"generate": (500, "CUDA out of memory")}) as server, Client(server.url) as client:
        load = Load(client, LoadPlan(batch=1, input_len=10, cached_len=0, output_len=9))
        load.start()
        time.sleep(0.1)
        with pytest.raises(ServerError, match="CUDA out of memory"):
            load.wait(10)


def test_no_two_prompts_begin_alike():
    """One cached token of one prompt has SGLang prefill the whole batch by another kernel."""
    firsts = [random_tokens(3)[0] for _ in range(len(TOKENS))]
    assert sorted(firsts) == list(TOKENS)
    assert random_tokens(0) == []
