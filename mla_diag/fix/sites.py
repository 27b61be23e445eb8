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

from mla_diag.fix.flow import PoolFlow, called_name, functions_returning_pool, pool_flow, walk
from mla_diag.fix.source import Source

DISPATCH = "mla_fp8_dispatch"
# The attention backends of NVIDIA GPUs that have the casts; that one of them is not understood stops a fix.
MAIN_BACKENDS = frozenset({"flashinfer_mla_backend.py", "flashattention_backend.py"})
# `kv_data_type` is the twelfth argument of FlashInfer's plan and `kv_indptr` the second.
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
        pool: what handed the pool out.
        kind: how the attention behind it addresses the pool.
        call: the cast.
        wrapper: for CSR, the name of the wrapper that runs.
    """

    line: int
    function: str
    code: str
    pool: str
    kind: Kind
    call: cst.Call = field(repr=False)
    wrapper: str | None = None


@dataclass(frozen=True)
class PlanCall:
    """One call that plans a wrapper with a KV dtype.

    Attributes:
        call: the call.
        kv_dtype: its KV dtype argument.
        kv_indptr: its CSR pointer argument.
        planner: SGLang's own plan function, where that is called instead of the wrapper's.
        updater: the class that it stands in.
    """

    call: cst.Call
    kv_dtype: cst.Arg
    kv_indptr: cst.Arg
    planner: str | None
    updater: cst.ClassDef | None


@dataclass(frozen=True)
class BackendFile:
    """What a fix needs to know of one attention backend's source.

    Attributes:
        source: the file and its syntax tree.
        sites: its casts of the whole pool.
        pool_calls: the other calls that are given the pool.
        plans: calls that plan with a KV dtype.
        dtype_attributes: statements `self.NAME = model_runner.dtype` of each updater class, by class and NAME.
        problem: why the file cannot be fixed, as "LINE: reason"; None if it can, or has nothing to fix.
    """

    source: Source
    sites: tuple[Site, ...]
    pool_calls: tuple[cst.Call, ...]
    plans: tuple[PlanCall, ...]
    dtype_attributes: Mapping[tuple[cst.ClassDef, str], cst.SimpleStatementLine]
    problem: str | None

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.source.path

    @property
    def patched(self) -> bool:
        """Whether the file names the dispatch that a fix puts beside it."""
        return DISPATCH in self.source.module.code

    @property
    def needed(self) -> bool:
        """Whether a fix that must leave this file alone is no fix: it is one of those that NVIDIA servers run."""
        known = self.path.name in MAIN_BACKENDS and "hardware_backend" not in self.path.parts
        return bool(self.sites) and (known or any(site.kind is not Kind.OTHER for site in self.sites))


def read_backend(path: Path, content: bytes) -> BackendFile:
    """Read one backend file.

    Args:
        path: where it is; its parts below `srt` tell backends of other hardware.
        content: what it holds.

    Raises:
        ValueError: the content is not Python that can be read and written back unchanged.
    """
    return _Reader(Source.parse(path, content)).read()


def is_routed(call: cst.Call) -> bool:
    """Whether a call goes to the dispatch that a fix puts beside the file."""
    owner = call.func.value if isinstance(call.func, cst.Attribute) else None
    return isinstance(owner, cst.Name) and owner.value == DISPATCH


class _Reader:
    """Collects the parts of a `BackendFile` and the reasons against rewriting it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._problems: list[str] = []

    def read(self) -> BackendFile:
        functions = self._source.outer_functions()
        hand_out = functions_returning_pool(functions, self._source.parents)
        sites: list[Site] = []
        pool_calls: list[cst.Call] = []
        uncast: list[cst.Call] = []
        for function in functions:
            flow = pool_flow(function, self._source.parents, hand_out)
            pool_calls += flow.consumers
            uncast += [call for call, raw in flow.consumers.items() if raw and _is_attention(call)]
            if flow.casts:
                sites += self._sites(function, flow)
                for node in flow.escapes:
                    self._problem(node, "the pool leaves the function here, to where its dtype cannot be followed")
        plans = self._plans()
        attributes = self._dtype_attributes(plans)
        if sites:
            for call in (*uncast, *(call for call in pool_calls if is_routed(call))):
                self._problem(call, "this call is given the pool uncast and others are not: the file is half changed")
            if any(site.kind is Kind.CSR for site in sites):
                self._check_plans(plans, attributes)
        problem = self._problems[0] if self._problems else None
        return BackendFile(self._source, tuple(sites), tuple(pool_calls), plans, attributes, problem)

    def _sites(self, function: cst.FunctionDef, flow: PoolFlow) -> list[Site]:
        kind = self._kind(function, list(flow.consumers))
        wrapper = self._wrapper(function, flow) if kind is Kind.CSR else None
        sites = []
        for call, pool in flow.casts.items():
            dtype = call.args[0] if len(call.args) == 1 else None
            keyword = dtype.keyword.value if dtype is not None and dtype.keyword is not None else "dtype"
            if called_name(call) != "to" or dtype is None or dtype.star or keyword != "dtype":
                self._problem(call, "a cast other than .to(dtype)")
            code = " ".join(self._source.code(call).split())
            line, name = self._source.line(call), self._source.qualified_name(call)
            sites.append(Site(line, name, code, pool, kind, call, wrapper))
        return sites

    def _kind(self, function: cst.FunctionDef, consumers: list[cst.Call]) -> Kind:
        hardware = _OTHER_HARDWARE.intersection(
            word for part in self._source.parts_below_srt() for word in part.split("_")
        )
        if hardware:
            self._problem(function, f"a backend for other hardware ({', '.join(sorted(hardware))})")
            return Kind.OTHER
        if consumers and all(_is_wrapper_run(call) for call in consumers):
            return Kind.CSR
        if consumers and all(_is_flash_attention(call) for call in consumers):
            return Kind.PAGE_TABLE
        for call in consumers:
            if not _is_attention(call):
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
        first_cast = min(self._source.line(call) for call in flow.casts)
        bound = [param.name.value for param in function.params.params]
        for statement in function.body.body:
            if isinstance(statement, cst.SimpleStatementLine) and self._source.line(statement) < first_cast:
                assigned = (
                    target for part in statement.body if isinstance(part, cst.Assign) for target in part.targets
                )
                bound += [target.target.value for target in assigned if isinstance(target.target, cst.Name)]
        if name not in bound:
            self._problem(function, f"{name}, which runs, is not bound before the cast")
        return name

    def _plans(self) -> tuple[PlanCall, ...]:
        planners = {
            function.name.value
            for function in self._source.module.body
            if isinstance(function, cst.FunctionDef)
            and "kv_data_type" in (param.name.value for param in function.params.params)
        }
        plans = []
        for call in (node for node in walk(self._source.module) if isinstance(node, cst.Call)):
            planner = call.func.value if isinstance(call.func, cst.Name) and call.func.value in planners else None
            if planner is None and not (isinstance(call.func, cst.Attribute) and call.func.attr.value == "plan"):
                continue
            wrappers_first = int(planner is not None or is_routed(call))
            kv_dtype = _argument(call, _KV_DTYPE_POSITION + wrappers_first, "kv_data_type")
            kv_indptr = _argument(call, _KV_INDPTR_POSITION + wrappers_first, "kv_indptr", "kv_indptr_cpu")
            if kv_dtype is not None and kv_indptr is not None:
                plans.append(PlanCall(call, kv_dtype, kv_indptr, planner, self._source.class_of(call)))
        return tuple(plans)

    def _dtype_attributes(self, plans: tuple[PlanCall, ...]) -> dict[tuple[cst.ClassDef, str], cst.SimpleStatementLine]:
        """The statements of each updater that take a dtype from the model."""
        found = {}
        for updater in {plan.updater for plan in plans if plan.updater is not None}:
            for statement in walk(updater):
                if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Assign):
                    continue
                assign = statement.body[0]
                if self._source.code(assign.value) == "model_runner.dtype":
                    found[updater, self._source.code(assign.targets[0].target)] = statement
        return found

    def _check_plans(
        self, plans: tuple[PlanCall, ...], attributes: Mapping[tuple[cst.ClassDef, str], cst.SimpleStatementLine]
    ) -> None:
        if not plans:
            self._problem(self._source.module, "no plan() with a KV dtype is here, so what runs is planned elsewhere")
        for plan in plans:
            dtype = self._source.code(plan.kv_dtype.value)
            if plan.updater is None or (plan.updater, dtype) not in attributes:
                self._problem(plan.call, f"the KV dtype planned with, {dtype}, is not the model's own")
            elif any(
                isinstance(node, cst.Name) and node.value == "kv_data_type" for node in self._targets(plan.updater)
            ):
                self._problem(
                    plan.call, f"{plan.updater.name.value} keeps a KV dtype already: the file is half changed"
                )
            function = self._source.function_of(plan.call)
            parameters = [] if function is None else [param.name.value for param in function.params.params]
            if not isinstance(plan.kv_indptr.value, cst.Name) and "kv_indptr" not in parameters:
                self._problem(plan.call, "plans from a host copy, with no kv_indptr on the device beside it")

    def _targets(self, updater: cst.ClassDef) -> list[cst.CSTNode]:
        """The names of the attributes that a class assigns."""
        targets = (node.target for node in walk(updater) if isinstance(node, cst.AssignTarget))
        return [target.attr for target in targets if isinstance(target, cst.Attribute)]

    def _problem(self, node: cst.CSTNode, what: str) -> None:
        self._problems.append(f"{self._source.line(node)}: {what}")


def _argument(call: cst.Call, position: int, *keywords: str) -> cst.Arg | None:
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value in keywords:
            return arg
    if len(call.args) > position and all(arg.keyword is None and not arg.star for arg in call.args[: position + 1]):
        return call.args[position]
    return None


def _is_attention(call: cst.Call) -> bool:
    return not is_routed(call) and (_is_wrapper_run(call) or _is_flash_attention(call))


def _is_wrapper_run(call: cst.Call) -> bool:
    positional = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "run" and len(positional) == 4


def _is_flash_attention(call: cst.Call) -> bool:
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    positional = any(arg.keyword is None and arg.star != "**" for arg in call.args)
    return called_name(call) == "flash_attn_with_kvcache" and not positional and {"q", "k_cache", "v_cache"} <= keywords
