"""The profiler's events as msgspec decodes them: one type a category, holding only the members that are read.

Members change their type from event to event (`pid` is a number or "Spans", `grid` a list or a string, `bytes` a number
or a string), so what is only compared is kept as raw JSON, and what is a number may come as text. Categories and
members are Kineto's: libkineto/src/output_json.cpp.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

from msgspec import Raw, Struct, defstruct, field

Number: TypeAlias = int | float | str | None
Identity: TypeAlias = int | str | float | None

NOTHING = Raw(b"")
COMPLETE = Raw(b'"X"')


class Args(Struct, gc=False):
    """What any event may say of itself."""

    external_id: Number = field(default=None, name="External id")


class OpArgs(Args):
    """The inputs of a CPU op: lists as long as its arguments, recorded with `record_shapes`."""

    dims: Raw = field(default=NOTHING, name="Input Dims")
    types: Raw = field(default=NOTHING, name="Input type")
    strides: Raw = field(default=NOTHING, name="Input Strides")
    scalars: Raw = field(default=NOTHING, name="Concrete Inputs")


class LaunchArgs(Args):
    """A runtime or driver call: `correlation` joins it to the device events that it launched."""

    correlation: Number = None


class DeviceArgs(LaunchArgs):
    """A kernel, memcpy or memset: where it ran, and how it was launched."""

    device: Number = None
    stream: Number = None
    grid: Raw = NOTHING
    block: Raw = NOTHING
    bytes: Number = None


class Event(Struct, tag_field="cat", gc=False):
    """What every complete event (`"ph": "X"`) has; times are microseconds, as text so that none of it is lost.

    Events of other phases, such as flows and instants, last no time and have no `dur`.
    """

    ph: Raw = NOTHING
    name: str = ""
    pid: Identity = None
    tid: Identity = None
    ts: Raw = NOTHING
    dur: float | None = None


class CpuOp(Event, tag="cpu_op"):
    """A PyTorch op on the CPU."""

    args: OpArgs | None = None


class Launch(Event):
    """A call into the CUDA or HIP runtime or driver."""

    args: LaunchArgs | None = None


class RuntimeCall(Launch, tag="cuda_runtime"):
    """A runtime call; HIP's are recorded under this category too."""


class DriverCall(Launch, tag="cuda_driver"):
    """A driver call, which is how Triton and other run-time compilers launch."""


class DeviceEvent(Event):
    """Work on the device."""

    args: DeviceArgs | None = None


class Kernel(DeviceEvent, tag="kernel"):
    """A kernel."""


class Memcpy(DeviceEvent, tag="gpu_memcpy"):
    """A copy by the copy engine or the driver."""


class Memset(DeviceEvent, tag="gpu_memset"):
    """A fill by the driver."""


class Span(Event, tag="user_annotation"):
    """A `record_function` range on the CPU."""

    args: Args | None = None


class DeviceSpan(Event, tag="gpu_user_annotation"):
    """The device's side of a range: from the first to the last kernel launched inside it, one a stream."""

    args: Args | None = None


class Frame(Event, tag="python_function"):
    """A Python frame, recorded with `with_stack`."""


class Skipped(Struct, tag_field="cat", gc=False):
    """An event of a category that nothing here reads."""

    known: ClassVar[tuple[str, ...]] = ("ac2g", "fwdbwd", "cpu_instant_event", "overhead", "cuda_sync", "Trace")


class Uncategorised(Struct, gc=False):
    """Only the category of an event: what tells those without one, such as the names of processes and threads."""

    cat: Any = None


def skipped(category: str) -> type[Skipped]:
    """A type that swallows the events of one more category."""
    return defstruct(f"Skipped_{len(category)}", [], bases=(Skipped,), tag=category)  # type: ignore[return-value]


READ: tuple[type[Event], ...] = (
    CpuOp,
    RuntimeCall,
    DriverCall,
    Kernel,
    Memcpy,
    Memset,
    Span,
    DeviceSpan,
    Frame,
)
