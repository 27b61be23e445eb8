"""Kernel names short enough to read: without return types, namespaces, arguments and most template parameters."""

from __future__ import annotations

import re

# Kernels that run whatever functor they are given: the functor says what they do.
_GENERIC = re.compile(r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|^kernel$|^Kernel2?$|^device_kernel$")
# What a functor may be called, the most telling first.
_FUNCTORS = (
    re.compile(r"(\w+_kernel_cuda)\b"),
    re.compile(r"(FlashAttn\w+|GemmUniversal\w*|cutlass\w*_\w+)"),
    re.compile(r"(\w*Functor\w*|\w+Ops?(?=<))"),
    re.compile(r"(\w+_kernel(?:_impl)?(?=<))"),
)


def short_kernel_name(name: str) -> str:
    """The kernel as an engineer would say it: `unrolled_elementwise_kernel<direct_copy_kernel_cuda>`.

    Names without C++ decoration (Triton's, cuBLAS's nvjet, memcpys) are returned as they are.
    """
    if mangled := re.match(r"_Z(?:L|NK?)?(?=\d)", name):
        return _short_mangled(name, mangled.end())
    if ("(" not in name and "<" not in name) or name.startswith(("Memcpy", "Memset")):
        return name
    plain = name.replace("operator()", "operator").replace("(anonymous namespace)::", "")
    qualified = _outside_brackets(plain).strip().split(" ")[-1]
    parts = [part for part in qualified.split("::") if part]
    if not parts:
        return name
    short = parts[-1]
    if len(short) <= len("kernel") and len(parts) > 1:
        short = "::".join(parts[-2:])
    if _GENERIC.search(parts[-1]):
        parameters = plain[plain.find(parts[-1]) + len(parts[-1]) :]
        for pattern in _FUNCTORS:
            if functor := pattern.search(parameters):
                return f"{short}<{functor[1]}>"
    return short


def _short_mangled(name: str, start: int) -> str:
    """The function of a name that the compiler mangled, with what a generic one runs: `kentry<FmhaBatchPrefill...>`."""
    qualified, end = _identifiers(name, start)
    short = qualified[-1] if qualified else name
    if not re.fullmatch(r"kentry|kernel|Kernel2?|device_kernel", short):
        return short
    while end < len(name):
        inner, after = _identifiers(name, end)
        if inner and len(inner[-1]) > len("kernel"):  # shorter ones are numbers among the parameters
            return f"{short}<{inner[-1]}>"
        end = after + 1
    return short


def _identifiers(name: str, start: int) -> tuple[list[str], int]:
    """The length-prefixed identifiers that begin at a place in a mangled name, and where they end."""
    found = []
    while length := re.match(r"\d+", name[start:]):
        begin = start + length.end()
        start = begin + int(length[0])
        found.append(name[begin:start])
    return found, start


def _outside_brackets(text: str) -> str:
    """What is left without anything between angle brackets or parentheses; a `>` inside parentheses compares."""
    open_brackets: list[str] = []
    kept = []
    for character in text:
        if character in "<(":
            open_brackets.append(character)
        elif character == ")":
            while open_brackets and open_brackets.pop() != "(":
                pass
        elif character == ">":
            if open_brackets and open_brackets[-1] == "<":
                open_brackets.pop()
        elif not open_brackets:
            kept.append(character)
    return "".join(kept)
