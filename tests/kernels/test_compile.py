"""Both kernels compile for every architecture, without a GPU, into what the tuning table promises."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mla_diag.kernels.mla_fp8 import tuning

# What a program may use of shared memory, in KB, and an SM has, from the CUDA C++ programming guide's table of
# compute capabilities.
SHARED_KB = {(8, 0): (163, 164), (8, 9): (99, 100), (9, 0): (227, 228), (10, 0): (227, 228), (12, 0): (99, 100)}
TARGETS = [*[(capability, "bf16") for capability in SHARED_KB], ((9, 0), "fp16")]
REGISTERS_PER_SM = 65_536


def compile_target(target):
    (major, minor), dtype = target
    script = Path(__file__).with_name("compile_targets.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, script, str(major), str(minor), dtype]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def reports():
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(TARGETS, pool.map(compile_target, TARGETS), strict=True))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_resources(reports, target):
    """The promised number of programs fits an SM, and the loop's values fit the registers."""
    capability, dtype = target
    attend = reports[target]["attend"]
    config = tuning(capability, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    program_kb, sm_kb = SHARED_KB[capability]
    assert attend["shared"] <= program_kb * 1024
    assert config.programs_per_sm * (attend["shared"] + 1024) <= sm_kb * 1024
    assert config.programs_per_sm * attend["registers"] * 32 * config.warps <= REGISTERS_PER_SM
    # Scalars of the prologue that wait in local memory through the loop are harmless; a tile that does is 8 KB.
    assert attend["stack"] <= 256
    assert reports[target]["combine"]["stack"] == 0


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_instructions(reports, target):
    """Rows arrive by asynchronous copies and leave shared memory by ldmatrix, into tensor-core products."""
    capability, dtype = target
    opcodes = set(reports[target]["attend"]["opcodes"])
    assert {"LDGSTS", "LDSM", "HMMA"} <= opcodes
    assert ("QGMMA" in opcodes) == (capability == (9, 0) and dtype == "bf16")


def test_bytes_are_converted_by_instruction_where_there_is_one(reports):
    """cvt.e4m3x2 shows as F2FP.F16.E4M3; SM80 has none and moves bits."""
    assert not reports[(8, 0), "bf16"]["attend"]["converts_e4m3"]
    assert reports[(8, 9), "bf16"]["attend"]["converts_e4m3"]
    assert reports[(9, 0), "bf16"]["attend"]["converts_e4m3"]


def test_cards_before_sm80_are_refused():
    with pytest.raises(ValueError, match=r"8\.0"):
        tuning((7, 5))


def test_unknown_cards_get_the_common_layout():
    assert tuning((13, 0)) == tuning((10, 0))
