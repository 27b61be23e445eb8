"""Compile the kernels for an architecture without a GPU and print what they take, as JSON. Run by test_compile.py.

Usage: python compile_targets.py MAJOR,MINOR,COLUMNS … A process of its own, because the interpreter, which the other
tests of this directory need, has to be off when the kernels' module is imported.
"""

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


def dump(compiled, *what):
    """What cuobjdump says of a compiled kernel's cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([tool, *what, cubin.name], capture_output=True, text=True, check=True).stdout


def resources(compiled):
    """Shared memory, registers and spilled bytes of a compiled kernel, from the cubin itself."""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", dump(compiled, "-res-usage")).groups()
    return {"shared": compiled.metadata.shared, "registers": int(registers), "stack": int(stack)}


def instructions(compiled):
    """The opcodes of a compiled kernel."""
    sass = dump(compiled, "-sass")
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", sass)
    return {"opcodes": sorted(set(opcodes)), "converts_e4m3": "F16.E4M3.UNPACK" in sass}


def compile_target(capability, columns):
    """The report on a target; the plan, the combination and extend, which only count the columns, with 16 of them."""
    config = mla_fp8.tuning(capability, columns)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    decode = {"HAS_LENS": False, "EXTEND": False, "BLOCK_H": config.block_heads, "kv_lens": None, "qo_indptr": None}
    extend = {"HAS_LENS": False, "EXTEND": True, "BLOCK_H": config.block_heads, "kv_lens": None}

    def compiled(kernel, own, **options):
        constants = {k: v for k, v in own.items() if k in kernel.arg_names}
        return triton.compile(source(kernel, constants), target=target, options=options)

    attention = {"LATENT": 512, "ROPE": 64, "ROW": 288, "PAGE": 1, "PAGED": False, "BLOCK_N": config.block_tokens,
                 "STAGES": config.stages, "WHOLE": config.whole_words, "DECODE": config.decode}  # fmt: skip
    warps = {"num_warps": config.warps, "num_stages": config.stages}
    attend = compiled(mla_fp8_triton.mla_fp8_attention, decode | attention | {"CAUSAL": False}, **warps)
    report = {"attend": resources(attend) | instructions(attend)}
    if columns == 16:
        plan = {"BATCH": 64, "BLOCK_N": config.block_tokens, "ROWS": 32}
        pieces = {"LATENT": 512, "CHUNK": 256, "BLOCK_P": 16, "OVERLAP": capability >= (9, 0)}
        for name, stage in (("decode", decode), ("extend", extend)):
            compiled(mla_fp8_triton.mla_fp8_plan, stage | plan, num_warps=4)
            combine = compiled(mla_fp8_triton.mla_fp8_combine, stage | pieces, num_warps=2)
            report[f"combine, {name}"] = resources(combine)
        causal = compiled(mla_fp8_triton.mla_fp8_attention, extend | attention | {"CAUSAL": True}, **warps)
        report["attend, extend"] = resources(causal)
    return report


if __name__ == "__main__":
    targets = [tuple(map(int, text.split(","))) for text in sys.argv[1:]]
    json.dump([compile_target((major, minor), columns) for major, minor, columns in targets], sys.stdout)
