"""A small HTTP server that keeps SGLang's protocol and can be told to break it in each way that was reported.

It is real HTTP on a real port. What it profiles is recordings: their files are written where and when SGLang would.
As a program, `python stand_in.py --port PORT ATTRIBUTES`, it takes its attributes as JSON and runs until it is ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

INFO: dict[str, Any] = {
    "version": "0.5.17",
    "model_path": "/nonexistent/model",
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "flashinfer",
    "max_total_num_tokens": 495_552,
    "page_size": 1,
    "tp_size": 1,
    "dp_size": 1,
    "api_key": "sk-of-the-server",
    "ssl_keyfile_password": "hunter2",
    "device": "cuda",
    "internal_states": [{"max_total_num_tokens": 495_552, "disable_chunked_prefix_cache": False}],
}


@dataclass
class StandIn:
    """The server and what it is to do; use as a context manager.

    Attributes:
        info: What it says of itself.
        base: The path before every endpoint.
        key: The API key that it wants, if any.
        answers: Status and body instead of what an endpoint would answer.
        hangs: Endpoints that never answer.
        traces: What a profile writes, by the rest of the name after the id: `TP-0-DECODE`.
        export_seconds: How long it answers 503 to everything when the steps have run.
        dies_in: Endpoint at whose first request it goes away.
        lingers: Whether a wave goes on after its profile, until it is aborted.
        old: Whether only /get_server_info is known.
        port: Where it listens; 0 for any.
        token_seconds: What a decode step takes.
        prefill_seconds: What a prefill takes.
        together: Requests of a wave that it runs at once; the others wait for their end. 0 for all.
        most_tokens: New tokens that a request gets at most.
        cached: First tokens of the prompts in its prefix cache.
        certificate: For TLS.
        requests: What it was asked: method, path, headers, body.
    """

    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    base: str = ""
    key: str | None = None
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    traces: dict[str, Path] = field(default_factory=dict)
    export_seconds: float = 0.0
    dies_in: str | None = None
    lingers: bool = False
    old: bool = False
    port: int = 0
    token_seconds: float = 0.0
    prefill_seconds: float = 0.0
    together: int = 0
    most_tokens: int = 1 << 20
    cached: set[int] = field(default_factory=set)
    certificate: tuple[Path, Path] | None = None
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    profile: dict[str, Any] | None = None
    exporting_until: float = 0.0

    def __enter__(self) -> StandIn:
        self._gone = threading.Event()
        self._aborted = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Else the kernel holds each answer's body back for 40 ms, until its head is acknowledged.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                stand_in.handle(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                stand_in.handle(self, json.loads(self.rfile.read(length) or b"null"))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}{self.base}"

    def asked(self, endpoint: str) -> list[Any]:
        """The bodies that an endpoint was sent."""
        return [body for _, path, _, body in self.requests if path == f"{self.base}/{endpoint}"]

    def handle(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self.requests.append((handler.command, handler.path, dict(handler.headers.items()), body))
        endpoint = handler.path.removeprefix(f"{self.base}/") if handler.path.startswith(f"{self.base}/") else ""
        if endpoint == self.dies_in:
            threading.Thread(target=self.__exit__, daemon=True).start()
            handler.close_connection = True
            time.sleep(0.05)
            return
        if endpoint in self.hangs:
            self._gone.wait(60)
            handler.close_connection = True
            return
        status, text = self._answer(endpoint, handler.headers.get("Authorization"), body)
        if endpoint == "generate" and status == 200 and body.get("stream") and endpoint not in self.answers:
            self._stream(handler, body)
            return
        handler.send_response(status)
        if status in (301, 302, 307, 308):
            handler.send_header("Location", text)
        data = text.encode()
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _answer(self, endpoint: str, authorization: str | None, body: Any) -> tuple[int, str]:
        if endpoint in self.answers:
            return self.answers[endpoint]
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, '{"error": "Unauthorized"}'
        if time.monotonic() < self.exporting_until:
            return 503, ""
        if endpoint == ("get_server_info" if self.old else "server_info"):
            return 200, json.dumps(self.info)
        action = {
            "start_profile": lambda: self._start(body),
            "stop_profile": self._stop,
            "generate": lambda: self._generate(body),
            "abort_request": self._abort,
            "flush_cache": self._flush,
        }.get(endpoint)
        return action() if action is not None else (404, '{"detail": "Not Found"}')

    def _start(self, body: dict[str, Any]) -> tuple[int, str]:
        if self.profile is not None and self.profile.get("running"):
            return 500, "Internal Server Error"
        self.profile = dict(body)
        return 200, "Start profiling.\n"

    def _stop(self) -> tuple[int, str]:
        if self.profile is None or not self.profile.get("running"):
            return 500, "Internal Server Error"
        self._write(["TP-0"])
        return 200, "Stop profiling. This will take some time.\n"

    def _generate(self, body: dict[str, Any]) -> tuple[int, str]:
        """Run a wave; one of several tokens has the steps that a profile waits for."""
        prompts = body["input_ids"]
        armed = self.profile is not None and self.profile.get("start_step", 0) < 1000
        if armed and body["sampling_params"]["max_new_tokens"] > 1:
            self._write(self.traces)
            if self.lingers:
                self._aborted.wait(60)
        return 200, json.dumps([{"output_ids": [1]} for _ in prompts])

    def _stream(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Send the tokens of a wave as its steps would yield them; the end of the connection ends the stream."""
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        firsts = [prompt[0] for prompt in body["input_ids"]]
        hits = [int(first in self.cached) for first in firsts]
        self.cached.update(firsts)
        count = len(firsts)
        tokens = min(body["sampling_params"]["max_new_tokens"], self.most_tokens)
        for first in range(0, count, self.together or count):
            time.sleep(self.prefill_seconds)
            for token in range(1, tokens + 1):
                time.sleep(self.token_seconds if token > 1 else 0)
                for index in range(first, min(first + (self.together or count), count)):
                    told = {"completion_tokens": token, "cached_tokens": hits[index]}
                    event = {"index": index, "meta_info": told}
                    handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True

    def _flush(self) -> tuple[int, str]:
        self.cached.clear()
        return 200, "Cache flushed.\n"

    def _abort(self) -> tuple[int, str]:
        self._aborted.set()
        return 200, ""

    def _write(self, names: Iterable[str]) -> None:
        assert self.profile is not None
        folder = Path(self.profile["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(self.traces[name], folder / f"1795971432.25-{name}.trace.json.gz")
        self.profile = None
        self.exporting_until = time.monotonic() + self.export_seconds


def main() -> None:
    """Serve until SIGTERM, and log what is posted.

    `fixed` among the attributes has those of a fixed SGLang, `says` has lines for the log.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sglang", type=Path, help="where a fix is looked for")
    parser.add_argument("--host")
    parser.add_argument("--api-key")
    parser.add_argument("attributes", type=json.loads, nargs="?", default={})
    given = parser.parse_args()
    fixed = given.attributes.pop("fixed", {})
    if given.sglang is not None and (given.sglang / ".mla-diag").is_dir():
        given.attributes.update(fixed)
    print(*given.attributes.pop("says", []), sep="\n")
    attributes = {"key": given.api_key, **given.attributes, "port": given.port}
    attributes["traces"] = {name: Path(path) for name, path in attributes.get("traces", {}).items()}
    with StandIn(**attributes) as server:
        print("The server is fired up and ready to roll!", flush=True)
        logged = 0
        while True:
            for method, path, *_ in server.requests[logged:]:
                logged += 1
                if method == "POST":
                    print(method, path, flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
