"""Time `read_trace` against `json.load` of the same file, in turns, and print the ratio of the medians.

python tests/bench_reader.py [TRACE...]        # by default two recordings of traces/, with and without stacks
"""

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mla_diag.trace.decode import read_trace

RECORDINGS = Path(__file__).parents[1] / "traces"
DEFAULT = [
    RECORDINGS / "base-eager-decode-stack.trace.json.gz",
    RECORDINGS / "base-eager-decode.trace.json.gz",
]
TURNS = 5


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def with_json(path: Path) -> object:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return json.load(file)


def compare(path: Path) -> None:
    actions = (lambda: read_trace(path), lambda: read_trace(path, frames=False), lambda: with_json(path))
    turns = [[seconds(action) for action in actions] for _ in range(TURNS)]
    ours, without_frames, theirs = (median(column) for column in zip(*turns, strict=True))
    print(
        f"{path.name}: read_trace {ours:.2f} s, without frames {without_frames:.2f} s, json.load {theirs:.2f} s: "
        f"{theirs / ours:.1f} and {theirs / without_frames:.1f} times as fast ({TURNS} turns each, medians)"
    )


for given in sys.argv[1:] or DEFAULT:
    compare(Path(given))
