"""Traces of many ranks and nodes explained side by side: in processes of this machine, or on a cluster by Dask."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from mla_diag._version import __version__
from mla_diag.errors import UsageError, WorkersError
from mla_diag.signals import handled

if TYPE_CHECKING:
    from distributed import Client

_SECONDS_TO_CONNECT = 20
_SECONDS_BETWEEN_LOOKS = 5

T = TypeVar("T")
R = TypeVar("R")


def on_workers(task: Callable[[T], R], items: Sequence[T], scheduler: str) -> list[R]:
    """Do a task for each of some items, several at a time.

    Args:
        task: What to do. It and what it returns go from process to process, so they have to be picklable.
        items: What to do it for.
        scheduler: `processes`, one a core, or `processes:4`; or the address of a Dask scheduler, such as
            `tcp://10.0.0.1:8786`, whose workers read the same paths with the same mla-diag.

    Returns:
        What it returned, in the order of the items.

    Raises:
        UsageError: `scheduler` is neither, or Dask is not installed.
        WorkersError: The scheduler does not answer, has no workers, or they cannot do it.
    """
    if not scheduler.startswith("processes"):
        return _on_cluster(task, items, scheduler)
    processes = re.fullmatch(r"processes(?::([1-9]\d*))?", scheduler)
    if processes is None:
        raise UsageError(f"--scheduler {scheduler}: no number of processes; write processes, or processes:4")
    return _in_processes(task, items, min(int(processes[1] or os.cpu_count() or 1), len(items))) if items else []


def _in_processes(task: Callable[[T], R], items: Sequence[T], number: int) -> list[R]:
    context = multiprocessing.get_context("spawn")  # not forked, as other threads may hold locks
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(number, context, _end_with_parent) as pool:
        try:
            # An interrupt is the parent's to see: each process that is started would show a traceback.
            with handled([signal.SIGINT], signal.SIG_IGN):
                futures = [pool.submit(task, item) for item in items]
            return [future.result() for future in futures]
        except BrokenExecutor as error:
            raise WorkersError(
                f"a process was ended, for lack of memory? with {number} at a time; fewer need less: "
                f"--scheduler processes:{max(number // 2, 1)}"
            ) from error
        except BaseException:  # an interrupt, above all: nothing is to be waited for
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _end_with_parent() -> None:
    """Have a process end when the one that started it has been killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_cluster(task: Callable[[T], R], items: Sequence[T], address: str) -> list[R]:
    try:
        from distributed import Client, wait  # noqa: PLC0415 - an extra
        from distributed import TimeoutError as NotDoneError  # noqa: PLC0415
        from distributed.comm.addressing import get_address_host_port, normalize_address  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"--scheduler {address}: {error}; pip install 'mla-diag[cluster]'") from error
    try:
        get_address_host_port(normalize_address(address))
    except ValueError as error:
        raise UsageError(f"--scheduler {address}: {error}; write processes, or tcp://HOST:PORT") from error
    _silence("distributed")
    try:
        client = Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except OSError as error:
        raise WorkersError(
            f"--scheduler {address}: no Dask scheduler answers ({_line(error)}); start one with `dask scheduler`, "
            "or write processes"
        ) from error
    with client, client.as_current():
        _check_workers(client, address)
        try:
            futures = client.map(task, items, pure=False)
            # Without workers Dask waits for others to come.
            while any(not future.done() for future in futures) and client.nthreads():
                with suppress(NotDoneError):
                    wait(futures, timeout=_SECONDS_BETWEEN_LOOKS)
            done = all(future.done() for future in futures)
            results = list(client.gather(futures)) if done else []
        except Exception as error:  # whatever a worker raised is raised here again
            raise WorkersError(f"--scheduler {address}: the work failed: {_line(error)}") from error
        if not done:
            raise WorkersError(f"--scheduler {address}: its workers have gone, for lack of memory? see their logs")
        return results


def _check_workers(client: Client, address: str) -> None:
    """Refuse a cluster that would wait for ever, or explain by other rules than these."""
    versions = client.run(_version, on_error="return")
    if not versions:
        raise WorkersError(f"--scheduler {address}: has no workers; start some with `dask worker {address}`")
    for worker, version in versions.items():
        if version != __version__:
            has = f"has mla-diag {version}" if isinstance(version, str) else f"has no mla-diag ({_line(version)})"
            raise WorkersError(f"--scheduler {address}: worker {worker} {has}; install {__version__} there, as here")


def _silence(package: str) -> None:
    """Keep a package from logging what is said in one line; its modules' loggers have levels of their own."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == package:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _version() -> str:
    return __version__


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
