"""Columns to Holistic Trace Analysis (PyPI `traceinsight`, import name `hta`), without writing or parsing a trace."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from mla_diag.errors import UsageError
from mla_diag.trace.columns import MISSING, Ids, Ints, integers
from mla_diag.trace.model import DeviceKind, Table, Trace

_DRIVER_CALL = re.compile(r"(?:cu|hip)(?:[A-Z]|$)")
_DEVICE_CATEGORIES = {DeviceKind.KERNEL: "kernel", DeviceKind.MEMCPY: "gpu_memcpy", DeviceKind.MEMSET: "gpu_memset"}
_NANOS_PER_MICRO = 1000


def to_hta(traces: Iterable[Trace], *, include_last_profiler_step: bool = False) -> Any:
    """Hand traces to Holistic Trace Analysis: `to_hta([trace]).get_gpu_kernel_breakdown(visualize=False)`.

    Times stay exact. HTA's own reader rounds begins up and ends down to whole microseconds, which takes 3 to 18 % off
    short kernels and can make a sum negative (HTA#317); reading here avoids that, and its sums by kernel are ours. Its
    analyzers have faults of their own: the breakdown by kernel type still drops fractions of a microsecond, and some
    raise on a trace without device work. Without `ProfilerStep#` spans, which a server's traces lack, it keeps all
    events; with several, it drops the device work of the last. Its critical path needs `cuda_sync` events, which are
    not kept. Left out are Python frames, as in its own reader, and the device's shadows of ranges, which are no work.

    Args:
        traces: One a rank, or merged traces, which are split. A trace that does not say its rank, or says one that is
            taken, gets the lowest that is free.
        include_last_profiler_step: As in HTA's `TraceAnalysis`.

    Returns:
        An `hta.trace_analysis.TraceAnalysis`.

    Raises:
        UsageError: HTA is not installed, or there are no traces.
    """
    try:
        from hta.common.trace import Trace as HtaTrace  # noqa: PLC0415 - an extra
        from hta.common.trace import add_iteration, transform_correlation_to_index  # noqa: PLC0415
        from hta.trace_analysis import TraceAnalysis  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"Holistic Trace Analysis is missing ({error}); pip install 'mla-diag[hta]'") from error

    container = HtaTrace(trace_files={})
    symbols = container.symbol_table
    for part in (part for trace in traces for part in trace.by_rank()):
        rank = _free_rank(part.rank, container.traces)
        symbols.add_symbols([*part.names, *_categories(part)])
        frame = transform_correlation_to_index(_events(part, symbols.get_sym_id_map()), symbols)
        add_iteration(frame, symbols)
        container.traces[rank] = frame
        container.trace_files[rank] = str(part.path)
        container.meta_data[rank] = {**part.metadata, "device_type": "NVIDIA GPU"}
    if not container.traces:
        raise UsageError("no traces to hand to Holistic Trace Analysis")
    container.align_and_filter_trace(include_last_profiler_step)
    for rank, frame in container.traces.items():
        container.traces[rank] = frame.set_index("index", drop=False).rename_axis(None)
    container.is_parsed = True
    analysis = TraceAnalysis.__new__(TraceAnalysis)  # its constructor parses files
    analysis.t = container
    return analysis


def _free_rank(wanted: int | None, taken: dict[int, Any]) -> int:
    if wanted is not None and wanted not in taken:
        return wanted
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)


def _categories(trace: Trace) -> set[str]:
    present = {_DEVICE_CATEGORIES[DeviceKind(kind)] for kind in np.unique(trace.device_events.kind)}
    return present | {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}


def _events(trace: Trace, ids: dict[str, int]) -> pd.DataFrame:
    """HTA's table of events of all kinds, in order of their begin; times in microseconds from the first."""
    device, launches = trace.device_events, trace.launches
    driver = np.array([bool(_DRIVER_CALL.match(name)) for name in trace.names] or [False])
    kinds = np.array([ids.get(category, MISSING) for category in _DEVICE_CATEGORIES.values()], np.int64)
    calls = np.where(driver[launches.name], ids["cuda_driver"], ids["cuda_runtime"])
    symbols = np.array([ids[name] for name in trace.names], np.int64)
    parts = [
        _host(trace, trace.ops, np.full(len(trace.ops), ids["cpu_op"]), external_id=trace.ops.external_id),
        _host(trace, trace.spans, np.full(len(trace.spans), ids["user_annotation"])),
        _host(trace, launches, calls, external_id=launches.external_id, correlation=launches.correlation),
        _rows(
            device,
            cat=kinds[device.kind],
            pid=device.device,
            tid=device.stream,
            stream=device.stream,
            correlation=device.correlation,
            external_id=device.external_id,
            bytes=device.bytes,
        ),
    ]
    events = pd.concat(parts, ignore_index=True).sort_values("start", kind="stable", ignore_index=True)
    begin = events.pop("start")
    events["ts"] = (begin - begin.min()) / _NANOS_PER_MICRO
    events["dur"] = events.pop("duration") / _NANOS_PER_MICRO
    events["end"] = events["ts"] + events["dur"]
    events["name"] = symbols[events["name"]]
    gigabytes_a_second = events["bytes"] / (events["dur"] * _NANOS_PER_MICRO).clip(lower=1)
    events["memory_bw_gbps"] = gigabytes_a_second.where(events["bytes"] >= 0, 0.0)
    events.insert(0, "index", events.index)
    return events


def _host(trace: Trace, table: Table, category: Ints, **columns: Ints) -> pd.DataFrame:
    pids, tids = (integers([thread[part] for thread in trace.threads]) for part in (0, 1))
    return _rows(table, cat=category, pid=pids[table.thread], tid=tids[table.thread], **columns)


def _rows(table: Table, **columns: Ints | Ids) -> pd.DataFrame:
    """The columns that every event has in HTA; -1 where an event has none."""
    absent = dict.fromkeys(("stream", "correlation", "external_id", "bytes"), MISSING)
    times = {"name": table.name, "start": table.start, "duration": table.duration}
    return pd.DataFrame({**times, **columns}).assign(**{key: absent[key] for key in absent if key not in columns})
