from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from mla_diag.trace.decode import read_trace
from mla_diag.trace.model import Damage, DeviceKind
from tests.trace.reading import every_kind_of_event, read, rows
from tests.trace_builder import TraceBuilder

UNDAMAGED = Damage()


def one(**members) -> TraceBuilder:
    """A trace of one kernel, some of its members as given, between two ordinary ones."""
    trace = TraceBuilder()
    trace.kernel("before", 1, 1, 1)
    trace.event(
        **{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 5, "args": {}, **members}
    )
    trace.kernel("after", 20, 1, 3)
    return trace


def test_every_kind_of_event_is_in_its_table(tmp_path):
    trace = read(tmp_path, every_kind_of_event())
    device = [(trace.names[name], kind) for name, kind in zip(trace.device_events.name, trace.device_events.kind)]  # noqa: B905
    assert Counter(kind for _, kind in device) == {DeviceKind.KERNEL: 11, DeviceKind.MEMCPY: 4, DeviceKind.MEMSET: 4}
    assert len(trace.ops) == 8
    assert len(trace.launches) == 18
    assert (len(trace.spans), len(trace.device_spans), len(trace.frames)) == (1, 1, 1)
    assert trace.spans.start.tolist() == [1_000_125]
    assert trace.metadata["distributedInfo"]["rank"] == 3
    assert sorted(trace.device_events.bytes.tolist()) == [-1] * 11 + [64] * 4 + [4096] * 4


def test_python_frames_are_left_out_on_request_and_still_counted(tmp_path):
    with_frames = read(tmp_path, every_kind_of_event())
    without = read(tmp_path, every_kind_of_event(), frames=False)
    assert len(without.frames) == 0
    assert without.event_count == with_frames.event_count
    assert without.damage == UNDAMAGED
    assert {**rows(without), "frames": []} == {**rows(with_frames), "frames": []}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    "odd",
    [
        {"cat": "something_new"},
        {"cat": None},
        {"cat": 7},
        {"cat": ["kernel"]},
        {"cat": ""},
    ],
    ids=str,
)
def test_events_of_categories_that_nothing_reads_cost_nothing(tmp_path, odd, position):
    trace = TraceBuilder()
    for at in range(3):
        if at == position:
            trace.event(ph="X", name="n", pid=[1], ts="never", args="x", **odd)
        trace.kernel("k", at, 1)
    found = read(tmp_path, trace)
    assert len(found.device_events) == 3
    assert found.event_count == 4
    assert found.damage == UNDAMAGED


def test_a_new_category_in_every_event_stays_fast(tmp_path):
    trace = TraceBuilder()
    for number in range(5_000):
        trace.event(ph="X", cat=f"category {number}", name="n", pid=0, tid=0, ts=number, dur=1)
        trace.kernel("k", number, 1)
    begin = time.perf_counter()
    found = read(tmp_path, trace)
    assert time.perf_counter() - begin < 3  # a type of its own for each took minutes
    assert len(found.device_events) == 5_000
    assert found.damage == UNDAMAGED


def test_events_without_category_between_all_others_stay_fast(tmp_path):
    plain, mixed = TraceBuilder(), TraceBuilder()
    for number in range(20_000):
        plain.kernel("k", number, 1)
        mixed.kernel("k", number, 1)
        for trace, category in ((plain, {"cat": "overhead"}), (mixed, {})):
            trace.event(ph="M", name="thread_name", pid=0, tid=number, ts=0, args={"name": "t"}, **category)
    took = []
    for trace in (plain, mixed):
        trace.write(tmp_path / "x.json")
        begin = time.perf_counter()
        assert len(read_trace(tmp_path / "x.json").device_events) == 20_000
        took.append(time.perf_counter() - begin)
    assert took[1] < 6 * took[0]


@pytest.mark.parametrize(
    ("members", "start", "duration"),
    [
        ({"ts": "10.5"}, 10_500, 5000),
        ({"dur": None}, 10_000, 0),
        ({"dur": "2.5"}, 10_000, 2500),
        ({"dur": "long"}, 10_000, 0),
        ({"dur": -3}, 10_000, 0),
        ({"dur": [1]}, 10_000, 0),
        ({"dur": True}, 10_000, 1000),
        ({"pid": {"id": 1}}, 10_000, 5000),
        ({"pid": "Spans", "tid": None}, 10_000, 5000),
        ({"pid": 0.0, "tid": True}, 10_000, 5000),
        ({"name": None}, 10_000, 5000),
        ({"name": 5}, 10_000, 5000),
        ({"args": None}, 10_000, 5000),
        ({"args": []}, 10_000, 5000),
        ({"args": "none"}, 10_000, 5000),
        ({"args": {"External id": [1], "correlation": {}}}, 10_000, 5000),
        ({"args": {"": 1, "stream": "7", "grid": "many", "block": None, "bytes": "4096"}}, 10_000, 5000),
        ({"args": {"External id": 2**64 - 1, "correlation": 2**63 + 1, "device": "0"}}, 10_000, 5000),
    ],
    ids=str,
)
def test_odd_members_cost_at_most_themselves(tmp_path, members, start, duration):
    trace = read(tmp_path, one(**members))
    assert len(trace.device_events) == 3
    assert sorted(zip(trace.device_events.start.tolist(), trace.device_events.duration.tolist(), strict=True))[1] == (
        start,
        duration,
    )
    assert trace.damage.lost_events == 0
    assert trace.device_events.correlation.tolist()[::2] == [1, 3]


@pytest.mark.parametrize("members", [{"ts": None}, {"ts": "soon"}, {"ts": [1]}, {"ts": 2**70}], ids=str)
def test_an_event_without_a_time_is_lost_and_counted(tmp_path, members):
    trace = read(tmp_path, one(**members))
    assert [trace.names[name] for name in trace.device_events.name] == ["before", "after"]
    assert trace.damage == Damage(lost_events=1, untimed_device_events=1)


def test_missing_members_are_missing_values(tmp_path):
    trace = TraceBuilder()
    trace.event(cat="kernel", ts=5)
    trace.event(cat="gpu_memcpy", ts=5)
    trace.event(cat="cpu_op", ts=5)
    trace.event(cat="cuda_runtime", ts=5)
    trace.event(cat="user_annotation", ts=5)
    found = read(tmp_path, trace)
    assert found.damage == UNDAMAGED
    events = found.device_events
    for column in (events.correlation, events.external_id, events.stream, events.device, events.bytes):
        assert column.tolist() == [-1, -1]
    assert found.values[events.grid[0]] == b""
    assert found.threads[events.thread[0]] == (None, None)


def test_clamped_durations_are_counted(tmp_path):
    """kineto#646: an end of 0 gave a negative duration; catapult#1506 has one of -877 s."""
    trace = read(tmp_path, one(dur=-877_000_000))
    assert trace.device_events.duration.tolist() == [1000, 0, 1000]
    assert trace.damage.clamped_durations == 1


@pytest.mark.parametrize("written", ["null", "NaN", "-3", "1e999", '"long"', "N/A", None])
def test_a_complete_event_without_a_duration_is_counted_as_one_and_not_as_repaired(tmp_path, written):
    member = b"" if written is None else b', "dur": ' + written.encode()
    trace = read(tmp_path, one().text().replace(b', "dur": 5', member))
    assert trace.device_events.duration.tolist() == [1000, 0, 1000]
    assert trace.damage == Damage(clamped_durations=1, clamped_device_durations=1)


def test_an_op_without_a_duration_is_none_of_the_device(tmp_path):
    builder = TraceBuilder()
    builder.event(ph="X", cat="cpu_op", name="aten::mm", pid=1, tid=1, ts=5)
    assert read(tmp_path, builder).damage == Damage(clamped_durations=1)


@pytest.mark.parametrize("phase", ["i", "s", "f", "B", "e"])
def test_only_complete_events_need_a_duration(tmp_path, phase):
    builder = TraceBuilder()
    builder.event(ph=phase, cat="user_annotation", name="mark", pid=1, tid=1, ts=5)
    builder.event(ph=phase, cat="cpu_op", name="mark", pid=1, tid=1, ts=5)
    assert read(tmp_path, builder).damage == UNDAMAGED


def test_a_member_that_comes_twice_counts_as_its_last(tmp_path):
    text = b'[{"cat": "kernel", "name": "k", "ts": 1, "args": {"stream": 1, "device": 0}, "dur": 1,'
    text += b' "args": {"stream": 9, "stream": 7, "device": 0, "": 1}}]'
    trace = read(tmp_path, text)
    assert trace.device_events.stream.tolist() == [7]
    assert trace.damage == UNDAMAGED


def test_the_device_of_an_event_is_its_process_where_nothing_else_says(tmp_path):
    trace = TraceBuilder()
    trace.complete("kernel", "k", 1, 1, (3, 9), {"correlation": 1})
    events = read(tmp_path, trace).device_events
    assert (events.device.tolist(), events.stream.tolist()) == ([3], [9])


def test_a_driver_launch_is_a_launch(tmp_path):
    """HTA#271: cuLaunchKernelEx was not recognised, so its kernels were orphans; pytorch#99571: cuLaunchKernel."""
    trace = TraceBuilder()
    for name in ("cuLaunchKernelEx", "cuLaunchKernel"):
        trace.kernel("triton", 10, 1, trace.launch(1, name=name, category="cuda_driver"))
    found = read(tmp_path, trace)
    assert found.launches.correlation.tolist() == found.device_events.correlation.tolist()


def test_a_trace_without_memsets_or_ranks_or_steps_is_a_trace(tmp_path):
    """HTA#16: no cudaMemsetAsync was a KeyError; HTA#17, HTA#107: nor was a rank; HTA 0.6.0: nor ProfilerStep."""
    trace = TraceBuilder(rank=None, device=None)
    trace.dispatch("aten::mul", 1, [("mul", 5, 1)])
    found = read(tmp_path, trace)
    assert found.rank is None
    assert found.device is None
    assert len(found.device_events) == 1


def test_progress_reaches_the_end_of_the_file(tmp_path):
    path = every_kind_of_event().write(tmp_path / "t.json.gz")
    seen: list[tuple[int, int]] = []
    read_trace(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size,) * 2


def test_every_shared_trace_is_read_whole(shared_traces: Path):
    paths = sorted(shared_traces.rglob("*.json.gz"))
    assert paths
    for path in paths:
        if path.stat().st_size < 2_000_000:
            assert read_trace(path, frames=False).damage == UNDAMAGED, path
