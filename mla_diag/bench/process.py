"""A server of our own: started from a command line, waited for, and ended with all of its processes."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mla_diag.bench.start import kill_session, signal_session, start_session
from mla_diag.errors import ServerError, UsageError
from mla_diag.server.capture import Say
from mla_diag.server.client import Client
from mla_diag.server.connection import LAST_PORT, one_line
from mla_diag.server.secrets import command_without_secrets, text_without_secrets

__all__ = ["ServerCommand", "ServerProcess"]

_DEFAULT_PORT = 30000  # SGLang's
_EVERYWHERE = ("0.0.0.0", "::", "")
_PAUSE = 0.5
# What SGLang takes to end its schedulers when it is asked to, and to be gone when it is killed; seconds.
_TERM_SECONDS, _KILL_SECONDS = 30.0, 15.0
# A server whose last word for so long is a traceback will not come: some live on without their scheduler.
_SILENT_SECONDS = 30.0
_LAST_WORDS = 4  # lines from a traceback's exception on
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?:: .*)?$")
_KEPT = 1 << 20  # bytes of a log's end that are read


@dataclass(frozen=True)
class ServerCommand:
    """A command line that serves.

    Attributes:
        argv: The program and its arguments.
        environment: Variables that stand before the program, as in a shell.
        host: Where its server can be reached from here.
        port: Its port.
        api_key: Of its `--api-key`.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    api_key: str | None

    @classmethod
    def parse(cls, text: str) -> ServerCommand:
        """Take a command line apart; `--port`, `--host` and `--api-key` are read as SGLang has them.

        Raises:
            UsageError: It is none, its program does not exist, or its port is no port.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--serve: not a command line ({error}); check its quotes") from error
        environment = {}
        while words and (assignment := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
            environment[assignment[1]] = assignment[2]
            words = words[1:]
        if not words:
            raise UsageError('--serve: no program in it; write --serve "python -m sglang.launch_server --model ..."')
        if shutil.which(words[0], path=environment.get("PATH", os.environ.get("PATH"))) is None:
            raise UsageError(f"--serve: {words[0]}: no such program; give its path")
        port = _option(words, "--port") or str(_DEFAULT_PORT)
        if not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
            raise UsageError(f"--serve: --port {port}: not a port")
        host = _option(words, "--host") or ""
        reached = "127.0.0.1" if host in _EVERYWHERE else host
        return cls(tuple(words), environment, reached, int(port), _option(words, "--api-key"))

    @property
    def url(self) -> str:
        """Its server's address."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """All of its environment."""
        return {**os.environ, **self.environment}

    def python(self) -> str | None:
        """The Python that it runs; None if that is not to be seen in it, as in a script's name."""
        for number, word in enumerate(self.argv):
            found = shutil.which(word, path=self.variables.get("PATH"))
            if found is None:
                continue
            if re.fullmatch(r"python[\d.]*", Path(word).name):
                return found
            beside = Path(found).with_name("python")
            if number == 0 and Path(word).name == "sglang" and beside.exists():
                return str(beside)
        return None

    def __str__(self) -> str:
        """The command line without its secrets."""
        return command_without_secrets([*(f"{name}={value}" for name, value in self.environment.items()), *self.argv])


class ServerProcess:
    """A running server, in a session of its own; leaving the block leaves nothing of it.

    Args:
        command: What to run.
        log: The file that its output goes to.

    Raises:
        ServerError: On entering the block: its port is in use.
        UsageError: Likewise: the log cannot be written, or the program not run.
    """

    _process: subprocess.Popen[bytes]

    def __init__(self, command: ServerCommand, log: Path) -> None:
        self.log = log
        self._command = command

    def __enter__(self) -> ServerProcess:
        command = self._command
        if not _is_free(command.port):
            raise ServerError(
                f"port {command.port} is in use; stop what listens there, or give the server another with --port"
            )
        try:
            with self.log.open("wb") as output:
                self._process = start_session(
                    command.argv,
                    env=command.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            raise UsageError(f"{error.filename or self.log}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except ServerError:
            if error is None:  # else what went wrong first is what its user must know
                raise

    @property
    def pid(self) -> int:
        """Of its first process, and of the group of all."""
        return self._process.pid

    def wait_until_ready(self, client: Client, limit: float, say: Say) -> None:
        """Wait until the server takes requests.

        Args:
            client: For its address.
            limit: Seconds.
            say: Told what is being waited for.

        Raises:
            ServerError: It ended, failed, or did not answer in that time; the message has its log's word on why.
        """
        start = time.monotonic()
        while not client.is_ready():
            waited = time.monotonic() - start
            status = self._process.poll()
            if status is not None:
                how = f"with status {status}" if status >= 0 else f"of signal {-status}"
                raise ServerError(f"the server ended {how} before it answered: {self.last_word()}")
            if self._failed():
                raise ServerError(f"the server failed while it started: {self.last_word()}")
            if waited > limit:
                raise ServerError(
                    f"{client.url}: no answer within {limit:.0f} s of the start (--ready-timeout waits longer): "
                    f"{self.last_word()}"
                )
            say(f"the server starts, {waited:.0f} s (log: {self.log})")
            time.sleep(_PAUSE)

    def last_word(self) -> str:
        """The line of the log that says most about an end, and where the log is."""
        lines = self._lines()
        line = _exception(lines) or next((line.strip() for line in reversed(lines) if line.strip()), None)
        said = "it wrote nothing" if line is None else one_line(text_without_secrets(line))
        return f"{said} (log: {self.log})"

    def logged(self, text: str) -> list[str]:
        """What its log's lines with a text say from there on, each once."""
        found = (line[line.index(text) :].strip() for line in self._lines() if text in line)
        return list(dict.fromkeys(found))

    def stop(self) -> None:
        """End all processes of the server: asked first, killed if they stay, at once if this is interrupted.

        Raises:
            ServerError: Its port is in use still.
        """
        try:
            signal_session(self._process, signal.SIGTERM)
            self._wait_for_end(_TERM_SECONDS)
        finally:
            kill_session(self._process)
            self._wait_for_end(_KILL_SECONDS)
        deadline = time.monotonic() + _KILL_SECONDS
        while not _is_free(self._command.port):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"port {self._command.port} is in use after the server was ended: a process that it started in a "
                    "session of its own may be left; end it by hand"
                )
            time.sleep(_PAUSE)

    def _wait_for_end(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._process.poll() is None or any(_living(self.pid)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _failed(self) -> bool:
        """Whether an exception is the last that came, a while ago."""
        if time.time() - self.log.stat().st_mtime < _SILENT_SECONDS:
            return False
        lines = [line for line in self._lines() if line.strip()]
        start = next((number for number in reversed(range(len(lines))) if _TRACEBACK in lines[number]), None)
        if start is None:
            return False
        return sum(not line.startswith((" ", "\t")) for line in lines[start + 1 :]) <= _LAST_WORDS

    def _lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _KEPT))
            return file.read().decode("utf-8", "replace").splitlines()


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option, the last of several; `--name value` or `--name=value`."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.removeprefix(f"{name}=")
    return found


def _is_free(port: int) -> bool:
    """Whether nothing listens at a port, at whatever address of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else closed connections count, for a minute
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _living(group: int) -> Iterator[int]:
    """The processes of a group that still run; those that ended and were not yet asked how are not among them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, can hold anything; state, parent and group follow it.
            state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                yield int(stat.parent.name)


def _exception(lines: Sequence[str]) -> str | None:
    """The exception of a log's first traceback; those after it are mostly its consequences."""
    start = next((number for number, line in enumerate(lines) if _TRACEBACK in line), None)
    if start is None:
        return None
    for line in lines[start + 1 :]:
        if _EXCEPTION.match(line):
            return line.strip()
    return None
