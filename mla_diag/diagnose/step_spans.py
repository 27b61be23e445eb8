"""Where a trace's steps begin and end on the host, from the best evidence that the trace holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mla_diag.trace.columns import MISSING, Ids, Ints, rows_by
from mla_diag.trace.link import Links
from mla_diag.trace.model import Spans, Trace


class Stage(str, Enum):
    """What a step does: one token for each request, a stretch of prompt, both, or something else."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    OTHER = "other"


class StepSource(str, Enum):
    """What told the steps apart, best first."""

    STEP_SPAN = "step-span"
    EXECUTE_SPAN = "execute-span"
    PROFILER_STEP = "profiler-step"
    FORWARD_FRAME = "forward-frame"
    GRAPH_LAUNCH = "graph-launch"
    CAPTURE = "capture"

    @property
    def words(self) -> str:
        """The source as a reader knows it."""
        return _WORDS[self]


_WORDS = {
    StepSource.STEP_SPAN: "SGLang's step[...] spans",
    StepSource.EXECUTE_SPAN: "vLLM's execute_... spans",
    StepSource.PROFILER_STEP: "ProfilerStep# spans",
    StepSource.FORWARD_FRAME: "the Python frames of the model's forward",
    StepSource.GRAPH_LAUNCH: "CUDA graph launches",
    StepSource.CAPTURE: "nothing: the trace marks no steps, so the whole capture counts as one",
}


@dataclass(frozen=True)
class StepSpans:
    """Steps in order of their begin.

    Attributes:
        source: What told them apart.
        names: As the trace has them.
        stages: One a step.
        start: Nanoseconds.
        end: Nanoseconds.
        thread: The host thread of each, or -1 for any.
        device_spans: The device's side of the steps, for work whose launch was not recorded.
        device_step: The step of each of `device_spans`.
    """

    source: StepSource
    names: list[str]
    stages: list[Stage]
    start: Ints
    end: Ints
    thread: Ids
    device_spans: Spans
    device_step: Ints

    def __len__(self) -> int:
        return len(self.names)


# SGLang: ForwardMode names (sglang/srt/model_executor/forward_batch_info.py). A target-verify step of speculative
# decoding yields decode tokens, although the server counts it as an extend (sglang#35690).
_SGLANG_STAGES = {
    "DECODE": Stage.DECODE,
    "TARGET_VERIFY": Stage.DECODE,
    "EXTEND": Stage.PREFILL,
    "SPLIT_PREFILL": Stage.PREFILL,
    "DLLM_EXTEND": Stage.PREFILL,
    "MIXED": Stage.MIXED,
}


def _sglang_stage(match: re.Match[str]) -> Stage:
    return _SGLANG_STAGES.get(match[1], Stage.OTHER)


def _vllm_stage(match: re.Match[str]) -> Stage:
    context, generation = int(match[1]) > 0, int(match[2]) > 0
    if context and generation:
        return Stage.MIXED
    return Stage.PREFILL if context else Stage.DECODE if generation else Stage.OTHER


_SPAN_PATTERNS: tuple[tuple[StepSource, re.Pattern[str], Callable[[re.Match[str]], Stage]], ...] = (
    (StepSource.STEP_SPAN, re.compile(r"step\[(\w+)\b.*\]"), _sglang_stage),
    (StepSource.EXECUTE_SPAN, re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\("), _vllm_stage),
    (StepSource.PROFILER_STEP, re.compile(r"ProfilerStep#\d+"), lambda match: Stage.OTHER),
)

_MODEL_FORWARD = re.compile(
    r"(?:sglang/srt/model_executor/model_runner\.py\(\d+\): forward"
    r"|vllm/v1/worker/gpu_model_runner\.py\(\d+\): execute_model)$"
)
_DECODE_FRAME = re.compile(r"\): (?:forward_decode|_execute_decode)$|/cuda_graph_runner\.py\(\d+\): replay$")
_PREFILL_FRAME = re.compile(r"\): (?:forward_extend|_execute_extend|_execute_prefill)$")

# A graph of a whole decode step holds hundreds of kernels; a piece of a piecewise graph, between two attentions, a few.
_WHOLE_STEP_GRAPH_KERNELS = 50


def find_step_spans(trace: Trace, links: Links) -> StepSpans:
    """The steps of one rank's trace; at least one, unless the trace holds no events at all."""
    for source, pattern, stage_of in _SPAN_PATTERNS:
        for spans in (trace.spans, trace.device_spans):
            if steps := _from_spans(trace, spans, source, pattern, stage_of):
                return steps
    return _from_frames(trace) or _from_graphs(trace, links) or _whole_capture(trace)


def _from_spans(
    trace: Trace, spans: Spans, source: StepSource, pattern: re.Pattern[str], stage_of: Callable[[re.Match[str]], Stage]
) -> StepSpans | None:
    matches = {number: match for number, name in enumerate(trace.names) if (match := pattern.match(name))}
    rows = np.flatnonzero(np.isin(spans.name, list(matches)))
    if not len(rows):
        return None
    on_device = trace.device_spans.take(np.isin(trace.device_spans.name, list(matches)))
    if spans is trace.device_spans:
        chosen = _one_a_step(spans.take(rows))
    else:
        chosen = spans.take(rows[np.argsort(spans.start[rows], kind="stable")])
    stages = [stage_of(matches[name]) for name in chosen.name.tolist()]
    if source is StepSource.PROFILER_STEP:
        stages = [_stage_from_file_name(trace)] * len(stages)
    first = {external: step for step, external in reversed(list(enumerate(chosen.external_id.tolist())))}
    return StepSpans(
        source=source,
        names=[trace.names[name] for name in chosen.name.tolist()],
        stages=stages,
        start=chosen.start,
        end=chosen.end,
        thread=chosen.thread if spans is trace.spans else np.full(len(chosen), MISSING, np.int32),
        device_spans=on_device,
        device_step=np.array([first.get(external, MISSING) for external in on_device.external_id.tolist()], np.int64),
    )


def _one_a_step(spans: Spans) -> Spans:
    """A step has a device span on each stream that it used; join those of one id."""
    _, first, group = np.unique(spans.external_id, return_index=True, return_inverse=True)
    start, end = spans.start[first].copy(), spans.end[first].copy()
    np.minimum.at(start, group, spans.start)
    np.maximum.at(end, group, spans.end)
    order = np.argsort(start, kind="stable")
    kept = first[order]
    return Spans(spans.name[kept], spans.thread[kept], start[order], (end - start)[order], spans.external_id[kept])


def _from_frames(trace: Trace) -> StepSpans | None:
    """One step a call of the model runner; its stage from the functions called inside."""
    by_kind = {
        kind: trace.frames.take(
            np.isin(trace.frames.name, [n for n, name in enumerate(trace.names) if kind.search(name)])
        )
        for kind in (_MODEL_FORWARD, _DECODE_FRAME, _PREFILL_FRAME)
    }
    forward = by_kind[_MODEL_FORWARD]
    forward = forward.take(np.argsort(forward.start, kind="stable"))
    if not len(forward):
        return None
    stages = []
    for start, end in zip(forward.start.tolist(), forward.end.tolist(), strict=True):
        decodes, prefills = (
            bool(((by_kind[kind].start >= start) & (by_kind[kind].start < end)).any())
            for kind in (_DECODE_FRAME, _PREFILL_FRAME)
        )
        if decodes and prefills:
            stages.append(Stage.MIXED)
        else:
            stages.append(Stage.DECODE if decodes else Stage.PREFILL if prefills else _stage_from_file_name(trace))
    names = [trace.names[name] for name in forward.name.tolist()]
    return _without_device_spans(
        trace, StepSource.FORWARD_FRAME, names, stages, forward.start, forward.end, forward.thread
    )


def _from_graphs(trace: Trace, links: Links) -> StepSpans | None:
    """One decode step a launch of the graph that takes the most device time, up to its next launch."""
    graph_launches, kernels = np.unique(links.launch[links.graph], return_counts=True)
    whole = graph_launches[kernels >= _WHOLE_STEP_GRAPH_KERNELS]
    if not len(whole):
        return None
    events_of = rows_by(links.launch)
    names, durations = trace.device_events.name, trace.device_events.duration
    signature = {launch: tuple(names[events_of[launch]].tolist()) for launch in whole.tolist()}
    spent: Counter[tuple[int, ...]] = Counter()
    for launch, kernels_of_graph in signature.items():
        spent[kernels_of_graph] += int(durations[events_of[launch]].sum())
    heaviest = spent.most_common(1)[0][0]
    rows = np.array([launch for launch in whole.tolist() if signature[launch] == heaviest])
    rows = rows[np.argsort(trace.launches.start[rows], kind="stable")]
    start = trace.launches.start[rows]
    end = np.append(start[1:], _horizon(trace)[1] + 1)
    return _without_device_spans(
        trace,
        StepSource.GRAPH_LAUNCH,
        [trace.names[name] for name in trace.launches.name[rows].tolist()],
        [Stage.DECODE] * len(rows),
        start,
        end,
        np.full(len(rows), MISSING, np.int32),
    )


def _whole_capture(trace: Trace) -> StepSpans:
    start, end = _horizon(trace)
    return _without_device_spans(
        trace,
        StepSource.CAPTURE,
        ["capture"],
        [_stage_from_file_name(trace)],
        np.array([start]),
        np.array([end + 1]),
        np.array([MISSING], np.int32),
    )


def _horizon(trace: Trace) -> tuple[int, int]:
    """From the first to the last thing that the trace saw."""
    tables = [table for table in (trace.device_events, trace.launches, trace.ops) if len(table)]
    if not tables:
        return 0, 0
    return min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables)


def _stage_from_file_name(trace: Trace) -> Stage:
    """SGLang's `profile_by_stage` writes the stage into the name: `...-TP-0-DECODE.trace.json.gz`."""
    if "-DECODE" in trace.path.name:
        return Stage.DECODE
    return Stage.PREFILL if "-EXTEND" in trace.path.name else Stage.OTHER


def _without_device_spans(
    trace: Trace, source: StepSource, names: list[str], stages: list[Stage], start: Ints, end: Ints, thread: Ids
) -> StepSpans:
    nothing = trace.device_spans.take(np.empty(0, np.int64))
    return StepSpans(source, names, stages, start, end, thread, nothing, np.empty(0, np.int64))


def describe_batch(names: list[str]) -> Iterator[tuple[str, int]]:
    """The distinct step names and how often each occurs, in order of first sight."""
    yield from Counter(names).items()
