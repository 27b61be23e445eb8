from __future__ import annotations

import importlib.util

import pytest

from mla_diag.errors import UsageError
from mla_diag.trace.decode import read_trace
from mla_diag.trace.hta import to_hta
from tests.trace.reading import every_kind_of_event, read
from tests.trace_builder import TraceBuilder

HTA = importlib.util.find_spec("hta") is not None
needs_hta = pytest.mark.skipif(not HTA, reason="Holistic Trace Analysis is not installed: pip install 'mla-diag[hta]'")


@pytest.mark.skipif(HTA, reason="Holistic Trace Analysis is installed")
def test_without_hta_the_error_says_what_to_install(tmp_path):
    with pytest.raises(UsageError, match=r"pip install 'mla-diag\[hta\]'"):
        read(tmp_path, every_kind_of_event()).to_hta()


@needs_hta
def test_hta_finds_the_device_time_that_we_find(recordings):
    """HTA#317: its own reader rounds to microseconds; 355,141 us of kernels here, not 362,240; 71 of copies, not 89."""
    trace = read_trace(recordings / "base-graph-decode.trace.json.gz")
    _, kernels = trace.to_hta().get_gpu_kernel_breakdown(visualize=False)
    found = kernels.groupby("kernel_type")["sum (us)"].sum()
    events = trace.device_events
    assert found["COMPUTATION"] == pytest.approx(events.duration[events.kind == 0].sum() / 1000)
    assert found["MEMORY"] == pytest.approx(events.duration[events.kind != 0].sum() / 1000)


@needs_hta
def test_each_device_event_is_joined_to_its_launch(tmp_path):
    frame = read(tmp_path, every_kind_of_event()).to_hta().t.traces[3]
    device = frame[frame["stream"] != -1]
    assert len(device) == 19
    launches = frame.loc[device["index_correlation"]]
    assert (launches["correlation"].to_numpy() == device["correlation"].to_numpy()).all()
    assert (launches["stream"] == -1).all()
    assert (frame["ts"].diff().dropna() >= 0).all()
    assert frame["ts"].min() == 0


@needs_hta
def test_every_trace_has_a_rank_of_its_own(tmp_path):
    traces = []
    for rank in (1, None, 1, 0):
        builder = TraceBuilder(rank=rank)
        builder.dispatch("aten::mul", 1, [("mul", 5, 1)])
        traces.append(read(tmp_path, builder))
    analysis = to_hta(traces)
    assert analysis.t.get_ranks() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no traces"):
        to_hta([])
