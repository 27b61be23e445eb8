"""Compile the kernels for an architecture without a GPU and print what they take, as JSON. Run by test_compile.py.

Usage: python compile_targets.py MAJOR,MINOR,COLUMNS … A process of its own, because the interpreter, which the other
tests of this directory need, has to be off when the kernels' module is imported.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_diag.kernels import mla_fp8, mla_fp8_triton

INT_POINTERS = ("table", "kv_indptr", "kv_lens", "qo_indptr", "items", "groups")
POINTERS = {"pool": "*i16", "partial": "*fp16", "lse": "*fp32", "partial_lse": "*fp32"}
FLOATS = ("score_scale", "out_scale", "lse_scale")


def source(kernel, constants):
    """The kernel with typed arguments; pointers and strides are multiples of 16, as SGLang's are."""
    names = kernel.arg_names
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("q_nope", "q_rope", "out"):
            types[name] = "*bf16"
        elif name in INT_POINTERS:
            types[name] = "*i32"
        else:
            types[name] = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
    aligned = [n for n in names if types[n][0] == "*" or n.startswith("stride_")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, attrs)


def resources(compiled):
    """Shared memory, registers and spilled bytes of a compiled kernel, from the cubin itself."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        listing = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", listing).groups()
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", sass)
    return {
        "shared": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "opcodes": sorted(set(opcodes)),
        "converts_e4m3": "F16.E4M3.UNPACK" in sass,
    }


def compile_all(capability, columns, **overrides):
    config = mla_fp8.tuning(capability, columns)
    config = dataclasses.replace(config, **overrides)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    decode = {"HAS_LENS": False, "EXTEND": False, "BLOCK_H": config.block_heads, "kv_lens": None, "qo_indptr": None}
    kernels = {
        "plan": (
            mla_fp8_triton.mla_fp8_plan,
            {"BATCH": 64, "BLOCK_N": config.block_tokens, "ROWS": 32},
            {"num_warps": 4},
        ),
        "attend": (
            mla_fp8_triton.mla_fp8_attention,
            {"LATENT": 512, "ROPE": 64, "ROW": 288, "PAGE": 1, "PAGED": False, "CAUSAL": False,
             "BLOCK_N": config.block_tokens, "STAGES": config.stages,
             "WHOLE": config.whole_words, "DECODE": config.decode},
            {"num_warps": config.warps, "num_stages": config.stages},
        ),
        "combine": (
            mla_fp8_triton.mla_fp8_combine,
            {"LATENT": 512, "CHUNK": 256, "BLOCK_P": 16, "OVERLAP": capability >= (9, 0)},
            {"num_warps": 2},
        ),
    }  # fmt: skip
    report = {}
    for name, (kernel, own, options) in kernels.items():
        constants = {k: v for k, v in {**decode, **own}.items() if k in kernel.arg_names}
        report[name] = resources(triton.compile(source(kernel, constants), target=target, options=options))
    return report


if __name__ == "__main__":
    targets = [tuple(map(int, text.split(","))) for text in sys.argv[1:]]
    json.dump([compile_all((major, minor), columns) for major, minor, columns in targets], sys.stdout)
