"""The rewrite of one backend file: each cast and each call behind it goes through `mla_fp8_dispatch`.

In a file that addresses the pool by CSR indices, five places change together: the KV dtype is kept in each updater's
`__init__`, every `plan` is given it, and each site's cast and `run` are routed. With a page table it is the cast and
the call. All else, comments and layout included, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import libcst as cst

from mla_diag.fix.flow import called_name
from mla_diag.fix.sites import DISPATCH, BackendFile, Kind, PlanCall, Site

_Change: TypeAlias = Callable[[cst.CSTNode], "cst.CSTNode | cst.FlattenSentinel[cst.BaseStatement]"]

_KV_DTYPE = "self.kv_data_type"
_IMPORT = f"from . import {DISPATCH}"


def rewrite(file: BackendFile) -> bytes:
    """The file's content with its sites fixed.

    Args:
        file: a file with sites and no problem.

    Returns:
        The new content, in the file's own encoding and line endings.

    Raises:
        ValueError: it is another file.
    """
    if not file.sites or file.problem is not None:
        raise ValueError(f"{file.path}: only files that are understood are rewritten")
    changes: dict[cst.CSTNode, _Change] = {}
    for site in file.sites:
        changes[site.call] = _routed_cast(site)
    for call in file.pool_calls:
        name = called_name(call)
        if name in _ROUTED:
            changes[call] = _ROUTED[name]
    if any(site.kind is Kind.CSR for site in file.sites):
        for plan in file.plans:
            changes[plan.call] = _routed_plan(plan)
        for statement in _dtype_statements(file):
            changes[statement] = _with_kv_dtype
    module = file.source.module.visit(_Rewriter(changes))
    assert isinstance(module, cst.Module)
    return _with_import(module).bytes


class _Rewriter(cst.CSTTransformer):
    def __init__(self, changes: dict[cst.CSTNode, _Change]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(  # type: ignore[override]  # the base class promises less than it accepts
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.BaseStatement]:
        change = self._changes.get(original_node)
        return updated_node if change is None else change(updated_node)


def _routed_cast(site: Site) -> _Change:
    """`POOL.to(DTYPE)` becomes a call that is given the pool and the dtype."""

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        assert isinstance(node.func, cst.Attribute)
        values = [node.func.value, node.args[0].value]
        if site.kind is Kind.CSR:
            assert site.wrapper is not None
            function, values = "kv_for_wrapper", [*values, cst.Name(site.wrapper)]
        else:
            function = "kv_for_page_table"
        call = cst.Call(_dispatch(function), whitespace_before_args=_new_line("    "), lpar=node.lpar, rpar=node.rpar)
        *rest, last = (cst.Arg(value) for value in values)
        args = [arg.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))) for arg in rest]
        return call.with_changes(args=[*args, last.with_changes(whitespace_after_arg=_new_line(""))])

    return change


def _routed_run(node: cst.CSTNode) -> cst.CSTNode:
    """`wrapper.run(…)` becomes `dispatch.run(wrapper, …)`."""
    assert isinstance(node, cst.Call)
    assert isinstance(node.func, cst.Attribute)
    return _with_first(node, node.func.value).with_changes(func=_dispatch("run"))


def _routed_attention(node: cst.CSTNode) -> cst.CSTNode:
    """`flash_attn_with_kvcache(…)` becomes `dispatch.flash_attn_with_kvcache(flash_attn_with_kvcache, …)`."""
    assert isinstance(node, cst.Call)
    return _with_first(node, node.func).with_changes(func=_dispatch("flash_attn_with_kvcache"))


_ROUTED: dict[str | None, _Change] = {"run": _routed_run, "flash_attn_with_kvcache": _routed_attention}


def _routed_plan(plan: PlanCall) -> _Change:
    """`wrapper.plan(…)` becomes `dispatch.plan(wrapper, …)` with the pool's dtype."""
    position = plan.call.args.index(plan.kv_dtype)

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        args = list(node.args)
        args[position] = args[position].with_changes(value=cst.parse_expression(_KV_DTYPE))
        call = node.with_changes(args=args)
        if plan.planner is not None:
            call = _with_last(call, "planner", node.func)
        else:
            assert isinstance(node.func, cst.Attribute)
            call = _with_first(call, node.func.value)
        if not isinstance(plan.kv_indptr.value, cst.Name):
            call = _with_last(call, "device_kv_indptr", cst.Name("kv_indptr"))
        return call.with_changes(func=_dispatch("plan"))

    return change


def _dtype_statements(file: BackendFile) -> set[cst.SimpleStatementLine]:
    """The statements after which an updater can keep the pool's dtype: where it took the dtype its plans give."""
    return {
        file.dtype_attributes[plan.updater, file.source.code(plan.kv_dtype.value)]
        for plan in file.plans
        if plan.updater is not None
    }


def _with_kv_dtype(node: cst.CSTNode) -> cst.FlattenSentinel[cst.BaseStatement]:
    assert isinstance(node, cst.SimpleStatementLine)
    kept = cst.parse_statement(f"{_KV_DTYPE} = model_runner.kv_cache_dtype")
    assert isinstance(kept, cst.SimpleStatementLine)
    return cst.FlattenSentinel([node, kept])


def _with_import(module: cst.Module) -> cst.Module:
    """The module with the dispatch imported after its last import that no class or function precedes."""
    last = 0
    for index, statement in enumerate(module.body):
        if isinstance(statement, cst.ClassDef | cst.FunctionDef):
            break
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], cst.Import | cst.ImportFrom
        ):
            last = index + 1
    return module.with_changes(body=[*module.body[:last], cst.parse_statement(_IMPORT), *module.body[last:]])


def _dispatch(function: str) -> cst.BaseExpression:
    return cst.parse_expression(f"{DISPATCH}.{function}")


def _with_first(call: cst.Call, value: cst.BaseExpression) -> cst.Call:
    """The call with an argument before the others, on a line of its own where they have theirs."""
    return call.with_changes(args=[cst.Arg(value, comma=_separator(call)), *call.args])


def _with_last(call: cst.Call, keyword: str, value: cst.BaseExpression) -> cst.Call:
    """The call with a named argument after the others; a trailing comma stays trailing."""
    *rest, last = call.args
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(
        value,
        keyword=cst.Name(keyword),
        equal=equal,
        comma=last.comma,
        whitespace_after_arg=last.whitespace_after_arg,
    )
    before = last.with_changes(comma=_separator(call), whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*rest, before, added])


def _new_line(indent: str) -> cst.ParenthesizedWhitespace:
    return cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))


def _separator(call: cst.Call) -> cst.Comma:
    """A comma as it stands between the call's arguments, without a comment that belongs to one of them."""
    space = call.whitespace_before_args
    if isinstance(space, cst.ParenthesizedWhitespace):
        return cst.Comma(whitespace_after=space.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[]))
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
