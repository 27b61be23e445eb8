"""A server of our own is started, waited for and ended, all of it, whatever it does; what went wrong is one line."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mla_diag.bench import process
from mla_diag.bench.process import ServerCommand, ServerProcess
from mla_diag.errors import RefusedError, ServerError, UsageError
from mla_diag.server.client import Client
from tests.server import stand_in

pytestmark = pytest.mark.usefixtures("_impatient")

STAND_IN = f"{sys.executable} {stand_in.__file__}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Whether a server is at a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def script(tmp_path: Path, body: str) -> str:
    """A command that runs a Python program, told a free port."""
    (tmp_path / "serve.py").write_text(body)
    return f"{sys.executable} {tmp_path}/serve.py --port {free_port()}"


@contextmanager
def started(command_line: str, tmp_path: Path, limit: float = 20, key: str | None = None) -> Iterator[ServerProcess]:
    command = ServerCommand.parse(command_line)
    with ServerProcess(command, tmp_path / "server.log") as server, Client(command.url, api_key=key) as client:
        server.wait_until_ready(client, limit, lambda _: None)
        yield server


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked how it ended counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_command_line_is_taken_apart():
    command = ServerCommand.parse("CUDA_VISIBLE_DEVICES=1 env python -m sglang.launch_server --port 1 --port=31000")
    assert command.argv[:2] == ("env", "python")
    assert command.variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert (command.url, command.api_key) == ("http://127.0.0.1:31000", None)
    assert ServerCommand.parse("env").url == "http://127.0.0.1:30000"
    assert ServerCommand.parse("env --host 0.0.0.0").host == "127.0.0.1"
    assert ServerCommand.parse("env --host ::1").url == "http://[::1]:30000"


def test_its_key_is_used_and_not_shown():
    for text in ("env --api-key sk-secret --port 5", "env --api-key=sk-secret --port 5"):
        command = ServerCommand.parse(text)
        assert command.api_key == "sk-secret"
        assert "sk-secret" not in str(command)
        assert str(command).endswith("--port 5")


def test_the_python_of_a_command_is_found(tmp_path: Path):
    for name in ("python", "sglang"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    python = str(tmp_path / "python")
    assert ServerCommand.parse(f"{python} -m sglang.launch_server").python() == python
    assert ServerCommand.parse(f"A=1 env B=2 {python} -m sglang.launch_server").python() == python
    assert ServerCommand.parse(f"{tmp_path}/sglang serve --model-path python").python() == python
    assert ServerCommand.parse("env --port 5").python() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no program in it"),
        ("A=1", "no program in it"),
        ("python 'x", "not a command line"),
        ("no-such-program-here --port 5", "no-such-program-here: no such program"),
        ("env --port 99999", "--port 99999: not a port"),
        ("env --port x", "--port x: not a port"),
    ],
)
def test_a_command_line_that_is_none_is_refused(text: str, words: str):
    with pytest.raises(UsageError, match=words):
        ServerCommand.parse(text)


def test_a_server_is_waited_for_and_its_port_is_free_afterwards(tmp_path: Path):
    port = free_port()
    with started(f"{STAND_IN} --port {port}", tmp_path), Client(f"127.0.0.1:{port}") as client:
        assert client.server_info()["version"] == "0.5.17"
    assert not listening(port)
    assert "fired up" in (tmp_path / "server.log").read_text()


def test_a_server_that_is_not_healthy_yet_is_not_ready(tmp_path: Path):
    line = f"""{STAND_IN} --port {free_port()} '{{"answers": {{"health": [503, ""]}}}}'"""
    with (
        pytest.raises(ServerError, match=r"no answer within 2 s .*--ready-timeout.*fired up"),
        started(line, tmp_path, limit=2),
    ):
        pass


def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path):
    with stand_in.StandIn() as other:
        port = other.url.rpartition(":")[2]
        with (
            pytest.raises(ServerError, match=f"port {port} is in use; stop what listens there"),
            started(f"{STAND_IN} --port {port}", tmp_path),
        ):
            pass
    assert not (tmp_path / "server.log").exists()


def test_a_server_that_wants_another_key_is_not_waited_for(tmp_path: Path):
    with (
        pytest.raises(RefusedError, match="refuses this API key"),
        started(f"{STAND_IN} --port {free_port()} --api-key a", tmp_path, key="b"),
    ):
        pass


DYING = {
    "an exception": ("raise RuntimeError('no memory')", r"ended with status 1 .*: RuntimeError: no memory \(log: "),
    "a message": ("import sys; sys.exit('error: unknown option --foo')", r"status 1 .*: error: unknown option --foo"),
    "a signal": ("import os; os.kill(os.getpid(), 9)", r"of signal 9 .*: it wrote nothing"),
    "the first of several": (
        "import sys\n"
        "print('[12:00 TP0] Scheduler hit an exception: Traceback (most recent call last):')\n"
        "print('  File \"a.py\", line 1, in <module>\\ntorch.OutOfMemoryError: CUDA out of memory')\n"
        "print('[12:01] Received sigquit from a child process.')\n"
        "raise EOFError",
        "torch.OutOfMemoryError: CUDA out of memory",
    ),
}


def test_a_server_that_dies_of_an_option_is_quoted_without_its_key(tmp_path: Path):
    body = "import sys; sys.exit(f'error: unrecognized arguments: {sys.argv[3]} {sys.argv[4]}')"
    line = f"{script(tmp_path, body)} --admin-api-key hunter2"
    with (
        pytest.raises(ServerError, match=r"unrecognized arguments: --admin-api-key \.\.\. \(log: "),
        started(line, tmp_path),
    ):
        pass


@pytest.mark.parametrize(("body", "words"), DYING.values(), ids=DYING.keys())
def test_a_server_that_dies_is_one_line_with_its_reason(tmp_path: Path, body: str, words: str):
    with pytest.raises(ServerError, match=words) as raised, started(script(tmp_path, body), tmp_path):
        pass
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "server.log") in str(raised.value)


def test_a_server_that_lives_on_after_a_traceback_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.5)
    body = "import time, traceback\ntry:\n    {}['x']\nexcept KeyError:\n    traceback.print_exc()\ntime.sleep(600)"
    with (
        pytest.raises(ServerError, match="failed while it started: KeyError: 'x'"),
        started(script(tmp_path, body), tmp_path),
    ):
        pass


def test_a_traceback_that_a_server_got_over_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A compiler that runs before the first answer is silent for minutes."""
    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.2)
    body = (
        "import sys, time, traceback\ntry:\n    {}['x']\nexcept KeyError:\n    traceback.print_exc()\n"
        "for step in range(6):\n    print('loading', step, file=sys.stderr)\ntime.sleep(1.5)\n"
        f"sys.path.insert(0, {str(Path(stand_in.__file__).parent)!r})\nimport stand_in\nstand_in.main()\n"
    )
    with started(script(tmp_path, body), tmp_path):
        assert "KeyError" in (tmp_path / "server.log").read_text()


def test_all_processes_are_ended_also_those_that_ignore_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_TERM_SECONDS", 0.5)
    body = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
sys.path.insert(0, {str(Path(stand_in.__file__).parent)!r})
import stand_in
stand_in.main()
"""
    with started(script(tmp_path, body), tmp_path):
        child = int((tmp_path / "child").read_text())
        assert not gone(child)
    assert gone(child)


def test_children_that_outlive_the_server_are_ended(tmp_path: Path):
    """A scheduler whose server crashed holds the GPU's memory."""
    body = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
sys.exit("crashed")
"""
    with pytest.raises(ServerError, match="crashed"), started(script(tmp_path, body), tmp_path):
        pass
    assert gone(int((tmp_path / "child").read_text()))


def test_a_port_that_stays_in_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_KILL_SECONDS", 0.5)
    port = free_port()
    body = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, {stand_in.__file__!r}, "--port", "{port}"], start_new_session=True)
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    (tmp_path / "serve.py").write_text(body)
    try:
        with (
            pytest.raises(ServerError, match=f"port {port} is in use after the server was ended"),
            started(f"{sys.executable} {tmp_path}/serve.py --port {port}", tmp_path),
        ):
            pass
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)


def test_an_interrupted_stop_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    body = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"sys.path.insert(0, {str(Path(stand_in.__file__).parent)!r})\nimport stand_in\nstand_in.main()\n"
    )
    monkeypatch.setattr(process, "_TERM_SECONDS", 600)
    with started(script(tmp_path, body), tmp_path) as server:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            server.stop()
        assert time.monotonic() - begun < 20
        assert gone(server.pid)
