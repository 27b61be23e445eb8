"""The sites of a backend file: where it casts the whole KV pool, and all that a fix of it must change with them.

A site is known by what it does, not by its text or line: a value that flows from the pool (see `flow`) into a cast. A
file is understood if the pool, uncast, would reach nothing but calls that can be routed through `mla_fp8_dispatch`:

  CSR         `wrapper.run(q_nope, q_rope, ckv, kpe)` of FlashInfer's BatchMLAPagedAttentionWrapper, with every
              `plan` of the file giving a KV dtype that its class took from the model
  page table  `flash_attn_with_kvcache(q=, k_cache=, v_cache=, …)`, FlashAttention 3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from mla_diag.fix.flow import (
    SOURCE_ATTRIBUTES,
    SOURCES,
    PoolFlow,
    called_name,
    functions_returning_pool,
    pool_flow,
    walk,
)

DISPATCH = "mla_fp8_dispatch"
# `kv_data_type` is the twelfth argument of FlashInfer's plan and the second and third are its CSR pair.
_KV_DTYPE_POSITION, _KV_INDPTR_POSITION = 11, 1
_OTHER_HARDWARE = frozenset({"aiter", "amx", "ascend", "hip", "hpu", "mlx", "mps", "musa", "npu", "wave", "xpu"})


class Kind(Enum):
    """How the attention of a site addresses the pool."""

    CSR = "CSR indices"
    PAGE_TABLE = "page table"
    OTHER = "other"


@dataclass(frozen=True)
class Site:
    """One cast of the whole pool.

    Attributes:
        line: line of the cast, from 1.
        function: the class and method it stands in.
        code: the cast, as written, on one line.
        source: what handed the pool out.
        kind: how the attention behind it addresses the pool.
        call: the cast.
        wrapper: for CSR, the name of the wrapper that runs.
    """

    line: int
    function: str
    code: str
    source: str
    kind: Kind
    call: cst.Call = field(repr=False)
    wrapper: str | None = None


@dataclass(frozen=True)
class PlanCall:
    """One call that plans a wrapper with a KV dtype.

    Attributes:
        line: its line, from 1.
        function: the class and method it stands in.
        call: the call.
        kv_dtype: its KV dtype argument.
        kv_indptr: its CSR pointer argument.
        planner: SGLang's own plan function, where that is called instead of the wrapper's.
        updater: the class that it stands in.
    """

    line: int
    function: str
    call: cst.Call = field(repr=False)
    kv_dtype: cst.Arg = field(repr=False)
    kv_indptr: cst.Arg = field(repr=False)
    planner: str | None
    updater: cst.ClassDef | None = field(repr=False)


@dataclass(frozen=True)
class BackendFile:
    """What a fix needs to know of one attention backend's source.

    Attributes:
        path: the file.
        module: its syntax tree.
        sites: its casts of the whole pool.
        runs: calls that are given the pool, to be routed; of functions that also have a site.
        plans: calls that plan with a KV dtype.
        dtype_attributes: statements `self.NAME = model_runner.dtype` of each updater class, by class and NAME.
        problem: why the file cannot be fixed; None if it can, or has nothing to fix.
        patched: whether the file names the dispatch that a fix puts beside it.
    """

    path: Path
    module: cst.Module = field(repr=False)
    sites: tuple[Site, ...]
    runs: tuple[cst.Call, ...] = field(repr=False)
    plans: tuple[PlanCall, ...]
    dtype_attributes: Mapping[tuple[cst.ClassDef, str], cst.SimpleStatementLine] = field(repr=False)
    problem: str | None
    patched: bool


def mentions_pool(source: bytes) -> bool:
    """Whether a file can have a site at all; much faster than reading it."""
    return any(name.encode() in source for name in (*SOURCES, *SOURCE_ATTRIBUTES))


def read_backend(path: Path, source: bytes) -> BackendFile:
    """Read one backend file.

    Args:
        path: where it is; its parts tell backends of other hardware.
        source: its content.

    Raises:
        ValueError: the content is not Python that LibCST reads and writes back unchanged.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as Python: {str(error).splitlines()[0]}") from error
    if wrapper.module.bytes != source:
        raise ValueError(f"{path}: its syntax tree does not write back to the same bytes")
    return _Reader(path, wrapper).read()


class _Reader:
    """Collects the parts of a `BackendFile` and the reasons against rewriting it."""

    def __init__(self, path: Path, wrapper: MetadataWrapper) -> None:
        self._path = path
        self._module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._problems: list[str] = []

    def read(self) -> BackendFile:
        functions = [node for node in walk(self._module) if isinstance(node, cst.FunctionDef)]
        outer = [function for function in functions if self._enclosing(function, cst.FunctionDef) is None]
        sources = functions_returning_pool(outer, self._parents)
        sites: list[Site] = []
        runs: list[cst.Call] = []
        uncast: list[cst.Call] = []
        for function in outer:
            flow = pool_flow(function, self._parents, sources)
            if flow.casts:
                sites += self._sites(function, flow)
                runs += flow.consumers
                for node in flow.escapes:
                    self._problem(node, "the pool leaves the function here, to where its dtype cannot be followed")
            else:
                uncast += [call for call in flow.consumers if _is_wrapper_run(call) or _is_flash_attention(call)]
        plans = self._plans()
        attributes = self._dtype_attributes(plans)
        if sites:
            for call in uncast:
                self._problem(call, "this call is given the pool uncast and others are not: the file is half changed")
            if any(site.kind is Kind.CSR for site in sites):
                self._check_plans(plans, attributes)
        return BackendFile(
            path=self._path,
            module=self._module,
            sites=tuple(sites),
            runs=tuple(runs),
            plans=plans,
            dtype_attributes=attributes,
            problem=self._problems[0] if self._problems else None,
            patched=DISPATCH in self._module.code,
        )

    def _sites(self, function: cst.FunctionDef, flow: PoolFlow) -> list[Site]:
        kind = self._kind(function, flow.consumers)
        wrapper = self._wrapper(function, flow) if kind is Kind.CSR else None
        sites = []
        for call, source in flow.casts.items():
            dtype = call.args[0] if len(call.args) == 1 else None
            keyword = dtype.keyword.value if dtype is not None and dtype.keyword is not None else "dtype"
            if called_name(call) != "to" or dtype is None or dtype.star or keyword != "dtype":
                self._problem(call, "a cast other than .to(dtype)")
            sites.append(
                Site(
                    line=self._line(call),
                    function=self._qualified(function),
                    code=" ".join(self._module.code_for_node(call).split()),
                    source=source,
                    kind=kind,
                    call=call,
                    wrapper=wrapper,
                )
            )
        return sites

    def _kind(self, function: cst.FunctionDef, consumers: list[cst.Call]) -> Kind:
        hardware = _OTHER_HARDWARE.intersection(part for name in _inside_srt(self._path) for part in name.split("_"))
        if hardware:
            self._problem(function, f"a backend for other hardware ({', '.join(sorted(hardware))})")
            return Kind.OTHER
        if consumers and all(_is_wrapper_run(call) for call in consumers):
            return Kind.CSR
        if consumers and all(_is_flash_attention(call) for call in consumers):
            return Kind.PAGE_TABLE
        for call in consumers:
            if not _is_wrapper_run(call) and not _is_flash_attention(call):
                self._problem(call, f"{called_name(call) or 'this call'}() is given the pool and is not known")
        self._problem(function, "the pool that is cast here reaches no attention call that is known")
        return Kind.OTHER

    def _wrapper(self, function: cst.FunctionDef, flow: PoolFlow) -> str | None:
        """The wrapper's name, which must be bound before the first cast on every way to it."""
        wrappers = [call.func.value for call in flow.consumers if isinstance(call.func, cst.Attribute)]
        names = {wrapper.value if isinstance(wrapper, cst.Name) else "" for wrapper in wrappers}
        if len(names) != 1 or "" in names:
            self._problem(function, "run() is called on several wrappers, or on one that has no name")
            return None
        (name,) = names
        first_cast = min(self._line(call) for call in flow.casts)
        bound = [param.name.value for param in function.params.params]
        for statement in function.body.body:
            if isinstance(statement, cst.SimpleStatementLine) and self._line(statement) < first_cast:
                bound += [
                    target.target.value
                    for assign in statement.body
                    if isinstance(assign, cst.Assign)
                    for target in assign.targets
                    if isinstance(target.target, cst.Name)
                ]
        if name not in bound:
            self._problem(function, f"{name}, which runs, is not bound before the cast")
        return name

    def _plans(self) -> tuple[PlanCall, ...]:
        planners = {
            function.name.value
            for function in self._module.body
            if isinstance(function, cst.FunctionDef)
            and "kv_data_type" in (param.name.value for param in function.params.params)
        }
        plans = []
        for call in (node for node in walk(self._module) if isinstance(node, cst.Call)):
            planner = call.func.value if isinstance(call.func, cst.Name) and call.func.value in planners else None
            if planner is None and not (isinstance(call.func, cst.Attribute) and call.func.attr.value == "plan"):
                continue
            offset = 0 if planner is None else 1
            kv_dtype = _argument(call, _KV_DTYPE_POSITION + offset, "kv_data_type")
            kv_indptr = _argument(call, _KV_INDPTR_POSITION + offset, "kv_indptr", "kv_indptr_cpu")
            if kv_dtype is None or kv_indptr is None:
                continue
            function = self._enclosing(call, cst.FunctionDef)
            plans.append(
                PlanCall(
                    line=self._line(call),
                    function=self._qualified(function) if isinstance(function, cst.FunctionDef) else "module",
                    call=call,
                    kv_dtype=kv_dtype,
                    kv_indptr=kv_indptr,
                    planner=planner,
                    updater=self._class_of(call),
                )
            )
        return tuple(plans)

    def _dtype_attributes(self, plans: tuple[PlanCall, ...]) -> dict[tuple[cst.ClassDef, str], cst.SimpleStatementLine]:
        """The statements of each updater's `__init__` that take a dtype from the model."""
        found = {}
        for updater in {plan.updater for plan in plans if plan.updater is not None}:
            for node in walk(updater):
                if not isinstance(node, cst.Assign) or not isinstance(self._parents[node], cst.SimpleStatementLine):
                    continue
                target = node.targets[0].target
                if self._code(node.value) == "model_runner.dtype" and self._code(target).startswith("self."):
                    statement = self._parents[node]
                    assert isinstance(statement, cst.SimpleStatementLine)
                    found[updater, self._code(target)] = statement
        return found

    def _check_plans(
        self, plans: tuple[PlanCall, ...], attributes: Mapping[tuple[cst.ClassDef, str], cst.SimpleStatementLine]
    ) -> None:
        if not plans:
            self._problem(self._module, "no plan() with a KV dtype is in this file, so what runs is planned elsewhere")
        for plan in plans:
            dtype = self._code(plan.kv_dtype.value)
            if plan.updater is None or (plan.updater, dtype) not in attributes:
                self._problem(plan.call, f"the KV dtype planned with, {dtype}, is not the model's own")
            elif any(self._code(node) == "self.kv_data_type" for node in walk(plan.updater)):
                self._problem(
                    plan.call, f"{plan.updater.name.value} keeps a KV dtype already: the file is half changed"
                )
            if not isinstance(plan.kv_indptr.value, cst.Name) and not self._binds(plan.call, "kv_indptr"):
                self._problem(plan.call, "plans from a host copy, with no kv_indptr on the device beside it")

    def _binds(self, node: cst.CSTNode, name: str) -> bool:
        function = self._enclosing(node, cst.FunctionDef)
        return isinstance(function, cst.FunctionDef) and name in (param.name.value for param in function.params.params)

    def _problem(self, node: cst.CSTNode, what: str) -> None:
        self._problems.append(f"{self._path}:{self._line(node)}: {what}")

    def _line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def _code(self, node: cst.CSTNode) -> str:
        return self._module.code_for_node(node) if isinstance(node, cst.Attribute | cst.Name) else ""

    def _enclosing(self, node: cst.CSTNode, kind: type[cst.CSTNode]) -> cst.CSTNode | None:
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, kind):
            parent = self._parents.get(parent)
        return parent

    def _class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        found = self._enclosing(node, cst.ClassDef)
        return found if isinstance(found, cst.ClassDef) else None

    def _qualified(self, function: cst.FunctionDef) -> str:
        owner = self._class_of(function)
        return f"{owner.name.value}.{function.name.value}" if owner is not None else function.name.value


def _inside_srt(path: Path) -> tuple[str, ...]:
    """The parts of a path below SGLang's `srt`, so that where SGLang is installed tells nothing about hardware."""
    parts = path.parts
    return parts[len(parts) - parts[::-1].index("srt") :] if "srt" in parts else parts[-1:]


def _argument(call: cst.Call, position: int, *keywords: str) -> cst.Arg | None:
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value in keywords:
            return arg
    if len(call.args) > position and all(arg.keyword is None and not arg.star for arg in call.args[: position + 1]):
        return call.args[position]
    return None


def _is_wrapper_run(call: cst.Call) -> bool:
    positional = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "run" and len(positional) == 4


def _is_flash_attention(call: cst.Call) -> bool:
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    positional = any(arg.keyword is None and arg.star != "**" for arg in call.args)
    return called_name(call) == "flash_attn_with_kvcache" and not positional and {"q", "k_cache", "v_cache"} <= keywords
