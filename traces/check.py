"""Run `mla-diag explain --fail-on whole-pool-copy:5%` on every recording: it must fail on those that copy their pool.

python traces/check.py        # or: make traces-check
"""

import subprocess
import sys
from pathlib import Path

import tomllib

TRACES = Path(__file__).parent


def status(path: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "mla_diag",
        "explain",
        str(path),
        "--no-sources",
        "--fail-on",
        "whole-pool-copy:5%",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode


wrong = 0
for recording in tomllib.loads((TRACES / "manifest.toml").read_text())["recording"]:
    expected = int(any(stage["pool_copy"] for stage in recording["expect"]))
    got = status(TRACES / recording["file"])
    wrong += got != expected
    print(f"{'ok' if got == expected else 'WRONG'}  exit {got}  {recording['file']}: {recording['what']}")
sys.exit(1 if wrong else 0)
