"""Both kernels compile for every architecture, without a GPU, into what the tuning table promises."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_diag.kernels.mla_fp8 import tuning

# What a program may use of shared memory, in KB, and an SM has, from the CUDA C++ programming guide's table of
# compute capabilities.
SHARED_KB = {(8, 0): (163, 164), (8, 9): (99, 100), (9, 0): (227, 228), (10, 0): (227, 228), (12, 0): (99, 100)}
TARGETS = [*((capability, 16) for capability in SHARED_KB), ((8, 0), 32), ((9, 0), 32), ((12, 0), 32)]
REGISTERS_PER_SM = 65_536


def compile_targets(targets):
    script = Path(__file__).with_name("compile_targets.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [f"{major},{minor},{columns}" for (major, minor), columns in targets]
    run = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return zip(targets, json.loads(run.stdout), strict=True)


@pytest.fixture(scope="module")
def reports():
    with ThreadPoolExecutor(2) as pool:
        return dict(itertools.chain(*pool.map(compile_targets, (TARGETS[::2], TARGETS[1::2]))))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_resources(reports, target):
    """The promised number of programs fits an SM, and the loop's values fit the registers."""
    attend = reports[target]["attend"]
    config = tuning(*target)
    program_kb, sm_kb = SHARED_KB[target[0]]
    assert attend["shared"] <= program_kb * 1024
    assert config.programs_per_sm * (attend["shared"] + 1024) <= sm_kb * 1024
    assert config.programs_per_sm * attend["registers"] * 32 * config.warps <= REGISTERS_PER_SM
    # A few values that wait in local memory through the loop are harmless; one operand of a product would be 128 bytes.
    assert attend["stack"] < 128


@pytest.mark.parametrize("capability", SHARED_KB, ids=str)
@pytest.mark.parametrize("stage", ["decode", "extend"])
def test_the_combination_spills_nothing(reports, capability, stage):
    assert reports[capability, 16][f"combine, {stage}"]["stack"] == 0


@pytest.mark.parametrize("capability", SHARED_KB, ids=str)
def test_extend_takes_what_decode_does(reports, capability):
    extend, decode = reports[capability, 16]["attend, extend"], reports[capability, 16]["attend"]
    assert extend["shared"] == decode["shared"]
    assert extend["stack"] < 128


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_instructions(reports, target):
    """Rows arrive by asynchronous copies and leave shared memory by ldmatrix, into tensor-core products."""
    opcodes = set(reports[target]["attend"]["opcodes"])
    assert {"LDGSTS", "LDSM", "HMMA"} <= opcodes
    assert ("HGMMA" in opcodes) == (target == ((9, 0), 16))


def test_bytes_are_converted_by_instruction_where_there_is_one(reports):
    """cvt.e4m3x2 shows as F2FP.F16.E4M3; SM80 has none and moves bits."""
    assert not reports[(8, 0), 16]["attend"]["converts_e4m3"]
    assert reports[(8, 9), 16]["attend"]["converts_e4m3"]
    assert reports[(9, 0), 16]["attend"]["converts_e4m3"]


def test_cards_before_sm80_are_refused():
    with pytest.raises(ValueError, match=r"8\.0"):
        tuning((7, 5))


def test_unknown_cards_get_the_common_layout():
    assert tuning((13, 0)) == tuning((10, 0))
