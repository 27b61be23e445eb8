"""Measure one strategy of the fix: `python -m mla_diag.bench.strategy_process REQUEST`, run by `strategies`.

A process of its own, in the Python that serves, so that it measures the torch and FlashInfer of the server and takes
nothing with it when a kernel crashes or hangs. REQUEST is JSON: `strategy`, `shapes`, and `ceilings` if known. Answers
are lines of JSON on standard output: the card, then a row a shape.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import torch

from mla_diag.bench import kernel
from mla_diag.bench.rows import Ceilings, Shape
from mla_diag.kernels.mla_fp8_operator import prepare


def main() -> None:
    """Answer the request on the command line."""
    request = json.loads(sys.argv[1])
    # What libraries print, FlashInfer's compiler among them, must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU")
    strategy, known = request["strategy"], request["ceilings"]
    ceilings = Ceilings(**known) if known else kernel.measure_ceilings()
    note = prepare(torch.device("cuda")) if strategy == "kernel" else None
    card = {"device": torch.cuda.get_device_name(), "ceilings": asdict(ceilings), "note": note or ""}
    print(json.dumps(card), file=answers)
    shapes = [Shape(**shape) for shape in request["shapes"]]
    for row in kernel.bench_kernels(shapes, ceilings, {strategy: kernel.STRATEGIES[strategy]}):
        print(json.dumps(asdict(row)), file=answers)


if __name__ == "__main__":
    main()
