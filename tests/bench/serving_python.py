"""A stand-in for the Python of a GPU server: an executable that answers as `strategy_process` would there."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

# Microseconds of each strategy at every shape. What else a strategy is told to do comes first.
ANSWERS = """
    import json, os, signal, sys, time
    BEHAVIOUR = {behaviour!r}
    request = json.loads(sys.argv[3])
    with open(__file__ + ".pid", "w") as own:
        print(os.getpid(), file=own)
    with open(__file__ + ".asked", "a") as asked:
        print(sys.argv[3], file=asked)
    assert sys.argv[1:3] == ["-m", "mla_diag.bench.strategy_process"]
    strategy = request["strategy"]
    what = BEHAVIOUR.get(strategy, 100.0)
    print("compiling", file=sys.stderr)
    if what == "no torch":
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    ceilings = request["ceilings"] or {{"bandwidth": 4e12, "matmul": 7e14}}
    note = "no compiler" if what == "slower" else ""
    print(json.dumps({{"device": "NVIDIA H200", "ceilings": ceilings, "note": note}}), flush=True)
    for place, shape in enumerate(request["shapes"]):
        if place == 1 and what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if place == 1 and what == "hang":
            time.sleep(60)
        row = {{"shape": shape, "alternative": strategy, "us": 50.0, "error": 1.7e-3}}
        row |= {{"roofline_us": 10.0, "reason": ""}}
        if isinstance(what, float):
            row["us"] = what
        elif what == "loose":
            row["error"] = 2.3e-3
        elif what == "wrong" and place == 1:
            row["error"] = 0.03
        elif what == "not installed":
            row |= {{"us": None, "error": None, "reason": "ModuleNotFoundError: No module named 'flashinfer'"}}
        elif what == "raises":
            row |= {{"us": None, "error": None, "reason": "RuntimeError: [no] kernel image"}}
        elif what == "out of memory":
            row |= {{"us": None, "error": None, "reason": "OutOfMemoryError: CUDA out of memory."}}
        print(json.dumps(row), flush=True)
"""


def serving_python(path: Path, **behaviour: float | str) -> Path:
    """Write the executable, which keeps what it was asked in a file `.asked` beside it, and its process in `.pid`.

    Args:
        path: where.
        **behaviour: by strategy: its time, or one of the words above.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(ANSWERS.format(behaviour=behaviour)))
    path.chmod(0o755)
    return path
