from __future__ import annotations

import gc

import numpy as np

from mla_diag.trace import records
from tests.trace.reading import every_kind_of_event, read
from tests.trace_builder import TraceBuilder


def test_frames_of_serving_packages_are_kept_and_others_not(tmp_path):
    builder = TraceBuilder()
    for at in range(50):
        builder.frame("torch/nn/modules/module.py(1): _call_impl", at, 1)
        builder.frame("<built-in method to of Tensor object at 0x7f00>", at, 1)
        builder.frame("/env/sglang/srt/layers/linear.py(141): forward", at, 1)
        builder.frame("vllm/v1/worker/gpu_model_runner.py(9): execute_model", at, 1)
    trace = read(tmp_path, builder)
    assert trace.event_count == 200
    assert len(trace.frames) == 100
    assert {trace.names[name] for name in trace.frames.name} == {
        "/env/sglang/srt/layers/linear.py(141): forward",
        "vllm/v1/worker/gpu_model_runner.py(9): execute_model",
    }


def test_columns_have_the_types_that_the_model_says_even_when_empty(tmp_path):
    full, empty = read(tmp_path, every_kind_of_event()), read(tmp_path, TraceBuilder())
    for table in ("device_events", "launches", "ops", "spans", "device_spans", "frames"):
        for name, column in vars(getattr(full, table)).items():
            other = getattr(getattr(empty, table), name)
            narrow = name in ("name", "thread", "dims", "types", "strides", "scalars", "grid", "block")
            assert column.dtype == other.dtype == (np.int8 if name == "kind" else np.int32 if narrow else np.int64), (
                name
            )
            assert len(other) == 0


def test_decoded_events_are_no_work_for_the_garbage_collector():
    """Millions of them are made and dropped; tracked, they made reading a quarter slower."""
    for kind in records.READ:
        assert not gc.is_tracked(kind())
        assert not kind.__struct_config__.gc
