"""A real SFTP server on this host, over a directory, for a test: its own host key, one key that may log in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import asyncssh
import pytest
from fsspec.implementations.sftp import SFTPFileSystem


class _Files(asyncssh.SFTPServer):
    """Refuses what a user without rights is refused: the tests may run as root, which may read anything."""

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        if b"hidden" in path:
            raise asyncssh.SFTPPermissionDenied("Permission denied")
        return super().open(path, pflags, attrs)


class SftpServer:
    """Serves a directory as `/` until its block is left; files with `hidden` in their names may not be read.

    Args:
        root: The directory.
        home: Where the user's `.ssh/id_ed25519` is put, which may log in.

    Attributes:
        port: Where it listens on 127.0.0.1.
    """

    port: int

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> SftpServer:
        folder = self._home / ".ssh"
        folder.mkdir(parents=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / "id_ed25519"))
        self._allowed = asyncssh.import_authorized_keys(key.export_public_key().decode())
        self._thread.start()
        self._acceptor = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        self.port = self._acceptor.get_port()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def url(self, path: str) -> str:
        """The URL of a path below the directory."""
        return f"sftp://somebody@127.0.0.1:{self.port}{path}"

    async def _listen(self) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=self._allowed,
            sftp_factory=lambda channel: _Files(channel, chroot=str(self._root).encode()),
        )

    async def _close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def user_of_sftp(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SftpServer]:
    """A server, and this process as the user who may log in there; no connection outlives the block."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with SftpServer(root, home) as server:
        yield server
        for system in SFTPFileSystem._cache.values():
            system.client.close()
        SFTPFileSystem.clear_instance_cache()
