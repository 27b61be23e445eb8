from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mla_diag.trace.link import Links, Source, captured_launches, enclosing, link, parse_source
from mla_diag.trace.model import Table, Trace
from tests.trace.reading import read
from tests.trace_builder import TraceBuilder

THREAD_A, THREAD_B = (1, 1), (1, 2)


def table(intervals: list[tuple[int, int, int]]) -> Table:
    """Intervals as (thread, start, end)."""
    thread, start, end = (np.array([row[column] for row in intervals], np.int64) for column in range(3))
    return Table(np.zeros(len(intervals), np.int32), thread.astype(np.int32), start, end - start)


def innermost(intervals: list[tuple[int, int, int]], thread: int, time: int) -> set[int]:
    """By definition: of those that hold the instant, the last begun; of those, the shortest. Equal ones are equal."""
    around = [row for row, (of, start, end) in enumerate(intervals) if of == thread and start <= time <= end]
    keys = {row: (intervals[row][1], -intervals[row][2]) for row in around}
    return {row for row in around if keys[row] == max(keys.values())}


interval = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)).map(lambda t: (t[0], t[1], t[1] + t[2]))


@given(st.lists(interval, max_size=30), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 62)), max_size=30))
@example([(0, 0, 10), (0, 5, 20), (0, 6, 8)], [(0, 12), (0, 9), (0, 7), (0, 21)])  # the second outlives its parent
def test_enclosing_is_the_last_begun_that_has_not_ended(intervals, asked):
    threads = np.array([thread for thread, _ in asked], np.int32)
    times = np.array([time for _, time in asked], np.int64)
    found = enclosing(table(intervals), threads, times).tolist()
    for row, (thread, time) in zip(found, asked, strict=True):
        expected = innermost(intervals, thread, time)
        assert row in expected if expected else row == -1


def linked(tmp_path, builder: TraceBuilder) -> tuple[Trace, Links]:
    trace = read(tmp_path, builder)
    return trace, link(trace)


def op_names(trace: Trace, links: Links) -> dict[str, str | None]:
    """The op of each kernel, by name."""
    pairs = zip(trace.device_events.name.tolist(), links.op.tolist(), strict=True)
    return {trace.names[kernel]: None if op == -1 else trace.names[trace.ops.name[op]] for kernel, op in pairs}


def test_a_kernel_belongs_to_the_innermost_op_around_its_launch(tmp_path):
    builder = TraceBuilder()
    builder.op("aten::to", 0, 100)
    builder.op("aten::_to_copy", 5, 90)
    builder.dispatch("aten::copy_", 10, [("copy", 5000, 40)])
    builder.dispatch("aten::mul", 200, [("mul", 20, 1)])  # runs while aten::to is on the host: the clock says nothing
    assert op_names(*linked(tmp_path, builder)) == {"copy": "aten::copy_", "mul": "aten::mul"}


def test_ops_of_another_thread_do_not_count(tmp_path):
    builder = TraceBuilder()
    builder.op("aten::other", 0, 100, thread=THREAD_B)
    builder.kernel("k", 50, 1, builder.launch(10, thread=THREAD_A))
    assert op_names(*linked(tmp_path, builder)) == {"k": None}


def test_the_order_of_events_in_the_file_does_not_matter(tmp_path):
    builder = TraceBuilder()
    for number in range(20):
        builder.dispatch(f"op {number}", 100 * number, [(f"kernel {number}", 100 * number + 7, 2)])
    expected = {f"kernel {number}": f"op {number}" for number in range(20)}
    assert op_names(*linked(tmp_path, builder)) == expected
    builder.events.reverse()
    assert op_names(*linked(tmp_path, builder)) == expected
    np.random.default_rng(1).shuffle(builder.events)
    assert op_names(*linked(tmp_path, builder)) == expected


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"])
def test_every_launch_call_links_its_kernel(tmp_path, call):
    """HTA#271: cuLaunchKernelEx was not recognised; pytorch#99571: Triton's cuLaunchKernel."""
    builder = TraceBuilder()
    builder.op("op", 0, 20)
    category = "cuda_driver" if call.startswith("cuL") else "cuda_runtime"
    builder.kernel("k", 50, 1, builder.launch(5, name=call, category=category))
    trace, links = linked(tmp_path, builder)
    assert trace.names[trace.launches.name[links.launch[0]]] == call
    assert op_names(trace, links) == {"k": "op"}
    assert not links.graph.any()


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch"])
def test_kernels_of_a_graph_have_its_launch_but_neither_op_nor_source(tmp_path, call):
    """TraceLens#827: 40 graph launches against 41,960 kernels."""
    builder = TraceBuilder()
    builder.frame("sglang/srt/runner.py(7): replay", 0, 100)
    builder.op("an op around the replay", 0, 100)
    correlation = builder.launch(10, name=call)
    for number in range(5):
        builder.kernel("k", 50 + number, 1, correlation)
    trace, links = linked(tmp_path, builder)
    assert links.launch.tolist() == [0] * 5
    assert links.graph.all()
    assert op_names(trace, links) == {"k": None}
    assert links.source.tolist() == [-1] * 5


def test_a_kernel_whose_launch_was_not_recorded_is_linked_by_its_op_id_alone(tmp_path):
    builder = TraceBuilder()
    op = builder.op("aten::copy_", 0, 20)
    builder.kernel("with id", 50, 1, 77, id=op)
    builder.kernel("without", 60, 1, 78)
    builder.kernel("without correlation", 70, 1)
    trace, links = linked(tmp_path, builder)
    assert links.launch.tolist() == [-1, -1, -1]
    assert op_names(trace, links) == {"with id": "aten::copy_", "without": None, "without correlation": None}


def test_time_outranks_a_stale_op_id(tmp_path):
    """Traces of 2022 name an op that ended before the launch."""
    builder = TraceBuilder()
    stale = builder.op("stale", 0, 10)
    builder.op("around", 20, 30)
    correlation = builder.launch(25, id=stale)
    builder.kernel("k", 50, 1, correlation, id=stale)
    assert op_names(*linked(tmp_path, builder)) == {"k": "around"}


def test_a_launch_without_a_correlation_links_nothing(tmp_path):
    builder = TraceBuilder()
    builder.complete("cuda_runtime", "cudaLaunchKernel", 1, 2, THREAD_A, {})
    builder.kernel("k", 50, 1)
    _, links = linked(tmp_path, builder)
    assert links.launch.tolist() == [-1]


def test_a_trace_without_launches_or_device_events_links_nothing(tmp_path):
    """kineto#996, pytorch#117935: no kernels where another profiler holds the device."""
    only_ops, only_kernels = TraceBuilder(), TraceBuilder()
    only_ops.op("aten::mul", 1, 2)
    only_kernels.kernel("k", 1, 2, 3)
    assert len(linked(tmp_path, only_ops)[1].launch) == 0
    _, links = linked(tmp_path, only_kernels)
    assert (links.launch.tolist(), links.op.tolist(), links.source.tolist()) == ([-1], [-1], [-1])
    assert links.sources == []


def test_the_source_is_the_innermost_serving_frame(tmp_path):
    builder = TraceBuilder()
    builder.frame("/usr/lib/python3.12/site-packages/sglang/srt/models/deepseek.py(10): forward", 0, 100)
    builder.frame("/usr/lib/python3.12/site-packages/sglang/srt/layers/mla.py(20): forward_decode", 10, 50)
    builder.frame("torch/_ops.py(1): __call__", 20, 30)
    builder.frame("<built-in method to of Tensor object at 0x7f00>", 21, 20)
    builder.dispatch("aten::copy_", 22, [("inner", 500, 1)], duration=10)
    builder.dispatch("aten::copy_", 70, [("outer", 600, 1)], duration=10)
    builder.dispatch("aten::copy_", 200, [("none", 700, 1)], duration=10)
    trace, links = linked(tmp_path, builder)
    sources = [links.sources[number] if number != -1 else None for number in links.source.tolist()]
    assert [trace.names[name] for name in trace.device_events.name] == ["inner", "outer", "none"]
    assert sources == [
        Source("sglang/srt/layers/mla.py", 20, "forward_decode"),
        Source("sglang/srt/models/deepseek.py", 10, "forward"),
        None,
    ]


@pytest.mark.parametrize(
    ("frame", "source"),
    [
        ("sglang/srt/layers/linear.py(141): forward", ("sglang/srt/layers/linear.py", 141, "forward")),
        ("/a/b/sglang/srt/x.py(1): <lambda>", ("sglang/srt/x.py", 1, "<lambda>")),
        ("/home/sglang/env/sglang/srt/x.py(1): f", ("sglang/srt/x.py", 1, "f")),
        ("C:\\lib\\vllm\\v1\\worker.py(2): g", ("vllm/v1/worker.py", 2, "g")),
        ("/a/mysglang/x.py(1): f", None),
        ("torch/nn/modules/module.py(1): _call_impl", None),
        ("<built-in method sglang/x.py>", None),
        ("nn.Module: Linear_0", None),
        ("", None),
    ],
)
def test_frames_of_serving_packages_are_told_from_others(frame, source):
    assert parse_source(frame) == (None if source is None else Source(*source))


def captured(tmp_path, *calls: tuple[str, tuple[int, int]]) -> list[bool]:
    """Which of some calls, each by its name and thread, are made while a graph is captured."""
    builder = TraceBuilder()
    for number, (name, thread) in enumerate(calls):
        launch = builder.launch(10 * number, name=name.removesuffix(RAN), thread=thread)
        if name.endswith(RAN):
            builder.kernel("gemm", 10 * number + 5, 1, launch)
    trace = read(tmp_path, builder)
    return captured_launches(trace, link(trace)).tolist()


RAN = ", which led to a kernel"
BEGIN, KERNEL, END = "cudaStreamBeginCapture", "cudaLaunchKernel", "cudaStreamEndCapture"


def test_a_capture_lasts_from_its_beginning_to_its_end_on_every_thread(tmp_path):
    """Autograd launches the backward pass of a captured step from a thread of its own."""
    calls = [(KERNEL, THREAD_A), (BEGIN, THREAD_A), (KERNEL, THREAD_B), (END, THREAD_A), (KERNEL, THREAD_B)]
    assert captured(tmp_path, *calls)[::2] == [False, True, False]


def test_a_capture_that_was_under_way_when_the_trace_began(tmp_path):
    calls = [(name, THREAD_A) for name in (KERNEL, END, KERNEL, BEGIN, KERNEL)]
    assert captured(tmp_path, *calls)[::2] == [True, False, True]


def test_a_capture_whose_other_end_is_missing_holds_no_launch_that_ran(tmp_path):
    """One lost call made all launches of the trace captured ones, and none of them lost."""
    ran = KERNEL + RAN
    end = [(name, THREAD_A) for name in (KERNEL, ran, KERNEL, END, KERNEL)]
    assert captured(tmp_path, *end) == [False, False, True, False, False]
    begin = [(name, THREAD_A) for name in (KERNEL, BEGIN, KERNEL, ran, KERNEL)]
    assert captured(tmp_path, *begin)[2:] == [True, False, False]


def test_captures_within_and_beside_each_other(tmp_path):
    calls = [(BEGIN, THREAD_A), (BEGIN, THREAD_B), (KERNEL, THREAD_B), (END, THREAD_A), (KERNEL, THREAD_B)]
    calls += [(END, THREAD_B), (KERNEL, THREAD_A), (BEGIN, THREAD_A), (END, THREAD_A), (KERNEL, THREAD_A)]
    assert [flag for flag, (name, _) in zip(captured(tmp_path, *calls), calls, strict=True) if name == KERNEL] == [
        True,
        True,
        False,
        False,
    ]
