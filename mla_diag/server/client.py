"""The HTTP protocol of an SGLang server (sglang/srt/entrypoints/http_server.py, 0.4.6 to 0.5.23).

A status alone says little there: a refused start of the profiler is 200 with `success: false` in some releases and a
bare 500 in others, and a server that exports a trace answers nothing, or 503, for minutes (sglang#34943, sglang#35115).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from mla_diag.errors import RefusedError, ServerError, ServerGoneError
from mla_diag.server.connection import Connection, decoded, one_line, parsed
from mla_diag.server.secrets import without_secrets

_EVENT, _LAST_EVENT = "data: ", "data: [DONE]"  # of a stream
_PAUSE = 0.5  # seconds from one look to the next
_POLL = 5.0  # seconds that a look waits for its answer
_SETTLING = 5.0  # seconds that a scheduler may take for the step that it runs past the last one answered
_NOT_A_REFUSAL = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)

OnWait = Callable[[float], None]
"""Called now and then with the seconds waited so far."""


class Client(Connection):
    """A server at an address; see `Connection` for what makes one."""

    # The endpoint that server_info found, for what asks only whether the server answers.
    _info_path = "server_info"

    def server_info(self) -> dict[str, Any]:
        """What the server says of itself, at `/server_info` or, before 0.5, `/get_server_info`; secrets left out.

        Raises:
            ServerError: Nothing answers, or no SGLang server does.
        """
        for path in ("server_info", "get_server_info"):
            response = self._send("GET", path, self.timeouts.answer)
            if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                continue
            self._check(response, path)
            answer = decoded(response)
            if not isinstance(answer, dict):
                raise ServerError(f"{self.url}: answers /{path}, but not as an SGLang server does; check the port")
            info = without_secrets(answer, self._key)
            assert isinstance(info, dict)
            self._info_path = path
            return info
        raise ServerError(
            f"{self.url}: answers, but has neither /server_info nor /get_server_info; check the port and the path"
        )

    def optional(self, path: str) -> dict[str, Any] | None:
        """The answer of an endpoint that not every release has; None where there is none.

        Raises:
            ServerError: Nothing answers.
        """
        response = self._send("GET", path, self.timeouts.answer)
        answer = decoded(response) if response.is_success else None
        return answer if isinstance(answer, dict) else None

    def responsive(self) -> bool:
        """Whether the scheduler answers; it does not while it exports a trace, though its HTTP process still may.

        Raises:
            ServerGoneError: Nothing listens at the address any more.
        """
        try:
            return self._send("GET", self._info_path, _POLL).is_success
        except ServerGoneError:
            raise ServerGoneError(f"{self.url}: went away; its log says why") from None
        except ServerError:
            return False

    def is_ready(self) -> bool:
        """Whether a server that is starting takes requests: it answers for itself, and calls itself healthy.

        Raises:
            RefusedError: It answers, but not to us.
        """
        try:
            self.server_info()
            # Says 503 until the server's own warm-up is through; releases without that say 200 or have none.
            return self._send("GET", "health", self.timeouts.answer).status_code < httpx.codes.INTERNAL_SERVER_ERROR
        except RefusedError:
            raise
        except ServerError:
            return False

    def wait_until_responsive(self, limit: float, on_wait: OnWait | None = None) -> None:
        """Wait while the server answers nothing or 503, as it does while it exports a trace.

        Args:
            limit: Seconds.
            on_wait: Told how long it has been.

        Raises:
            ServerError: It was still silent after that time, or has gone.
        """
        start = time.monotonic()
        while not self.responsive():
            waited = time.monotonic() - start
            if waited > limit:
                raise ServerError(
                    f"{self.url}: silent for {waited:.0f} s after the capture; it may still be exporting "
                    "(--export-timeout waits longer), or hang"
                )
            if on_wait is not None:
                on_wait(waited)
            time.sleep(_PAUSE)

    def generate(self, request: Mapping[str, Any]) -> Any:
        """Run some prompts and wait for all their tokens.

        Raises:
            ServerError: The server refused or did not finish them.
        """
        response = self._send("POST", "generate", self.timeouts.generate, request)
        self._check(response, "generate")
        return decoded(response)

    def stream(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run some prompts and yield what comes of them as it comes; of several, `index` says whose it is.

        Raises:
            ServerError: The server refused or did not finish them.
        """
        timeout = self._timeout(self.timeouts.generate)
        with (
            self._explained("generate", self.timeouts.generate),
            self._http.stream(
                "POST", self._endpoint("generate"), json={**request, "stream": True}, timeout=timeout
            ) as response,
        ):
            if not response.is_success:
                response.read()
            self._check(response, "generate")
            for line in response.iter_lines():
                if not line.startswith(_EVENT) or line == _LAST_EVENT:
                    continue
                event = parsed(line.removeprefix(_EVENT).encode())
                if not isinstance(event, dict) or "error" in event:
                    raise self._stream_error(event)
                yield event

    def abort(self, request_id: str) -> None:
        """Stop one prompt of `generate`; says nothing if that fails, because it is only kind to."""
        try:
            self._send("POST", "abort_request", self.timeouts.connect, {"rid": request_id})
        except ServerError:
            return

    def flush_cache(self) -> None:
        """Have a server forget its prefixes, as soon as it runs nothing any more.

        Raises:
            RefusedError: It goes on running requests, or lets only its admin do that.
            ServerError: It does not answer.
        """
        deadline = time.monotonic() + _SETTLING
        while True:
            response = self._send("POST", "flush_cache", self.timeouts.answer)
            if response.status_code != httpx.codes.BAD_REQUEST or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        self._check(response, "flush_cache")

    def start_profile(self, request: Mapping[str, Any]) -> None:
        """Start the profiler, or have it start with the next step.

        Raises:
            RefusedError: The server refused, as it does while it is profiling.
            ServerError: It is not known whether it started.
        """
        response = self._send("POST", "start_profile", self.timeouts.answer, request)
        if response.is_redirect or response.status_code in _NOT_A_REFUSAL:
            self._check(response, "start_profile")
        refusal = _refusal(response)
        if refusal is not None:
            raise RefusedError(
                f"{self.url}: refused to start its profiler ({self._hidden(refusal)}); if it is profiling already, "
                f"wait for that, or end it with `curl -X POST {self.url}/stop_profile`; else its log says why"
            )

    def stop_profile(self) -> bool:
        """Stop the profiler and wait until it has written its traces; False if it was not running.

        Raises:
            ServerError: The server did not answer in the time for exports.
        """
        return _refusal(self._send("POST", "stop_profile", self.timeouts.export)) is None

    def _stream_error(self, event: Any) -> ServerError:
        """What a stream says once its status has gone out as 200."""
        error = event.get("error") if isinstance(event, dict) else None
        details = error if isinstance(error, dict) else {}
        said = self._hidden(one_line(str(details.get("message") or error or ""))) or "without a reason"
        kind = RefusedError if details.get("code") == httpx.codes.BAD_REQUEST else ServerError
        return kind(f"{self.url}: /generate failed: {said}")


def _refusal(response: httpx.Response) -> str | None:
    """Why a request to the profiler was refused: in the body even where the status says that all is well."""
    answer = decoded(response)
    said = answer if isinstance(answer, dict) else {}
    if response.is_success and said.get("success", True) is not False:
        return None
    message = said.get("message") or said.get("detail") or said.get("error")
    return one_line(str(message)) if message else f"HTTP {response.status_code}"
