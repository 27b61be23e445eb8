"""Several traces at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

import mla_diag
from mla_diag.diagnose import workers
from mla_diag.errors import UsageError, WorkersError
from tests.commands.invoke import Invoke
from tests.trace_builder import TraceBuilder

pytestmark = pytest.mark.filterwarnings("ignore:Port .* is already in use")


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


@pytest.mark.parametrize("given", ["gpu1", "http://gpu1:8786", "tcp://gpu1:port", "processes:", "processes:-1"])
def test_what_is_neither(run: Invoke, ranks: Path, given: str):
    result = run("explain", ranks, "--scheduler", given)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert f"--scheduler {given}: " in result.stderr
    assert "; write processes, or " in result.stderr


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
    with pytest.raises(WorkersError, match=r"^--scheduler \S+: the work failed: no room$"):
        workers.on_workers(fail, [1], cluster)


def test_workers_that_go_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(workers, "_SECONDS_BETWEEN_LOOKS", 0.2)
    with cluster_of(0) as scheduler:
        command = [sys.executable, "-m", "dask", "worker", scheduler.scheduler_address, "--no-nanny", "--no-dashboard"]
        with subprocess.Popen([*command, "--local-directory", tmp_path], stderr=subprocess.DEVNULL) as worker:
            scheduler.wait_for_workers(1, timeout=60)
            threading.Timer(0.5, worker.kill).start()
            with pytest.raises(WorkersError, match="its workers have gone"):
                workers.on_workers(time.sleep, [300], scheduler.scheduler_address)


def test_a_process_that_is_killed_is_one_line():
    with pytest.raises(WorkersError, match=r"^a process was ended, .* --scheduler processes:1$"):
        workers.on_workers(os._exit, [9], "processes:3")


def parent_and_sleep(path: Path) -> None:
    (path / str(os.getpid())).touch()
    time.sleep(300)


@pytest.mark.parametrize(
    ("how", "terminal"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)],
    ids=["Ctrl-C", "an interrupt of this process", "its end", "its death"],
)
def test_no_process_and_no_traceback_is_left(tmp_path: Path, how: signal.Signals, terminal: bool):
    code = (
        "from pathlib import Path\nfrom mla_diag.diagnose.workers import on_workers\n"
        "from tests.diagnose.test_workers import parent_and_sleep\n"
        f"if __name__ == '__main__': on_workers(parent_and_sleep, [Path({str(tmp_path)!r})] * 9, 'processes:2')\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    with subprocess.Popen(
        [sys.executable, tmp_path / "main.py"], env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as parent:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        children = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
        (os.killpg if terminal else os.kill)(parent.pid, how)
        for child in children:
            for _ in range(200):
                if not alive(child):
                    break
                time.sleep(0.05)
            assert not alive(child)
        _, said = parent.communicate(timeout=20)
    assert said.count(b"Traceback") <= (how == signal.SIGINT)  # the parent's own, where no command catches it


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_dask_is_an_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'mla-diag\[cluster\]'"):
        workers.on_workers(str, [1], "tcp://gpu1:8786")
    assert workers.on_workers(str, [1], "processes") == ["1"]
    assert workers.on_workers(str, [], "processes") == []
