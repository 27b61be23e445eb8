"""Compile the kernels for an architecture without a GPU and print what they take, as JSON. Run by test_compile.py.

Usage: python compile_targets.py MAJOR MINOR [bf16|fp16]. A process of its own, because the interpreter, which the other
tests of this directory need, has to be off when the kernels' module is imported.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_diag.kernels import mla_fp8

INT_POINTERS = ("table", "kv_indptr", "kv_lens", "qo_indptr", "items", "groups")
FLOAT_POINTERS = ("lse", "partial", "partial_lse")
FLOATS = ("score_scale", "out_scale", "lse_scale")


def source(kernel, dtype, constants):
    """The kernel with typed arguments; pointers and strides are multiples of 16, as SGLang's are."""
    names = kernel.arg_names
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("q_nope", "q_rope", "out"):
            types[name] = f"*{dtype}"
        elif name in INT_POINTERS:
            types[name] = "*i32"
        elif name in FLOAT_POINTERS:
            types[name] = "*fp32"
        else:
            types[name] = {"pool": "*i16"}.get(name, "fp32" if name in FLOATS else "i32")
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


def compile_all(capability, dtype, **overrides):
    config = mla_fp8.tuning(capability, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    config = dataclasses.replace(config, **overrides)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    decode = {"HAS_LENS": False, "EXTEND": False, "BLOCK_H": config.block_heads, "kv_lens": None, "qo_indptr": None}
    kernels = {
        "plan": (mla_fp8._plan, {"BATCH": 64, "BLOCK_N": config.block_tokens, "ROWS": 32}, {"num_warps": 4}),
        "attend": (
            mla_fp8._attend,
            {"LATENT": 512, "ROPE": 64, "ROW": 288, "PAGE": 1, "PAGED": False, "CAUSAL": False,
             "BLOCK_N": config.block_tokens, "STAGES": config.stages, "FP8_SCORES": config.fp8_scores,
             "DECODE": config.decode},
            {"num_warps": config.warps, "num_stages": config.stages},
        ),
        "combine": (
            mla_fp8._combine,
            {"LATENT": 512, "CHUNK": 512, "BLOCK_P": 8, "OVERLAP": capability >= (9, 0)},
            {"num_warps": 4},
        ),
    }  # fmt: skip
    report = {}
    for name, (kernel, constants, options) in kernels.items():
        constants = {k: v for k, v in {**decode, **constants}.items() if k in kernel.arg_names}
        report[name] = resources(triton.compile(source(kernel, dtype, constants), target=target, options=options))
    return report


if __name__ == "__main__":
    major, minor, dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "bf16"
    json.dump(compile_all((major, minor), dtype), sys.stdout)
