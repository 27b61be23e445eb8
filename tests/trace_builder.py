"""Small traces for tests, event by event, in the text layouts that profilers and their tools write.

    trace = TraceBuilder()
    trace.span("step[DECODE bs=1]", 0, 100)
    trace.dispatch("aten::copy_", 10, kernels=[("copy_kernel", 120, 40)], dims=[[495553, 1, 576], [495553, 1, 576]])
    path = trace.write(tmp_path / "decode.trace.json.gz")

All times are microseconds, as traces have them: int, float, or Decimal where a double would round. A thread is a
`(pid, tid)`. Ids and correlations are numbered from 1 unless given.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterable, Sequence
from decimal import ROUND_DOWN, Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

Micros = int | float | Decimal
Thread = tuple[int | str, int | str]

HOST: Thread = (538, 538)
H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "numSms": 132}

_json = msgspec.json.Encoder(decimal_format="number")


class Layout(Enum):
    """How the text of a trace is laid out."""

    KINETO = "kineto"
    ONE_LINE = "one line"
    COMPACT = "one line, no spaces"
    INDENTED = "indented, all metadata first"
    METADATA_LAST = "kineto, all metadata last"
    BARE_ARRAY = "bare array of events, no metadata"


class KernelRun(NamedTuple):
    """A kernel to be launched: what runs, from when, how long, and on what grid and block."""

    name: str
    start: Micros
    duration: Micros
    grid: Sequence[int] = (132, 1, 1)
    block: Sequence[int] = (128, 1, 1)
    stream: int = 7


class TraceBuilder:
    """Collects events in the order of the calls, then writes them.

    Attributes:
        events: The events so far, as they will be encoded; to be changed at will.
        metadata: What stands beside the events.
    """

    def __init__(self, *, rank: int | None = 0, device: dict[str, Any] | None = H200) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {"schemaVersion": 1}
        if device is not None:
            self.metadata["deviceProperties"] = [device]
        if rank is not None:
            self.metadata["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8}
        self._ids = itertools.count(1)

    # Single events. Those that others refer to return the id or correlation to refer to.

    def event(self, **members: Any) -> None:
        """Any event, its members as given."""
        self.events.append(members)

    def complete(
        self, category: str, name: str, start: Micros, duration: Micros, thread: Thread, args: dict[str, Any]
    ) -> None:
        """A complete event of any category."""
        pid, tid = thread
        members = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}
        self.event(**members, **({"args": args} if args else {}))

    def frame(self, name: str, start: Micros, duration: Micros, *, thread: Thread = HOST) -> None:
        """A Python frame; serving code's is named like `sglang/srt/layers/linear.py(141): forward`."""
        self.complete("python_function", name, start, duration, thread, {"Python id": next(self._ids)})

    def span(self, name: str, start: Micros, duration: Micros, *, thread: Thread = HOST, id: int | None = None) -> int:
        """A `record_function` range on the host."""
        external = id or next(self._ids)
        self.complete("user_annotation", name, start, duration, thread, {"External id": external})
        return external

    def device_span(
        self, name: str, start: Micros, duration: Micros, *, stream: int = 7, device: int = 0, id: int | None = None
    ) -> int:
        """The device's side of a range, on one stream; `id` is that of the range on the host."""
        external = id or next(self._ids)
        self.complete("gpu_user_annotation", name, start, duration, (device, stream), {"External id": external})
        return external

    def op(
        self,
        name: str,
        start: Micros,
        duration: Micros,
        *,
        dims: Sequence[Any] | None = None,
        types: Sequence[str] | None = None,
        strides: Sequence[Any] | None = None,
        thread: Thread = HOST,
        id: int | None = None,
    ) -> int:
        """A PyTorch op on the host, with the shapes, types and strides of its inputs if they were recorded."""
        external = id or next(self._ids)
        recorded = {"Input Dims": dims, "Input type": types, "Input Strides": strides}
        args = {"External id": external, **{key: value for key, value in recorded.items() if value is not None}}
        self.complete("cpu_op", name, start, duration, thread, args)
        return external

    def launch(
        self,
        start: Micros,
        duration: Micros = 5,
        *,
        name: str = "cudaLaunchKernel",
        category: str = "cuda_runtime",
        thread: Thread = HOST,
        id: int | None = None,
        correlation: int | None = None,
    ) -> int:
        """A call into the runtime, or the driver (`category="cuda_driver"`)."""
        number = correlation or next(self._ids)
        args = {"correlation": number, **({} if id is None else {"External id": id})}
        self.complete(category, name, start, duration, thread, args)
        return number

    def kernel(
        self,
        name: str,
        start: Micros,
        duration: Micros,
        correlation: int | None = None,
        *,
        grid: Sequence[int] | None = (132, 1, 1),
        block: Sequence[int] | None = (128, 1, 1),
        **where: int,
    ) -> None:
        """A kernel on the device; `where` may give `stream`, `device` and `id`."""
        geometry = {key: value for key, value in {"grid": grid, "block": block}.items() if value is not None}
        self._on_device("kernel", name, start, duration, correlation, geometry, **where)

    def memcpy(
        self,
        start: Micros,
        duration: Micros,
        correlation: int | None = None,
        *,
        size: int | None,
        name: str = "Memcpy DtoD (Device -> Device)",
        **where: int,
    ) -> None:
        """A copy of `size` bytes on the device."""
        args = {} if size is None else {"bytes": size}
        self._on_device("gpu_memcpy", name, start, duration, correlation, args, **where)

    def memset(
        self, start: Micros, duration: Micros, correlation: int | None = None, *, size: int | None, **where: int
    ) -> None:
        """A fill of `size` bytes on the device."""
        args = {} if size is None else {"bytes": size}
        self._on_device("gpu_memset", "Memset (Device)", start, duration, correlation, args, **where)

    def flow(self, start: Micros, correlation: int, *, ends: bool = False, thread: Thread = HOST) -> None:
        """One end of the arrow from a launch to its kernel, which viewers draw."""
        pid, tid = thread
        arrow = {"id": correlation, "pid": pid, "tid": tid, "ts": start, "cat": "ac2g", "name": "ac2g"}
        self.event(ph="f" if ends else "s", **arrow, **({"bp": "e"} if ends else {}))

    def process_name(self, name: str, *, thread: Thread = HOST) -> None:
        """The name of a process: an event without a category."""
        self.event(name="process_name", ph="M", ts=0, pid=thread[0], tid=0, args={"name": name})

    # What usually comes together.

    def dispatch(
        self,
        op: str,
        start: Micros,
        kernels: Iterable[tuple[Any, ...]],
        *,
        duration: Micros = 20,
        thread: Thread = HOST,
        launch_name: str = "cudaLaunchKernel",
        **shapes: Any,
    ) -> int:
        """An op that launches kernels, each a `KernelRun` or its members; returns the op's id."""
        external = self.op(op, start, duration, thread=thread, **shapes)
        runs = [KernelRun(*kernel) for kernel in kernels]
        share = (Decimal(str(duration)) / (len(runs) + 1)).quantize(Decimal("0.001"), ROUND_DOWN)
        for number, run in enumerate(runs, 1):
            at = Decimal(str(start)) + share * number
            correlation = self.launch(at, share / 2, name=launch_name, thread=thread, id=external)
            self._run(run, correlation, external)
        return external

    def replay(
        self, start: Micros, kernels: Iterable[tuple[Any, ...]], *, duration: Micros = 50, thread: Thread = HOST
    ) -> int:
        """A CUDA graph launch and the kernels that it replays, all of one correlation, which is returned."""
        correlation = self.launch(start, duration, name="cudaGraphLaunch", thread=thread)
        for kernel in kernels:
            self._run(KernelRun(*kernel), correlation, None)
        return correlation

    # Output.

    def text(self, layout: Layout = Layout.KINETO) -> bytes:
        """The trace as JSON."""
        if layout is Layout.BARE_ARRAY:
            return b"[" + b",\n".join(map(_json.encode, self.events)) + b"]\n"
        if layout is Layout.COMPACT:
            return _json.encode({**self.metadata, "traceEvents": self.events, "traceName": "trace.json"})
        if layout is Layout.INDENTED:
            return msgspec.json.format(_json.encode({**self.metadata, "traceEvents": self.events}), indent=2)
        if layout is Layout.ONE_LINE:
            whole = {**self.metadata, "traceEvents": self.events, "traceName": "trace.json"}
            return msgspec.json.format(_json.encode(whole), indent=0)
        events = b"\n  " + b",\n  ".join(map(_kineto_event, self.events)) + b"\n  " if self.events else b"\n  "
        metadata = b"".join(
            b'"%s": %s,\n  ' % (key.encode(), _json.encode(value)) for key, value in self.metadata.items()
        )
        if layout is Layout.METADATA_LAST:
            trailer = metadata.rstrip().removesuffix(b",")
            return b'{\n  "traceEvents": [' + events + b"],\n  " + trailer + b"\n}\n"
        return b"\n{\n  " + metadata + b'"traceEvents": [' + events + b'],\n  "traceName": "trace.json"\n}'

    def write(self, path: Path, layout: Layout = Layout.KINETO) -> Path:
        """Write the trace, gzipped if the path ends in `.gz`; returns the path."""
        text = self.text(layout)
        path.write_bytes(gzip.compress(text, 1, mtime=0) if path.suffix == ".gz" else text)
        return path

    def _run(self, run: KernelRun, correlation: int, external: int | None) -> None:
        where = {"stream": run.stream, **({} if external is None else {"id": external})}
        self.kernel(run.name, run.start, run.duration, correlation, grid=run.grid, block=run.block, **where)

    def _on_device(
        self,
        category: str,
        name: str,
        start: Micros,
        duration: Micros,
        correlation: int | None,
        more: dict[str, Any],
        *,
        stream: int = 7,
        device: int = 0,
        id: int | None = None,
    ) -> None:
        args: dict[str, Any] = {} if id is None else {"External id": id}
        args |= {"device": device, "stream": stream}
        if correlation is not None:
            args["correlation"] = correlation
        self.complete(category, name, start, duration, (device, stream), args | more)


def _kineto_event(event: dict[str, Any]) -> bytes:
    """One event on the lines that Kineto gives it (libkineto/src/output_json.cpp)."""
    lines: list[list[bytes]] = [[], []]
    for key, value in event.items():
        if key != "args":
            lines[key in ("ts", "dur")].append(b'"%s": %s' % (key.encode(), _json.encode(value)))
    text = b",\n    ".join(b", ".join(line) for line in lines if line)
    if "args" in event:
        text += b',\n    "args": ' + _json.encode(event["args"])
    return b"{\n    " + text + b"\n  }"
