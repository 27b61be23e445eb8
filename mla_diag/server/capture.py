"""One profile of a live server, bounded in steps, alone, and never left running.

Two ways to ask SGLang for it (sglang/srt/managers/scheduler_components/profiler_manager.py):

- `start_step`: the next `num_steps` forward passes of whatever stage, in one file, whose steps have names from
  `STEP_SPANS` on.
- `profile_by_stage`, for older releases and a load of our own: one file a stage, `num_steps` of each. It is bounded
  only if both stages come, as they do in one wave of requests; a profile of live traffic would go on through all
  decode steps until enough prefills have come. And it stops one profile and starts the next within one recorded
  function, whose end PyTorch then writes into the first one's freed memory: 3 of 4 servers of 0.5.17 crashed in
  PyTorch's profiler on a CPU.

Both are refused while a profile runs, which a start without either is not: that one ends the other's (0.4.6 to 0.5.17).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.errors import RefusedError, ServerError, ServerGoneError
from mla_diag.server.client import Client
from mla_diag.server.load import Load
from mla_diag.server.trace_files import TraceDirectory, expected_ranks, rank_and_stage

_PAUSE = 0.5
# What has not come this long after the server answers again will not come by itself.
_GRACE = 5.0
# A step that no server reaches: arming the profiler for it is how one that waits for its first step is disarmed.
_NEVER = 1 << 40

Say = Callable[[str], None]
"""Called with what is being waited for, now and then."""


@dataclass(frozen=True)
class CapturePlan:
    """What to record.

    Attributes:
        steps: Forward passes in all, or, by stage, of each.
        by_stage: Whether each stage has a file and a count of its own.
        stacks: Whether to record Python stacks.
        traffic_timeout: Seconds to wait for other people's traffic to run the steps.
    """

    steps: int
    by_stage: bool
    stacks: bool
    traffic_timeout: float = 120.0


class Capture:
    """A profile under way; leaving the block leaves no profiler running, armed or waiting.

    Args:
        client: The server.
        server: What it says of itself.
        directory: Where it is to write.
        plan: What to record.
        say: Told what is being waited for.

    Attributes:
        seconds: From the first request of the load to the last trace, once it has run.
        left_running: Why the profiler may run on after a failure, or None.
    """

    def __init__(
        self, client: Client, server: ServerInfo, directory: TraceDirectory, plan: CapturePlan, say: Say
    ) -> None:
        self._client = client
        self._server = server
        self._directory = directory
        self._plan = plan
        self._say = say
        self._started = False
        self._done = False
        self._complete: set[tuple[str, int]] = set()
        self._seen: set[tuple[str, int]] = set()
        self._lock = _Lock(client.url)
        self.seconds = 0.0
        self.left_running: str | None = None

    def __enter__(self) -> Capture:
        """Keep other captures from this host away.

        Raises:
            ServerError: One is under way.
        """
        self._lock.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Stop what was started and has not ended; what cannot be stopped is in `left_running` afterwards."""
        if not self._started or self._done:
            return
        self._done = True
        self._say("stopping the profiler")
        try:
            self._client.responsive()
            self._halt()
        except ServerGoneError:
            return  # and its profiler with it
        except ServerError as error:
            self.left_running = f"the profiler may still be running: {error}"

    def run(self, load: Load | None) -> None:
        """Have the steps run, by a load or by whoever sends requests, until the traces are written.

        Raises:
            RefusedError: The server is being profiled already.
            ServerError: The server went away, fell silent, or ran no steps.
        """
        if load is not None:
            self._say("the server caches the prefixes of the prompts")
            load.cache_prefixes()
        start = time.monotonic()
        self._start()
        if load is None:
            self._watch_traffic()
        else:
            load.start()
            try:
                self._drive(load)
            finally:
                load.stop()
        self._done = True
        self.seconds = time.monotonic() - start

    def _start(self) -> None:
        self._started = True
        try:
            self._client.start_profile(self._request())
        except RefusedError:
            # What runs is somebody else's, and to be left running.
            self._started = False
            raise

    def _request(self) -> dict[str, Any]:
        how = {"profile_by_stage": True} if self._plan.by_stage else {"start_step": 1}
        return {
            "output_dir": self._directory.on_server,
            "num_steps": self._plan.steps,
            "record_shapes": True,
            "with_stack": self._plan.stacks,
            "activities": ["CPU", "GPU"],
            **how,
        }

    def _drive(self, load: Load) -> None:
        start = time.monotonic()
        while not load.wait(_PAUSE):
            if self._all_written():
                return
            self._say(f"the load runs, {time.monotonic() - start:.0f} s")
        self._wait_for_export()
        if self._directory.here is not None and self._all_written():
            return
        # Too few steps ran on some rank, or the files are out of sight: a profiler that has not finished is stopped,
        # and one that has answers that it is not running.
        self._halt()

    def _watch_traffic(self) -> None:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self._plan.traffic_timeout:
            if self._directory.here is not None and self._all_written():
                return
            self._client.responsive()
            self._say(f"waiting for {self._plan.steps} forward passes of your traffic, {waited:.0f} s")
            time.sleep(_PAUSE)
        self._halt()
        if self._directory.here is not None and not self._directory.sizes():
            raise ServerError(
                f"{self._client.url}: no forward pass in {self._plan.traffic_timeout:.0f} s; send it requests, wait "
                "longer with --traffic-timeout, or leave --no-load out"
            )

    def _wait_for_export(self) -> None:
        """Wait until the scheduler answers again and, where they can be seen, its files have come."""
        self._client.wait_until_responsive(self._client.timeouts.export, self._say_exporting)
        if self._directory.here is not None:
            start = time.monotonic()
            while not self._all_written() and time.monotonic() - start < _GRACE:
                self._client.responsive()
                time.sleep(_PAUSE)

    def _say_exporting(self, waited: float) -> None:
        size = sum(self._directory.sizes().values())
        self._say(
            f"the server exports its traces and answers nothing else, {waited:.0f} s, {size / 1e6:,.0f} MB so far"
        )

    def _all_written(self) -> bool:
        """Whether the file of every rank, and stage, is there to its end."""
        sizes = self._directory.sizes()
        stages = ("prefill", "decode") if self._plan.by_stage else (None,)
        named = filter(None, map(rank_and_stage, sizes))
        found = {(rank.place, stage) for rank, stage in named}
        if any((rank.place, stage) not in found for rank in expected_ranks(self._server) for stage in stages):
            return False
        for entry in sizes.items():
            if entry in self._complete:
                continue
            whole = self._directory.is_complete(entry[0])
            # On another host's disk it is taken for whole once it has stopped growing.
            if whole or (whole is None and entry[1] and entry in self._seen):
                self._complete.add(entry)
        self._seen = set(sizes.items())
        return self._complete.issuperset(sizes.items())

    def _halt(self) -> None:
        """Stop a profiler that runs, and disarm one that waits for its first step, which `stop_profile` does not."""
        self._client.stop_profile()
        never = {**self._request(), "profile_by_stage": False, "start_step": _NEVER, "num_steps": 1}
        self._client.start_profile(never)
        # Releases without start_step have started just now, so it is stopped again; others answer that nothing runs.
        self._client.stop_profile()
        self._done = True


class _Lock:
    """One capture of a server at a time from this host; the server itself refuses only once it is recording."""

    def __init__(self, url: str) -> None:
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self._path = Path(tempfile.gettempdir(), f"mla-diag-{name}.lock")
        self._url = url
        self._file: IO[str] | None = None

    def take(self) -> None:
        try:
            while not self._take_this_one():
                pass
        except BlockingIOError:
            raise ServerError(
                f"{self._url}: another `mla-diag profile` of it runs here (process {self._holder()}); wait for that"
            ) from None
        except OSError:
            return  # another user's; the server's own refusal is what is left

    def _take_this_one(self) -> bool:
        """Lock the file of that name; False if it was removed meanwhile, and the name may be another file's."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except OSError:
            file.close()
            raise
        if not same:
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def _holder(self) -> str:
        return self._path.read_text(encoding="utf-8").strip() if self._path.exists() else "unknown"

    def release(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
