"""Requests to a server at an address, and one line for whatever goes wrong with them."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from mla_diag.errors import RefusedError, ServerError, ServerGoneError, UsageError
from mla_diag.server.secrets import REDACTED

_SHOWN = 200  # characters of an answer that an error quotes
LAST_PORT = 65535

Entered = TypeVar("Entered", bound="Connection")


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


class Connection:
    """An address, and how it is reached.

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

    def __enter__(self: Entered) -> Entered:
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
            problem = f"/{path}: the connection broke ({one_line(str(error)) or type(error).__name__}); is it up?"
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
            target = self._hidden(one_line(response.headers.get("location", "nowhere")))
            raise RefusedError(f"{self.url}: redirects /{path} to {target}; give that server as --url")
        if status == httpx.codes.NOT_FOUND:
            raise RefusedError(f"{self.url}: has no /{path} (HTTP 404); check the port and the path of --url")
        if not response.is_success:
            said = self._hidden(one_line(response.text)) or "without a reason"
            kind = RefusedError if status == httpx.codes.BAD_REQUEST else ServerError
            raise kind(f"{self.url}: /{path} failed with HTTP {status}: {said}")

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, REDACTED) if self._key else text


def _parse_url(url: str) -> httpx.URL:
    text = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, TypeError, ValueError):
        raise UsageError("--url: not an address; write http://HOST:PORT, with a path if the server has one") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 1) > LAST_PORT:
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
    return f"nothing answers there ({one_line(message)}); check the host and port, and that the server is up"


def decoded(response: httpx.Response) -> Any:
    """The JSON of an answer; None where it is none."""
    return parsed(response.content)


def parsed(text: bytes) -> Any:
    """What some JSON says; None where it is none."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def one_line(text: str) -> str:
    """A text as errors quote it: without line breaks, and not all of a long one."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
