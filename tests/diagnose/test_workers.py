"""Several traces at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

import mla_diag
from mla_diag.diagnose import workers
from mla_diag.errors import UsageError, WorkersError
from tests.commands.invoke import Invoke
from tests.trace_builder import TraceBuilder


def cluster_of(n_workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=n_workers, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with cluster_of(2) as started:
        yield started.scheduler_address


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """The traces of three ranks, and a file that is none."""
    for rank in range(3):
        builder = TraceBuilder(rank=rank)
        for step in range(3):
            builder.span("step[DECODE bs=1]", 1000 * step, 900)
            builder.dispatch("aten::mm", 1000 * step + 10, [("kernel", 1000 * step + 20, 100 + rank)])
        builder.write(tmp_path / f"17-TP-{rank}.trace.json.gz")
    (tmp_path / "9.json").write_text("")
    return tmp_path


def test_processes_say_what_one_says(ranks: Path):
    said = mla_diag.explain(ranks, scheduler="processes")
    assert said == mla_diag.explain(ranks)
    assert [(stage.rank, stage.trace) for stage in said.stages] == [(0, 0), (1, 1), (2, 2)]
    assert len(said.unreadable) == 1


def test_a_cluster_says_what_one_says(ranks: Path, cluster: str):
    assert mla_diag.explain(ranks, scheduler=cluster, rank=1) == mla_diag.explain(ranks, rank=1)


def test_both_commands_take_a_scheduler(run: Invoke, ranks: Path, cluster: str):
    assert run("explain", ranks, "--scheduler", cluster).stdout == run("explain", ranks).stdout
    (ranks / "9.json").unlink()
    result = run("compare", ranks, ranks, "--scheduler", "processes")
    assert (result.returncode, result.stderr) == (0, "")


def test_results_come_in_the_order_of_the_items(cluster: str):
    assert workers.on_workers(str, range(20), cluster) == workers.on_workers(str, range(20), "processes")


def test_a_scheduler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_SECONDS_TO_CONNECT", 1)
    with pytest.raises(WorkersError, match=r"^--scheduler tcp://127\.0\.0\.1:1: no Dask scheduler answers .*1 s"):
        workers.on_workers(str, [1], "tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["gpu1", "http://gpu1:8786", "tcp://gpu1:port"])
def test_what_is_no_address(run: Invoke, ranks: Path, address: str):
    result = run("explain", ranks, "--scheduler", address)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.endswith("write processes, or tcp://HOST:PORT\n")


def test_a_cluster_without_workers_is_not_waited_for():
    with cluster_of(0) as empty, pytest.raises(WorkersError, match="has no workers; start some with `dask worker tcp"):
        workers.on_workers(str, [1], empty.scheduler_address)


def other_version() -> str:
    return "0.0.1"


def no_module() -> str:
    raise ModuleNotFoundError("No module named 'mla_diag'")


@pytest.mark.parametrize(
    ("there", "says"),
    [(other_version, "has mla-diag 0.0.1; install"), (no_module, r"has no mla-diag \(No module named 'mla_diag'\)")],
)
def test_workers_that_would_say_something_else_are_refused(cluster: str, monkeypatch, there, says: str):
    monkeypatch.setattr(workers, "_version", there)
    with pytest.raises(WorkersError, match=says):
        workers.on_workers(str, [1], cluster)


def fail(_: int) -> None:
    raise MemoryError("no room\nfor this")


def test_a_worker_that_fails_is_one_line(cluster: str):
    with pytest.raises(WorkersError, match=r"^--scheduler \S+: a worker failed: no room$"):
        workers.on_workers(fail, [1], cluster)


def test_a_process_that_is_killed_is_one_line():
    with pytest.raises(WorkersError, match=r"^--scheduler processes: a process was ended .*DASK_NUM_WORKERS=2$"):
        workers.on_workers(os._exit, [9], "processes")


@pytest.mark.parametrize(("scheduler", "package"), [("processes", "dask"), ("tcp://gpu1:8786", "distributed")])
def test_dask_is_an_extra(monkeypatch: pytest.MonkeyPatch, scheduler: str, package: str):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"pip install 'mla-diag\[cluster\]'"):
        workers.on_workers(str, [1], scheduler)
