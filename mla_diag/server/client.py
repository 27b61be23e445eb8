"""The HTTP protocol of an SGLang server (sglang/srt/entrypoints/http_server.py, 0.4.6 to 0.5.23).

A status alone says little there: a refused start of the profiler is 200 with `success: false` in some releases and a
bare 500 in others, and a server that exports a trace answers nothing, or 503, for minutes (sglang#34943, sglang#35115).
"""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx
import msgspec

from mla_diag.errors import RefusedError, ServerError, ServerGoneError, UsageError
from mla_diag.server.secrets import REDACTED, without_secrets

_SHOWN = 200  # characters of an answer that an error quotes
_EVENT, _LAST_EVENT = "data: ", "data: [DONE]"  # of a stream
_PAUSE = 0.5
_LAST_PORT = 65535
_POLL = 5.0
_NOT_A_REFUSAL = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)

OnWait = Callable[[float], None]
"""Called now and then with the seconds waited so far."""


class Timeouts(NamedTuple):
    """Seconds to wait for a server, each kind apart: a server that exports a trace is not one that is gone.

    Attributes:
        connect: For the connection.
        answer: For an answer that takes no work.
        generate: For requests of the load.
        export: While it exports its traces; 25 to 300 s are normal.
    """

    connect: float = 5.0
    answer: float = 10.0
    generate: float = 300.0
    export: float = 600.0


class Client:
    """A server at an address.

    The API key goes into the header of each request and nowhere else.

    Args:
        url: Its address; a path in it is kept as the base of every endpoint, and `http://` may be left out.
        api_key: For servers started with `--api-key`.
        verify: Whether to check the certificate, or the file of the authority that signed it.
        timeouts: How long to wait.

    Raises:
        UsageError: The address is none, or a key or file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        verify: bool | Path = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self._info_path = "server_info"
        self._base = _parse_url(url)
        self.url = _without_user(self._base)
        self._key = api_key
        headers = {}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise UsageError("--api-key: holds characters that no HTTP header can; check how it was copied")
            headers["Authorization"] = f"Bearer {api_key}"
        context: bool | ssl.SSLContext = verify is not False
        if isinstance(verify, Path):
            try:
                context = ssl.create_default_context(cafile=str(verify))
            except (OSError, ssl.SSLError) as error:
                raise UsageError(f"{verify}: no certificates can be read from it ({error}); check --ca-file") from error
        # A proxy for the internet is in the way of an address on this host. No redirect is followed: it would turn the
        # POST of /start_profile into a GET without its body, which SGLang takes for a profile without an end.
        self._http = httpx.Client(headers=headers, verify=context, trust_env=not self.is_local)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._http.close()

    @property
    def is_local(self) -> bool:
        """Whether the address is this host's own; a container behind it may still have its own disk."""
        host = self._base.host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

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
            answer = _decoded(response)
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
        answer = _decoded(response) if response.is_success else None
        return answer if isinstance(answer, dict) else None

    def responsive(self) -> bool:
        """Whether the scheduler answers; it does not while it exports a trace, though its HTTP process still may.

        Raises:
            ServerGoneError: Nothing listens at the address any more.
        """
        try:
            return self._http.get(self._endpoint(self._info_path), timeout=self._timeout(_POLL)).is_success
        except httpx.ConnectError:
            raise ServerGoneError(f"{self.url}: went away; its log says why") from None
        except (httpx.HTTPError, RuntimeError):
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
        return _decoded(response)

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
                event = _parsed(line.removeprefix(_EVENT).encode())
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
        """Have an idle server forget its prefixes.

        Raises:
            ServerError: It runs requests, or does not answer.
        """
        self._check(self._send("POST", "flush_cache", self.timeouts.answer), "flush_cache")

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

    def _endpoint(self, path: str) -> str:
        return f"{str(self._base).rstrip('/')}/{path}"

    def _timeout(self, answer: float) -> httpx.Timeout:
        return httpx.Timeout(answer, connect=self.timeouts.connect)

    def _send(self, method: str, path: str, answer: float, body: Mapping[str, Any] | None = None) -> httpx.Response:
        with self._explained(path, answer):
            return self._http.request(method, self._endpoint(path), json=body, timeout=self._timeout(answer))

    @contextmanager
    def _explained(self, path: str, answer: float) -> Iterator[None]:
        """Turn what can go wrong with a request into one line."""
        # The errors of httpx can hold the request and with it the key, so none of them is chained.
        try:
            yield
            return
        except httpx.ConnectTimeout:
            problem = f"no connection within {self.timeouts.connect:g} s; check the host and what lies between"
        except httpx.TimeoutException:
            problem = f"/{path} did not answer within {answer:g} s; the server may be busy, hung, or no SGLang server"
        except httpx.ConnectError as error:
            raise ServerGoneError(f"{self.url}: {_connect_problem(str(error))}") from None
        except httpx.HTTPError as error:
            problem = f"/{path}: the connection broke ({_one_line(str(error)) or type(error).__name__}); is it up?"
        except RuntimeError:  # the client was closed meanwhile
            problem = f"/{path}: given up"
        raise ServerError(f"{self.url}: {problem}") from None

    def _check(self, response: httpx.Response, path: str) -> None:
        """Raise for any answer that is an error."""
        status = response.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            given = "refuses this API key" if self._key else "wants an API key"
            raise RefusedError(
                f"{self.url}: {given} (HTTP {status}); give the server's with --api-key or MLA_DIAG_API_KEY"
            )
        if response.is_redirect:
            target = self._hidden(_one_line(response.headers.get("location", "nowhere")))
            raise RefusedError(f"{self.url}: redirects /{path} to {target}; give that server as --url")
        if status == httpx.codes.NOT_FOUND:
            raise RefusedError(f"{self.url}: has no /{path} (HTTP 404); check the port and the path of --url")
        if not response.is_success:
            said = self._hidden(_one_line(response.text)) or "without a reason"
            kind = RefusedError if status == httpx.codes.BAD_REQUEST else ServerError
            raise kind(f"{self.url}: /{path} failed with HTTP {status}: {said}")

    def _stream_error(self, event: Any) -> ServerError:
        """What a stream says once its status has gone out as 200."""
        error = event.get("error") if isinstance(event, dict) else None
        details = error if isinstance(error, dict) else {}
        said = self._hidden(_one_line(str(details.get("message") or error or ""))) or "without a reason"
        kind = RefusedError if details.get("code") == httpx.codes.BAD_REQUEST else ServerError
        return kind(f"{self.url}: /generate failed: {said}")

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, REDACTED) if self._key else text


def _parse_url(url: str) -> httpx.URL:
    text = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, TypeError, ValueError):
        raise UsageError("--url: not an address; write http://HOST:PORT, with a path if the server has one") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 1) > _LAST_PORT:
        raise UsageError("--url: not an address of a server; write http://HOST:PORT or https://HOST:PORT/PATH")
    return parsed.copy_with(query=None, fragment=None)


def _without_user(url: httpx.URL) -> str:
    return str(url.copy_with(userinfo=b"")).rstrip("/")


def _connect_problem(message: str) -> str:
    if "CERTIFICATE" in message.upper():
        return "its certificate is not trusted; give the authority's with --ca-file, or --insecure to trust anything"
    if "SSL" in message.upper() or "TLS" in message.upper():
        return "speaks no TLS; write http:// instead of https://, or check the port"
    if "Name or service" in message or "getaddrinfo" in message or "nodename" in message:
        return "no such host; check --url"
    return f"nothing answers there ({_one_line(message)}); check the host and port, and that the server is up"


def _decoded(response: httpx.Response) -> Any:
    return _parsed(response.content)


def _parsed(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _refusal(response: httpx.Response) -> str | None:
    """Why a request to the profiler was refused: in the body even where the status says that all is well."""
    answer = _decoded(response)
    said = answer if isinstance(answer, dict) else {}
    if response.is_success and said.get("success", True) is not False:
        return None
    message = said.get("message") or said.get("detail") or said.get("error")
    return _one_line(str(message)) if message else f"HTTP {response.status_code}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
