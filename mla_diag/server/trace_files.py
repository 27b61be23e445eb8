"""The traces that a server writes: on its own disk, under names that tell ranks and stage.

`[prefix-]ID-TP-t[-DP-d][-PP-p][-EP-e][-STAGE].trace.json.gz`, one for each rank, the ranks past TP only where there are
several (sglang/srt/managers/scheduler_components/profiler_manager.py; older releases name TP alone).
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.errors import UnreadableInputError, UsageError
from mla_diag.trace.rank import Coordinates, coordinates_in
from mla_diag.trace.remote import RemoteError, RemoteFile, check_directory, is_url, listed, without_password
from mla_diag.trace.source import TraceBytes

# Where SGLang writes if nobody says: there every server can, and a server that cannot write its trace dies.
_DEFAULT_ROOT = "/tmp"
_ROOM = 1 << 30
_ROOM_WITH_STACKS = 4 << 30
_NAME = re.compile(
    r"-(?P<rank>TP-\d+(?:-DP-\d+)?(?:-PP-\d+)?(?:-EP-\d+)?)(?:-(?P<stage>EXTEND|DECODE|prefill|decode))?"
    r"\.trace\.json\.gz$"
)
_STAGES = {"EXTEND": "prefill", "prefill": "prefill", "DECODE": "decode", "decode": "decode"}


def rank_and_stage(name: str) -> tuple[Coordinates, str | None] | None:
    """What a file's name tells: whose steps, and of which stage; None for a file of another kind."""
    found = _NAME.search(name)
    if found is None:
        return None
    rank = coordinates_in(found["rank"])
    return (rank or Coordinates()), _STAGES.get(found["stage"])


def expected_ranks(server: ServerInfo) -> list[Coordinates]:
    """Every rank that writes a trace; coordinates of which there is only one are left out, as in the files' names."""
    replicas = 1 if server.dp_attention else server.data_parallel
    return [
        Coordinates(
            tp=tp,
            dp=_data_parallel_rank(server, tp, replica),
            pp=pp if server.pipeline_parallel > 1 else None,
            # sglang/srt/entrypoints/engine.py: the experts' ranks are consecutive TP ranks.
            ep=tp * server.expert_parallel // server.tensor_parallel if server.expert_parallel > 1 else None,
        )
        for replica in range(replicas)
        for pp in range(server.pipeline_parallel)
        for tp in range(server.tensor_parallel)
    ]


def _data_parallel_rank(server: ServerInfo, tp: int, replica: int) -> int | None:
    if server.data_parallel == 1:
        return None
    return tp * server.data_parallel // server.tensor_parallel if server.dp_attention else replica


def rank_notes(names: Iterable[str], server: ServerInfo) -> list[str]:
    """What is wrong with a capture's set of files: ranks that are missing, and names that several ranks share."""
    notes = []
    seen: dict[tuple[tuple[int, int, int], str | None], str] = {}
    for name in sorted(names):
        found = rank_and_stage(name)
        if found is None:
            continue
        key = found[0].place, found[1]
        if key in seen:
            notes.append(f"{seen[key]} and {name} are of the same rank and stage; explain them one at a time")
        seen[key] = name
    expected = expected_ranks(server)
    for stage in sorted({stage or "" for _, stage in seen}):
        missing = [rank for rank in expected if (rank.place, stage or None) not in seen]
        if not missing:
            continue
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        why = ""
        if server.nodes > 1:
            why = f"; ranks on the other {server.nodes - 1} nodes write on their own disks"
        elif server.pipeline_parallel > 1 or (server.data_parallel > 1 and not server.dp_attention):
            why = "; releases that name files by the TP rank alone overwrite one rank's with another's"
        notes.append(
            f"no {stage + ' ' if stage else ''}trace of {listed} ({len(missing)} of {len(expected)} ranks){why}"
        )
    return notes


@dataclass(frozen=True)
class TraceDirectory:
    """Where a server writes one capture, and where that is seen from here.

    Attributes:
        on_server: The path that the server is told.
        here: The same as a local path or an fsspec URL; None if it cannot be reached.
    """

    on_server: str
    here: str | None

    @property
    def is_url(self) -> bool:
        """Whether it is reached through fsspec."""
        return is_url(self.here)

    def prepare(self, stacks: bool) -> None:
        """Make the directory and see that there is room in it, if it is on a disk here; else see that it is reached.

        A server that cannot write its trace, for want of room or of permission, dies of it (measured on 0.5.17).

        Args:
            stacks: Whether Python stacks are recorded, which makes traces several times larger.

        Raises:
            UsageError: There is no such place or not enough room.
        """
        if self.here is None:
            return
        if self.is_url:
            try:
                check_directory(self.here.rpartition("/")[0])
            except RemoteError as error:
                raise UsageError(f"--trace-root {error}") from error
            return
        path = Path(self.here)
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent}: there is no such directory; make it, or give another --trace-root")
        free, wanted = shutil.disk_usage(path.parent).free, _ROOM_WITH_STACKS if stacks else _ROOM
        if free < wanted:
            raise UsageError(
                f"{path.parent}: {free / 1e6:,.0f} MB free and a server dies if its trace does not fit: "
                f"have {wanted / 1e6:,.0f} MB free there, or give another --trace-root"
            )
        try:
            path.mkdir()
            path.chmod(0o1777)  # the server may run as another user
        except OSError as error:
            raise UsageError(f"{path}: cannot be made: {error.strerror}; give another --trace-root") from error

    def sizes(self) -> dict[str, int]:
        """The traces there by name, with their bytes so far.

        Raises:
            UsageError: The URL cannot be read.
        """
        if self.here is None:
            return {}
        if self.is_url:
            try:
                entries = {RemoteFile(url).name: size for url, size in listed(str(self.here))}
            except RemoteError as error:
                raise UsageError(f"--trace-root {error}") from error
        else:
            folder = Path(self.here)
            entries = {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}
        return {name: size for name, size in entries.items() if rank_and_stage(name) is not None}

    def fetch(self, name: str, folder: Path) -> Path:
        """Copy a trace into a local directory.

        Raises:
            UsageError: It cannot be read there or written here.
        """
        target = folder / name
        try:
            if self.is_url:
                RemoteFile(f"{self.here}/{name}").fetch(target)
            else:
                shutil.copyfile(Path(str(self.here), name), target)
        except RemoteError as error:
            target.unlink(missing_ok=True)
            raise UsageError(f"--trace-root {error}") from error
        except OSError as error:
            target.unlink(missing_ok=True)
            raise UsageError(
                f"{target}: cannot be copied: {error.strerror or error}; the server's own is {self.on_server}/{name}"
            ) from error
        return target

    def is_complete(self, name: str) -> bool | None:
        """Whether a trace has been written to its end: a local one's gzip stream has it. None where only time tells."""
        if self.here is None or self.is_url:
            return None
        trace = TraceBytes(Path(self.here, name))
        try:
            for _ in trace:
                pass
        except UnreadableInputError:
            return False
        return trace.damage is None

    def remove(self) -> None:
        """Remove the directory, if it is on a disk here and holds nothing but traces."""
        if self.here is None or self.is_url:
            return
        folder = Path(self.here)
        with contextlib.suppress(OSError):
            for name in self.sizes():
                (folder / name).unlink()
            folder.rmdir()


def locate(trace_root: str | None, *, local: bool, name: str) -> TraceDirectory:
    """Where a capture of that name is to go.

    Args:
        trace_root: A directory that the server writes to and that is seen from here: under the same path, as an fsspec
            URL of the server's host, or as `PATH_ON_SERVER=PATH_OR_URL_HERE`. None for the server's `/tmp`.
        local: Whether the server is on this host.
        name: Of the directory to make there.

    Raises:
        UsageError: The server's path is not absolute.
    """
    if trace_root is None:
        path = f"{_DEFAULT_ROOT}/{name}"
        return TraceDirectory(path, path if local else None)
    on_server, equals, here = trace_root.partition("=")
    if not equals:
        here = trace_root
        on_server = re.sub(r"^[\w+.-]+://[^/]*", "", trace_root) if "://" in trace_root else trace_root
    if not on_server.startswith("/"):
        raise UsageError(
            f"--trace-root {without_password(trace_root)}: the server needs an absolute path; write /PATH or /PATH=URL"
        )
    return TraceDirectory(f"{on_server.rstrip('/')}/{name}", f"{here.rstrip('/')}/{name}")
