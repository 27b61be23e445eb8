"""One profile of a live server: bounded, alone, and over when it is over, whatever happens."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.errors import ServerError
from mla_diag.server.capture import Capture, CapturePlan, Say
from mla_diag.server.client import Client
from mla_diag.server.connection import Timeouts
from mla_diag.server.load import Load, LoadPlan
from mla_diag.server.trace_files import TraceDirectory
from tests.server.stand_in import StandIn

pytestmark = pytest.mark.usefixtures("_impatient")

QUICK = Timeouts(connect=2, answer=1, generate=2, export=2.5)
WAVE = LoadPlan(batch=1, input_len=10, cached_len=0, output_len=9)
BY_STAGE = CapturePlan(steps=3, by_stage=True, stacks=False)
TRAFFIC = CapturePlan(steps=3, by_stage=False, stacks=False, traffic_timeout=1.0)
STAGES = ("TP-0-EXTEND", "TP-0-DECODE")


@pytest.fixture
def traces(recordings: Path) -> dict[str, Path]:
    return dict.fromkeys((*STAGES, "TP-0"), recordings / "base-graph-decode.trace.json.gz")


def capture_of(
    server: StandIn, folder: Path, plan: CapturePlan = BY_STAGE, *, seen: bool = True, say: Say | None = None
) -> Capture:
    client = Client(server.url, timeouts=QUICK)
    directory = TraceDirectory(str(folder), str(folder) if seen else None)
    return Capture(client, parse_server_info(server.info), directory, plan, say or [].append)


def carry_out(server: StandIn, capture: Capture, plan: CapturePlan = BY_STAGE) -> Capture:
    with capture:
        capture.run(Load(Client(server.url, timeouts=QUICK), WAVE) if plan.by_stage else None)
    return capture


def captured(server: StandIn, folder: Path, plan: CapturePlan = BY_STAGE, *, seen: bool = True) -> Capture:
    return carry_out(server, capture_of(server, folder, plan, seen=seen), plan)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []


def assert_left_alone(server: StandIn) -> None:
    """The profiler was stopped, and what waits for a first step was armed for one that never comes."""
    assert server.asked("stop_profile")
    assert server.asked("start_profile")[-1]["start_step"] > 1 << 32


def test_both_stages_of_a_wave(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={name: traces[name] for name in STAGES}) as server:
        assert captured(server, tmp_path / "x").seconds > 0
        (request,) = server.asked("start_profile")
        assert server.asked("stop_profile") == []
    assert request == {
        "output_dir": str(tmp_path / "x"),
        "num_steps": 3,
        "record_shapes": True,
        "with_stack": False,
        "activities": ["CPU", "GPU"],
        "profile_by_stage": True,
    }
    assert names(tmp_path / "x") == [f"1795971432.25-{name}.trace.json.gz" for name in sorted(STAGES)]


def test_503_while_it_exports_is_waited_for_and_said(tmp_path: Path, traces: dict[str, Path]):
    said: list[str] = []
    # One file of the two, so that the files alone do not end the wait.
    with StandIn(traces={STAGES[0]: traces["TP-0"]}, export_seconds=1.2) as server:
        carry_out(server, capture_of(server, tmp_path / "x", say=said.append))
    assert any("exports its traces" in line for line in said)


def test_a_load_that_outlasts_the_capture_is_aborted(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={name: traces[name] for name in STAGES}, lingers=True) as server:
        begin = time.monotonic()
        captured(server, tmp_path / "x")
        assert time.monotonic() - begin < 4
        assert server.asked("abort_request")


@pytest.mark.parametrize("answer", [(200, '{"success": false, "message": "in progress"}'), (500, "Internal")])
def test_a_server_that_is_profiling_already_is_left_to_it(tmp_path: Path, answer: tuple[int, str]):
    with StandIn(answers={"start_profile": answer}) as server:
        with pytest.raises(ServerError, match="refused to start"):
            captured(server, tmp_path / "x")
        assert server.asked("stop_profile") == []
        assert server.asked("generate") == []


def test_a_second_capture_from_this_host_is_refused_before_the_server_is_asked(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={name: traces[name] for name in STAGES}) as server:
        first = capture_of(server, tmp_path / "x")
        with first:
            with pytest.raises(ServerError, match=r"another `mla-diag profile` of it runs here \(process \d+\)"):
                captured(server, tmp_path / "y")
            assert server.requests == []
            first.run(Load(Client(server.url), WAVE))
        captured(server, tmp_path / "z")
    assert len(names(tmp_path / "z")) == 2


@pytest.mark.parametrize(
    "behaviour",
    [{"answers": {"generate": (500, "out of memory")}}, {"hangs": {"generate"}}],
    ids=["requests that fail", "requests that hang"],
)
def test_a_load_that_fails_leaves_no_profiler(tmp_path: Path, behaviour: dict[str, Any]):
    with StandIn(**behaviour) as server:
        with pytest.raises(ServerError, match="/generate"):
            captured(server, tmp_path / "x")
        assert_left_alone(server)


def test_ctrl_c_leaves_no_profiler_and_a_following_capture_works(tmp_path: Path, traces: dict[str, Path]):
    def press(said: str) -> None:
        if said.startswith("the load runs"):
            raise KeyboardInterrupt

    with StandIn(traces={STAGES[0]: traces["TP-0"]}, lingers=True) as server:
        with pytest.raises(KeyboardInterrupt):
            carry_out(server, capture_of(server, tmp_path / "x", say=press))
        assert_left_alone(server)
        assert server.asked("abort_request")
        server.traces, server.lingers = {name: traces[name] for name in STAGES}, False
        captured(server, tmp_path / "y")
    assert len(names(tmp_path / "y")) == 2


def test_a_stop_that_never_answers_is_said_and_hides_nothing(tmp_path: Path):
    with StandIn(answers={"generate": (500, "out of memory")}, hangs={"stop_profile"}) as server:
        capture = capture_of(server, tmp_path / "x")
        with pytest.raises(ServerError, match="out of memory"):
            carry_out(server, capture)
    assert str(capture.left_running).startswith("the profiler may still be running: ")


def test_a_start_that_never_answers_may_have_started(tmp_path: Path):
    with StandIn(hangs={"start_profile"}) as server:
        with pytest.raises(ServerError, match="/start_profile did not answer"):
            captured(server, tmp_path / "x")
        assert server.asked("stop_profile")


def test_a_server_that_dies_under_the_load_is_not_waited_for(tmp_path: Path):
    begin = time.monotonic()
    with StandIn(dies_in="generate") as server:
        capture = capture_of(server, tmp_path / "x")
        with pytest.raises(ServerError):
            carry_out(server, capture)
    assert time.monotonic() - begin < 10
    assert capture.left_running is None


def test_a_rank_that_never_writes_ends_in_a_stop(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={name: traces[name] for name in STAGES}) as server:
        server.info |= {"tp_size": 2}
        captured(server, tmp_path / "x")
        assert_left_alone(server)
    assert len(names(tmp_path / "x")) == 2


def test_a_capture_out_of_sight_is_ended_by_the_servers_word(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={name: traces[name] for name in STAGES}) as server:
        captured(server, tmp_path / "x", seen=False)
        assert_left_alone(server)


def test_other_peoples_traffic_is_bounded_in_forward_passes(tmp_path: Path, traces: dict[str, Path]):
    with StandIn(traces={"TP-0": traces["TP-0"]}) as server:

        def traffic() -> None:
            with Client(server.url) as client:
                while not server.asked("start_profile"):
                    time.sleep(0.02)
                client.generate({"input_ids": [[1]], "sampling_params": {"max_new_tokens": 9}})

        user = threading.Thread(target=traffic)
        user.start()
        captured(server, tmp_path / "x", replace(TRAFFIC, traffic_timeout=30))
        user.join()
        (request,) = server.asked("start_profile")
        assert len(server.asked("generate")) == 1
    assert (request["num_steps"], request["start_step"]) == (3, 1)
    assert "profile_by_stage" not in request
    assert len(names(tmp_path / "x")) == 1


def test_a_file_on_another_host_is_whole_once_it_has_stopped_growing(
    tmp_path: Path, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mla_diag.server.capture._PAUSE", 0.3)  # several parts come in the time from look to look
    content = traces["TP-0"].read_bytes()
    folder = tmp_path / "x"

    def export() -> None:
        folder.mkdir()
        with (folder / "1-TP-0.trace.json.gz").open("wb") as file:
            for part in range(10):
                file.write(content[part * len(content) // 10 : (part + 1) * len(content) // 10])
                file.flush()
                time.sleep(0.1)

    with StandIn() as server:
        capture = Capture(
            Client(server.url, timeouts=QUICK),
            parse_server_info(server.info),
            TraceDirectory(str(folder), folder.as_uri()),
            replace(TRAFFIC, traffic_timeout=30),
            [].append,
        )
        exporter = threading.Thread(target=export)
        exporter.start()
        carry_out(server, capture, TRAFFIC)
        size = (folder / "1-TP-0.trace.json.gz").stat().st_size
        exporter.join()
    assert size == len(content)
    assert server.asked("stop_profile") == []  # it ended by itself


def test_no_traffic_is_one_line_and_leaves_nothing_armed(tmp_path: Path):
    with StandIn() as server:
        with pytest.raises(ServerError, match="no forward pass in 1 s"):
            captured(server, tmp_path / "x", TRAFFIC)
        assert_left_alone(server)
        assert server.asked("generate") == []
