"""Cut a recording to some of its steps, so that it fits into the repository.

    python traces/cut.py IN.trace.json.gz OUT.trace.json.gz FIRST LAST

keeps the steps FIRST to LAST (counted from 0, both included) with everything on the host that overlaps them, and the
device work that was launched in that time. Event for event nothing is changed; the text is written as one line.
"""

import gzip
import json
import re
import sys
from pathlib import Path

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
STEP = re.compile(r"step\[")


def cut(trace: dict, first: int, last: int) -> dict:
    events = trace["traceEvents"]
    steps = sorted((e for e in events if e.get("cat") == "user_annotation" and STEP.match(e["name"])), key=start)
    begin = steps[first]["ts"]
    end = steps[last + 1]["ts"] if last + 1 < len(steps) else max(map(finish, events))

    def overlaps(event: dict) -> bool:
        return start(event) < end and finish(event) > begin

    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in {"cuda_runtime", "cuda_driver"} and begin <= event["ts"] < end
    }
    ids = {event["args"]["External id"] for event in steps[first : last + 1]}

    def kept(event: dict) -> bool:
        category = event.get("cat")
        if category in ON_DEVICE:
            return event["args"]["correlation"] in launched
        if category == "gpu_user_annotation":
            return event["args"]["External id"] in ids
        if category == "ac2g":
            return event["id"] in launched
        return category is None or overlaps(event)

    return trace | {"traceEvents": [event for event in events if kept(event)]}


def start(event: dict) -> float:
    return event["ts"]


def finish(event: dict) -> float:
    return event["ts"] + event.get("dur", 0)


def main() -> None:
    source, target, first, last = sys.argv[1:]
    trace = json.loads(gzip.decompress(Path(source).read_bytes()))
    text = json.dumps(cut(trace, int(first), int(last)), separators=(",", ":"))
    # No name and no time in the gzip header, so that the same cut gives the same bytes.
    Path(target).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
