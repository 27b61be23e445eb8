"""Traces on other hosts, by the URLs that fsspec knows: `sftp://user@host/path`, `s3://bucket/path`."""

from __future__ import annotations

import errno
import glob
import logging
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mla_diag.errors import UnreadableInputError

# What a scheme's driver comes with; for others fsspec says what to install.
_EXTRAS = {"sftp": "remote", "ssh": "remote"}
# A host that does not answer is said to be so while somebody still looks at the screen.
_SECONDS_TO_CONNECT = 20
_SSH = {"timeout": _SECONDS_TO_CONNECT, "banner_timeout": _SECONDS_TO_CONNECT}
_OPTIONS = {"sftp": _SSH, "ssh": _SSH}
_WITH_DIRECTORIES = ("sftp", "ssh", "file", "local")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RemoteError(UnreadableInputError):
    """A URL that cannot be read: its host, the way to log in, its path, or a package that is not installed."""


def is_url(text: object) -> bool:
    """Whether it is a URL and not a local path."""
    return isinstance(text, str) and re.match(r"[A-Za-z][\w+.-]*://", text) is not None


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"(://[^/@:]*):[^/]*@", r"\1:***@", url, count=1)


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, as much of a `Path` as reading a trace takes.

    Attributes:
        url: Where it is.
    """

    url: str

    def __str__(self) -> str:
        return without_password(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rsplit("/", 1)[-1]

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Fetch it into a file that is gone when it is closed, and open that: in one go, as small reads are slow.

        Raises:
            RemoteError: It cannot be fetched.
            OSError: There is no room for it here.
        """
        # A directory, because that goes with the process also where a thread is left in the middle of fetching.
        with tempfile.TemporaryDirectory(prefix="mla-diag-") as folder:
            file = Path(folder, "trace")
            self.fetch(file)
            return file.open(mode)

    def fetch(self, target: Path) -> None:
        """Copy it into a local file.

        Raises:
            RemoteError: It cannot be read there.
            OSError: It cannot be written here.
        """
        system, path = file_system(self.url)
        try:
            system.get_file(path, str(target))
        except Exception as error:  # every file system of fsspec has errors of its own
            if isinstance(error, OSError) and (error.filename == str(target) or error.errno in _FULL):
                raise
            raise RemoteError(_line(self.url, "cannot be read", error)) from error


TraceFile = Path | RemoteFile
"""Where a trace is."""


def trace_file(given: str | Path | RemoteFile) -> TraceFile:
    """The file of a path or URL."""
    if isinstance(given, RemoteFile):
        return given
    return RemoteFile(str(given)) if is_url(given) else Path(given)


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, connected, and the path in it.

    Raises:
        RemoteError: It cannot be reached, and why.
    """
    from fsspec.core import url_to_fs  # noqa: PLC0415 - only for traces on another host

    # What goes wrong is said in one line; paramiko logs a traceback as well, to standard error unless it has a handler.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme in _OPTIONS and rest.partition("/")[0].rpartition("@")[2] in ("", ":"):
        raise RemoteError(f"{without_password(url)}: names no host; write {scheme}://HOST/PATH")
    try:
        system, path = url_to_fs(url, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'mla-diag[{extra}]'" if extra else "install that package beside mla-diag"
        raise RemoteError(f"{without_password(url)}: {_words(error)}; {remedy}") from error
    except Exception as error:  # every file system of fsspec has errors of its own
        raise RemoteError(_line(url, "cannot be reached", error)) from error
    return system, str(path)


def traces_at(url: str, is_trace: Callable[[str], bool]) -> list[RemoteFile]:
    """The files that a URL stands for: itself, those of a directory or those that a pattern matches, in order.

    Args:
        url: A file, a directory, or a pattern.
        is_trace: Whether a name is a trace's: then it is taken for a file, else for a directory of such.

    Raises:
        RemoteError: It cannot be listed.
    """
    if glob.has_magic(url.partition("://")[2]):
        system, path = file_system(url)
        try:
            found = sorted(map(str, system.glob(path)))
        except Exception as error:  # every file system of fsspec has errors of its own
            raise RemoteError(_line(url, "cannot be listed", error)) from error
        host = url.removesuffix(path.lstrip("/"))
        return [RemoteFile(host + name.lstrip("/")) for name in found]
    if is_trace(url):
        return [RemoteFile(url)]
    return [RemoteFile(name) for name, _ in sorted(listed(url)) if is_trace(name)]


def listed(url: str) -> list[tuple[str, int]]:
    """The files in a directory: the URL of each, and its bytes; none for a directory that is not there.

    Raises:
        RemoteError: It cannot be listed.
    """
    system, path = file_system(url)
    try:
        system.invalidate_cache()
        entries = system.ls(path, detail=True)
    except FileNotFoundError:
        return []
    except Exception as error:  # every file system of fsspec has errors of its own
        raise RemoteError(_line(url, "cannot be listed", error)) from error
    files = [entry for entry in entries if entry["type"] != "directory"]
    return [(f"{url.rstrip('/')}/{Path(entry['name']).name}", int(entry["size"] or 0)) for entry in files]


def check_directory(url: str) -> None:
    """See that a directory can be reached, and that it is there where the scheme has directories at all.

    Raises:
        RemoteError: It cannot, or is not.
    """
    system, path = file_system(url)
    try:
        there = system.isdir(path)
    except Exception as error:  # every file system of fsspec has errors of its own
        raise RemoteError(_line(url, "cannot be reached", error)) from error
    if not there and url.partition("://")[0].lower() in _WITH_DIRECTORIES:
        raise RemoteError(f"{without_password(url)}: there is no such directory; check the path")


def _line(url: str, what: str, error: Exception) -> str:
    return f"{without_password(url)}: {what} ({_words(error)}); check {_remedy(error)}"


def _remedy(error: Exception) -> str:
    # paramiko's exceptions are not imported for this: "Authentication failed.", "No authentication methods available".
    if "authentication" in str(error).lower() or type(error).__name__ == "PasswordRequiredException":
        return "the user in the URL, and that ssh logs in there with a key of the agent or of ~/.ssh, without asking"
    if "credentials" in str(error).lower():  # botocore's: "Unable to locate credentials"
        return "the store's keys, where its own tools look for them: environment variables or a file of this user's"
    if isinstance(error, ValueError):
        return "the scheme before ://"
    if isinstance(error, FileNotFoundError):
        return "the path, which begins after the host"
    if isinstance(error, PermissionError):
        return "that this user may read it"
    return "the host and port in the URL, and that it can be reached from here"


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return " ".join(str(error.strerror).split())
    return " ".join(str(error).split()) or type(error).__name__
