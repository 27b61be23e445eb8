"""The protocol of a live server, and each way in which one was reported to break it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_diag.errors import MlaDiagError, RefusedError, ServerError, ServerGoneError, UsageError
from mla_diag.server.client import Client
from mla_diag.server.connection import Timeouts
from mla_diag.server.secrets import REDACTED
from tests.server.stand_in import StandIn

KEY = "sk-0123456789abcdef"
QUICK = Timeouts(connect=2, answer=1, generate=1, export=1)


def client_of(server: StandIn, **options: Any) -> Client:
    return Client(server.url, timeouts=QUICK, **options)


@pytest.mark.parametrize("old", [False, True])
def test_server_info_in_both_spellings(old: bool):
    with StandIn(old=old) as server, client_of(server) as client:
        assert client.server_info()["max_total_num_tokens"] == 495_552
        assert client.responsive()


def test_the_path_of_the_address_is_kept():
    with StandIn(base="/models/glm") as server, client_of(server) as client:
        assert client.server_info()["version"] == "0.5.17"
        assert {path for _, path, _, _ in server.requests} == {"/models/glm/server_info"}


def test_an_address_without_a_scheme_is_http():
    with StandIn() as server, Client(server.url.removeprefix("http://")) as client:
        assert client.server_info()["version"] == "0.5.17"
        assert client.url == server.url


@pytest.mark.usefixtures("_impatient")
def test_a_server_that_still_runs_a_step_is_asked_again_to_forget_its_prefixes():
    with StandIn(answers={"flush_cache": (400, "Flush cache failed.")}) as server, client_of(server) as client:
        threading.Timer(0.3, server.answers.clear).start()
        client.flush_cache()
        assert len(server.asked("flush_cache")) > 1


def test_a_server_that_does_not_become_idle_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla_diag.server.client._SETTLING", 0)
    with (
        StandIn(answers={"flush_cache": (400, "Flush cache failed.")}) as server,
        client_of(server) as client,
        pytest.raises(RefusedError, match="/flush_cache failed with HTTP 400: Flush cache failed"),
    ):
        client.flush_cache()


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:99999999", "http://[::1", "://x"])
def test_what_is_no_address_is_one_line(url: str):
    with pytest.raises(UsageError, match="--url"):
        Client(url)


def test_the_key_is_sent_and_shown_nowhere():
    with StandIn(key=KEY) as server, client_of(server, api_key=KEY) as client:
        server.info |= {"note": f"started with {KEY}", "nested": [{"admin_api_key": "other"}]}
        shown = json.dumps(client.server_info())
        assert all(secret not in shown for secret in (KEY, "sk-of-the-server", "hunter2", "other"))
        assert client.server_info()["api_key"] == REDACTED
        assert server.requests[0][2]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [None, "wrong-key"])
def test_a_refused_key_is_one_line_without_it(key: str | None):
    with StandIn(key=KEY) as server, client_of(server, api_key=key) as client:
        with pytest.raises(ServerError, match=r"API key .*--api-key or MLA_DIAG_API_KEY") as caught:
            client.server_info()
        assert "wrong-key" not in str(caught.value)


def test_a_key_that_no_header_can_hold_is_one_line_without_it():
    with pytest.raises(UsageError, match="--api-key") as caught:
        Client("localhost:1", api_key="sk-\n")
    assert "sk-" not in str(caught.value)


def test_a_password_in_the_address_is_not_shown():
    with pytest.raises(ServerError) as caught:
        Client("http://user:hunter2@127.0.0.1:1", timeouts=QUICK).server_info()
    assert "hunter2" not in str(caught.value)


def ask(client: Client) -> object:
    return client.server_info()


def start(client: Client) -> object:
    return client.start_profile({"num_steps": 1})


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Client], object], str]] = {
    "404 everywhere": (
        {"answers": dict.fromkeys(("server_info", "get_server_info"), (404, ""))},
        ask,
        "neither /server",
    ),
    "not JSON": ({"answers": {"server_info": (200, "<html>")}}, ask, "not as an SGLang server"),
    "JSON of another service": ({"answers": {"server_info": (200, "[1]")}}, ask, "not as an SGLang server"),
    "500 with a reason": ({"answers": {"server_info": (500, "out of\nmemory")}}, ask, "HTTP 500: out of memory"),
    "hang": ({"hangs": {"server_info"}}, ask, "did not answer within 1 s"),
    "redirect": ({"answers": {"server_info": (307, "http://elsewhere/")}}, ask, "redirects /server_info to http://els"),
    "connection closed": ({"dies_in": "server_info"}, ask, "the connection broke"),
    "success false with 200": (
        {"answers": {"start_profile": (200, '{"success": false, "message": "already in progress"}')}},
        start,
        r"refused to start its profiler \(already in progress\).*stop_profile",
    ),
    "a bare 500": ({"answers": {"start_profile": (500, "Internal Server Error")}}, start, r"refused .*\(HTTP 500\)"),
    "a profiler that is not there": ({"answers": {"start_profile": (404, "")}}, start, "has no /start_profile"),
    "a start that never answers": ({"hangs": {"start_profile"}}, start, "/start_profile did not answer"),
    "a stop that never answers": ({"hangs": {"stop_profile"}}, Client.stop_profile, "did not answer within 1 s"),
}


@pytest.mark.parametrize(("behaviour", "act", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_protocol_is_one_line(behaviour: dict[str, Any], act: Callable[[Client], object], words: str):
    with StandIn(**behaviour) as server, client_of(server, api_key=KEY) as client:
        with pytest.raises(ServerError, match=words) as caught:
            act(client)
        assert str(caught.value).startswith(server.url)
        assert len(str(caught.value).splitlines()) == 1
        assert KEY not in repr(caught.value)
        assert caught.value.__cause__ is None  # httpx's own holds the request and with it the key


def test_a_redirected_start_is_not_repeated_as_a_profile_without_an_end():
    """A GET of /start_profile starts one with SGLang's defaults, and a 302 turns a POST into a GET."""
    with StandIn() as target, StandIn(answers={"start_profile": (302, f"{target.url}/start_profile")}) as server:
        with client_of(server) as client, pytest.raises(ServerError, match="redirects"):
            client.start_profile({"num_steps": 1})
        assert target.requests == []


def test_nothing_listening_is_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ServerGoneError, match="nothing answers there"):
            Client(f"http://127.0.0.1:{unused.getsockname()[1]}", timeouts=QUICK).server_info()


def test_a_server_that_speaks_no_http_is_one_line():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ServerError, match="did not answer"):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeouts=QUICK).server_info()


def test_503_while_a_trace_is_exported_is_waited_for():
    with StandIn() as server, client_of(server) as client:
        client.server_info()
        server.exporting_until = time.monotonic() + 0.7
        waited: list[float] = []
        client.wait_until_responsive(5, waited.append)
        assert waited
        assert client.responsive()


def test_an_export_longer_than_its_limit_is_one_line():
    with StandIn() as server, client_of(server) as client:
        server.exporting_until = time.monotonic() + 60
        with pytest.raises(ServerError, match="--export-timeout"):
            client.wait_until_responsive(0.5)


def test_a_server_that_dies_while_it_exports_is_not_waited_for():
    with StandIn() as server, client_of(server) as client:
        server.dies_in = "server_info"
        begin = time.monotonic()
        with pytest.raises(ServerGoneError, match="went away"):
            client.wait_until_responsive(60)
        assert time.monotonic() - begin < 10


def test_tls_with_an_authority_of_ones_own(tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with StandIn(certificate=(certificate, key)) as server:
        with pytest.raises(ServerError, match="--ca-file"):
            client_of(server).server_info()
        assert client_of(server, verify=certificate).server_info()["version"] == "0.5.17"
        assert client_of(server, verify=False).server_info()["version"] == "0.5.17"
        with pytest.raises(UsageError, match="--ca-file"):
            client_of(server, verify=tmp_path / "missing.pem")
    with StandIn() as plain, pytest.raises(ServerError, match="speaks no TLS"):
        Client(plain.url.replace("http://", "https://"), timeouts=QUICK).server_info()


PROMPT = {"input_ids": [[5, 6]], "sampling_params": {"max_new_tokens": 3}}


def test_a_stream_yields_what_comes_as_it_comes():
    with StandIn(token_seconds=0.2) as server, client_of(server) as client:
        came = [(time.monotonic(), event["meta_info"]["completion_tokens"]) for event in client.stream(PROMPT)]
    assert [tokens for _, tokens in came] == [1, 2, 3]
    assert came[1][0] - came[0][0] > 0.1


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        ('{"error": {"message": "input too long", "code": 400}}', RefusedError, "/generate failed: input too long"),
        ('{"error": {"message": "boom", "code": 500}}', ServerError, "/generate failed: boom"),
        ('{"error": "boom"}', ServerError, "/generate failed: boom"),
        ("no json", ServerError, "/generate failed: without a reason"),
    ],
)
def test_a_stream_that_fails_after_its_status_has_gone_out(event: str, kind: type[ServerError], words: str):
    with (
        StandIn(answers={"generate": (200, f"data: {event}\n\ndata: [DONE]\n\n")}) as server,
        client_of(server) as client,
        pytest.raises(ServerError, match=words) as raised,
    ):
        list(client.stream(PROMPT))
    assert type(raised.value) is kind


def test_a_stream_of_a_server_that_is_not_there_is_one_line():
    with StandIn(dies_in="generate") as server, client_of(server) as client, pytest.raises(ServerError, match="broke"):
        list(client.stream(PROMPT))


def test_every_error_of_a_server_exits_with_4():
    assert issubclass(ServerError, MlaDiagError)
    assert (ServerError.exit_code, ServerGoneError.exit_code) == (4, 4)
