"""Traces behind URLs: over a real SFTP server, and what is said where one cannot be read."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

import mla_diag
from mla_diag.errors import UnreadableInputError, UsageError
from mla_diag.trace.remote import RemoteError, RemoteFile, is_url, listed, trace_file, without_password
from tests.commands.invoke import Invoke
from tests.sftp_server import SftpServer, user_of_sftp

DECODE = "base-graph-decode.trace.json.gz"


@pytest.fixture
def there(tmp_path: Path, recordings: Path) -> Path:
    """The other host's files."""
    folder = tmp_path / "there/var/traces"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        shutil.copy(recordings / DECODE, folder / f"17-TP-{rank}-DECODE.trace.json.gz")
    shutil.copy(recordings / "base.server_info.json", folder)
    (tmp_path / "there/other").mkdir()
    shutil.copy(recordings / "base-eager-decode-stack.trace.json.gz", tmp_path / "there/other/eager.json.gz")
    return tmp_path / "there"


@pytest.fixture
def server(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SftpServer]:
    with user_of_sftp(there, tmp_path / "home", monkeypatch) as running:
        yield running


def test_a_directory_a_pattern_and_a_file_on_another_host(server: SftpServer, recordings: Path):
    here = mla_diag.explain(recordings / DECODE)
    names = [server.url(f"/var/traces/17-TP-{rank}-DECODE.trace.json.gz") for rank in (0, 1)]
    found = mla_diag.explain(server.url("/var/traces/"))
    assert [trace.path for trace in found.traces] == names
    assert found.stages[0].ops == here.stages[0].ops
    assert [trace.path for trace in mla_diag.explain(server.url("/var/*/17-TP-1*")).traces] == names[1:]
    assert [trace.path for trace in mla_diag.explain([names[0]]).traces] == names[:1]


def test_explain_and_compare_take_urls(server: SftpServer, run: Invoke, recordings: Path):
    url = server.url("/var/traces/17-TP-0-DECODE.trace.json.gz")
    explained = run("explain", url, "--mapping", server.url("/other/eager.json.gz"), "--top", "1")
    assert (explained.returncode, explained.stderr) == (0, "")
    assert explained.stdout.startswith(url)
    assert "forward_decode" in explained.stdout
    compared = run("compare", url, recordings / "native-graph-decode.trace.json.gz")
    assert compared.returncode == 0
    assert "72.44 to 6.960 ms" in compared.stdout


def test_nothing_fetched_is_left_behind(server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    mla_diag.explain(server.url("/var/traces"))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_trace_is_fetched_leaves_nothing_of_it(tmp_path: Path, number: signal.Signals, status: int):
    """It is fetched in a thread, which an end of the process does not wait for."""
    program = """
import time
from mla_diag.cli import main
from mla_diag.trace.remote import RemoteFile

def fetch(self, target):
    target.write_bytes(b"half of it")
    time.sleep(600)

RemoteFile.fetch = fetch
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "explain", "sftp://gpu1/a.json.gz"],
        env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not any(path.is_file() and path.stat().st_size for path in tmp_path.rglob("mla-diag-*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (status, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "/var/traces/missing.json.gz",
            "cannot be read (No such file or directory); check the path, which begins after the host",
        ),
        ("/var/traces/hidden.json.gz", "cannot be read (Permission denied); check that this user may read it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_the_others_are_explained(
    server: SftpServer, run: Invoke, there: Path, path: str, words: str
):
    (there / "var/traces/hidden.json.gz").touch()
    good = server.url("/var/traces/17-TP-0-DECODE.trace.json.gz")
    result = run("explain", good, server.url(path), "--top", "1")
    assert result.returncode == 3
    assert result.stdout.startswith(good)
    assert result.stderr == f"mla-diag: {server.url(path)}: {words}\n"


def test_a_directory_without_traces_is_one_line(server: SftpServer, there: Path):
    (there / "empty").mkdir()
    for path in ("/empty", "/missing", "/var/traces/*.txt"):
        with pytest.raises(UsageError, match=r": no trace \(\.json or \.json\.gz\) there"):
            mla_diag.explain(server.url(path))


def test_a_login_that_is_refused_is_one_line(server: SftpServer, run: Invoke, tmp_path: Path):
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(tmp_path / "home/.ssh/id_ed25519"))
    result = run("explain", server.url("/var/traces"))
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (3, "")
    assert "cannot be reached (Authentication failed.); check the user in the URL, and that ssh logs in there" in line


def test_a_host_that_is_none_is_one_line(run: Invoke):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for host in (f"127.0.0.1:{port}", "no-such-host.invalid"):
        result = run("explain", f"sftp://{host}/var/traces")
        (line,) = result.stderr.splitlines()
        assert result.returncode == 3
        assert line.startswith(f"mla-diag: sftp://{host}/var/traces: cannot be reached (")
        assert line.endswith("); check the host and port in the URL, and that it can be reached from here")


def test_a_port_that_is_no_ssh_is_one_line(run: Invoke):
    """paramiko logs a traceback to standard error where logging is not set up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        result = run("explain", f"sftp://127.0.0.1:{listening.getsockname()[1]}/traces")
        thread.join()
    (line,) = result.stderr.splitlines()
    assert "cannot be reached (Error reading SSH protocol banner" in line


def test_a_driver_that_is_not_installed_comes_with_what_to_install():
    """In a process of its own, because fsspec remembers the drivers that it has loaded."""
    program = (
        "import sys; sys.modules['paramiko'] = None; sys.argv[1:] = ['explain', 'sftp://gpu1/var/traces']; "
        "from mla_diag.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == (
        'mla-diag: sftp://gpu1/var/traces: SFTPFileSystem requires "paramiko" to be installed; '
        "pip install 'mla-diag[remote]'\n"
    )


@pytest.mark.parametrize("url", ["sftp://", "sftp:///var/traces", "ssh://me@/var/traces"])
def test_a_url_without_a_host_says_so(url: str):
    with pytest.raises(UnreadableInputError, match=r"names no host; write s\w+://HOST/PATH$"):
        mla_diag.explain(url)


def test_a_scheme_that_is_none_is_one_line():
    with pytest.raises(UnreadableInputError, match=r"^nosuch://x/y: cannot be reached \(Protocol not known: nosuch"):
        mla_diag.explain("nosuch://x/y")


def test_a_store_that_wants_keys_is_one_line(monkeypatch: pytest.MonkeyPatch):
    """botocore's words, behind a file system that is always there: s3fs brings forty packages."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.find", refuse)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", refuse)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.info", refuse)
    with pytest.raises(
        UnreadableInputError, match=r"\(Unable to locate credentials\); check the store's keys, where its"
    ):
        mla_diag.explain("memory://bucket/t")


def test_what_is_a_url():
    assert [is_url(text) for text in ("sftp://h/x", "s3://b", "file:///x", "/a//b", "C:/x", "a://b.json")] == [
        *(True, True, True, False, False, True),
    ]
    assert trace_file("/a//b.json") == Path("/a/b.json")
    assert trace_file("sftp://h//b.json") == RemoteFile("sftp://h//b.json")


def test_a_password_in_a_url_is_not_shown():
    assert without_password("sftp://me:pass@word@host:22/x@y") == "sftp://me:***@host:22/x@y"
    assert without_password("sftp://me@host:22/x:y@z") == "sftp://me@host:22/x:y@z"
    with pytest.raises(RemoteError) as raised:
        listed("nosuch://me:secret@host/x")
    assert "secret" not in str(raised.value)


def test_a_password_in_a_url_is_not_shown_where_nothing_can_be_compared(
    server: SftpServer, run: Invoke, recordings: Path
):
    url = server.url("/var/traces/17-TP-0-DECODE.trace.json.gz").replace("somebody@", "somebody:hunter2@")
    result = run("compare", url, recordings / "base-eager-extend-stack.trace.json.gz")
    assert result.returncode == 2
    assert "somebody:***@" in result.stderr
    assert "hunter2" not in result.stderr
