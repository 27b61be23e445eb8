"""Traces of many ranks and nodes explained side by side, by Dask: in processes of this machine or on its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING, TypeVar

from mla_diag._version import __version__
from mla_diag.errors import UsageError, WorkersError

if TYPE_CHECKING:
    from distributed import Client

PROCESSES = "processes"  # Dask's name for its scheduler of local ones

_SECONDS_TO_CONNECT = 20

T = TypeVar("T")
R = TypeVar("R")


def on_workers(task: Callable[[T], R], items: Sequence[T], scheduler: str) -> list[R]:
    """Do a task for each of some items, several at a time.

    Args:
        task: What to do. It and what it returns go from process to process, so they have to be picklable.
        items: What to do it for.
        scheduler: `processes`, as many as Dask's setting `num_workers` says, else one a core; or the address of a Dask
            scheduler, such as `tcp://10.0.0.1:8786`, whose workers read the same paths with the same mla-diag.

    Returns:
        What it returned, in the order of the items.

    Raises:
        UsageError: Dask is not installed, or `scheduler` is no address.
        WorkersError: The scheduler does not answer, has no workers, or they cannot do it.
    """
    try:
        return _in_processes(task, items) if scheduler == PROCESSES else _on_cluster(task, items, scheduler)
    except ImportError as error:
        raise UsageError(f"--scheduler {scheduler}: {error}; pip install 'mla-diag[cluster]'") from error


def _in_processes(task: Callable[[T], R], items: Sequence[T]) -> list[R]:
    import dask  # noqa: PLC0415 - only for several traces at a time

    try:
        return list(dask.compute(*(dask.delayed(task, pure=False)(item) for item in items), scheduler=PROCESSES))
    except (BrokenExecutor, OSError) as error:
        remedy = "for lack of memory? fewer at a time need less: DASK_NUM_WORKERS=2"
        raise WorkersError(f"--scheduler {PROCESSES}: a process was ended ({_line(error)}); {remedy}") from error


def _on_cluster(task: Callable[[T], R], items: Sequence[T], address: str) -> list[R]:
    from distributed import Client  # noqa: PLC0415 - only for several traces at a time
    from distributed.comm.addressing import get_address_host_port, normalize_address  # noqa: PLC0415

    try:
        get_address_host_port(normalize_address(address))
    except ValueError as error:
        raise UsageError(f"--scheduler {address}: {error}; write {PROCESSES}, or tcp://HOST:PORT") from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said in one line
    try:
        client = Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except OSError as error:
        raise WorkersError(
            f"--scheduler {address}: no Dask scheduler answers ({_line(error)}); start one with `dask scheduler`, "
            f"or write {PROCESSES}"
        ) from error
    with client:
        _check_workers(client, address)
        try:
            return list(client.gather(client.map(task, items, pure=False)))
        except Exception as error:  # whatever a worker raised is raised here again
            raise WorkersError(f"--scheduler {address}: a worker failed: {_line(error)}") from error


def _check_workers(client: Client, address: str) -> None:
    """Refuse a cluster that would wait for ever, or explain by other rules than these."""
    versions = client.run(_version, on_error="return")
    if not versions:
        raise WorkersError(f"--scheduler {address}: has no workers; start some with `dask worker {address}`")
    for worker, version in versions.items():
        if version != __version__:
            has = f"has mla-diag {version}" if isinstance(version, str) else f"has no mla-diag ({_line(version)})"
            raise WorkersError(f"--scheduler {address}: worker {worker} {has}; install {__version__} there, as here")


def _version() -> str:
    return __version__


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
