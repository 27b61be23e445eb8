"""Where the KV pool goes inside a function: from what hands it out, through views and names, to who takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import NamedTuple, TypeAlias

import libcst as cst

# MLATokenToKVPool hands its layer out through the first; the second is the buffer that decode context parallelism
# gathers prefixes into (SGLang 0.5.15), which the extend branch casts in the pool's place.
SOURCES = frozenset({"get_key_buffer", "_get_key_buffer"})
SOURCE_ATTRIBUTES = frozenset({"dcp_kv_buffer"})
_CASTS = frozenset({"to", "type", "type_as", "bfloat16", "half", "float", "double"})
_VIEWS = frozenset(
    {"view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "expand"}
    | {"contiguous", "detach"}
)
_VIEW_ATTRIBUTES = frozenset({"data", "T", "mT"})
# What may be asked of the pool, or taken of its rows, without the pool going anywhere.
_QUESTIONS = frozenset(
    {"shape", "dtype", "device", "ndim", "nbytes", "itemsize", "is_cuda", "index_select"}
    | {"numel", "dim", "size", "stride", "element_size", "is_contiguous"}
)

Parents: TypeAlias = Mapping[cst.CSTNode, cst.CSTNode]


class _Held(NamedTuple):
    """The pool in a name or an expression: what handed it out, and whether it may be as it came, never cast."""

    source: str
    raw: bool


# What each name holds at one point of a function; None is anything but the pool.
_Names: TypeAlias = dict[str, _Held | None]


@dataclass
class PoolFlow:
    """What one function does with the KV pool.

    Attributes:
        casts: calls that convert the pool, or a view of it, to another dtype, with what handed the pool out.
        consumers: other calls that are given the pool, with whether it may reach them uncast.
        escapes: where the pool leaves by another way (returned, stored, put in a container).
        returned: whether one of the escapes is a return.
    """

    casts: dict[cst.Call, str] = field(default_factory=dict)
    consumers: dict[cst.Call, bool] = field(default_factory=dict)
    escapes: list[cst.CSTNode] = field(default_factory=list)
    returned: bool = False


def pool_flow(function: cst.FunctionDef, parents: Parents, sources: frozenset[str] = SOURCES) -> PoolFlow:
    """Follow the KV pool through a function, the closures in it included.

    Args:
        function: the function.
        parents: each node's parent.
        sources: names of the functions that hand the pool out.
    """
    pools = _Pools(sources)
    pools.suite(function.body, {})
    flow = PoolFlow()
    for node, held in pools.found.items():
        if isinstance(node, cst.Call) and node in pools.casts:
            flow.casts[node] = held.source
        parent = parents[node]
        # Of `pool.view(...)` and `paged_view(pool)` the pool's parent is part of a call that is the pool again.
        whole = parents[parent] if isinstance(parent, cst.Attribute | cst.Arg) else parent
        if parent not in pools.found and whole not in pools.found:
            _end(node, held.raw, parents, flow)
    return flow


def functions_returning_pool(functions: Sequence[cst.FunctionDef], parents: Parents) -> frozenset[str]:
    """SOURCES and those of `functions` that pass a pool on, so that a cast of their result is seen too."""
    sources = SOURCES
    while True:
        passing = {each.name.value for each in functions if pool_flow(each, parents, sources).returned}
        if passing <= sources:
            return sources
        sources |= passing


def mentions_pool(content: bytes) -> bool:
    """Whether a file can have to do with the pool at all; much faster than reading it."""
    return any(name.encode() in content for name in (*SOURCES, *SOURCE_ATTRIBUTES))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all below it, parents first and statements in order; without layout and comments."""
    yield node
    for child in children(node):
        yield from walk(child)


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes right below one, without layout and comments; LibCST's own `children` runs a visitor for each node."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            yield from value


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    layout = ("whitespace", "lines", "header", "footer", "lpar", "rpar", "lbracket", "rbracket", "comma", "semicolon")
    return tuple(field.name for field in fields(kind) if not any(word in field.name for word in layout))


def called_name(call: cst.Call) -> str | None:
    """The last part of what is called: `run` of `self.wrapper.run(...)`."""
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else None


class _Pools:
    """Runs over a function's statements in order and records which expressions are the pool, or a view of all its rows.

    Branches are followed apart and joined: a name is the pool if it is on one of the ways here.
    """

    def __init__(self, sources: frozenset[str]) -> None:
        self._sources = sources
        self.found: dict[cst.CSTNode, _Held] = {}
        self.casts: set[cst.Call] = set()

    def suite(self, suite: cst.BaseSuite, names: _Names) -> _Names | None:
        """Names after the statements; None if they end in a return or raise."""
        after: _Names | None = dict(names)
        for statement in suite.body:
            if after is None:
                return None
            after = self._statement(statement, after)
        return after

    def _statement(self, statement: cst.CSTNode, names: _Names) -> _Names | None:  # noqa: PLR0911  # one a statement
        if isinstance(statement, cst.If):
            self._expression(statement.test, names)
            taken = self.suite(statement.body, names)
            other = names if statement.orelse is None else self._statement(statement.orelse, names)
            return _join(taken, other)
        if isinstance(statement, cst.Else | cst.Finally | cst.ClassDef):
            return self.suite(statement.body, names)
        if isinstance(statement, cst.For | cst.While):
            self._expression(statement.iter if isinstance(statement, cst.For) else statement.test, names)
            once = _join(names, self.suite(statement.body, names)) or names
            return _join(once, self.suite(statement.body, once))
        if isinstance(statement, cst.Try | cst.TryStar):
            after = self.suite(statement.body, names)
            reached = _join(names, after) or names
            for handler in statement.handlers:
                after = _join(after, self.suite(handler.body, reached))
            return (
                after if statement.finalbody is None or after is None else self._statement(statement.finalbody, after)
            )
        if isinstance(statement, cst.With):
            for item in statement.items:
                self._expression(item.item, names)
            return self.suite(statement.body, names)
        if isinstance(statement, cst.FunctionDef):
            parameters: _Names = {param.name.value: None for param in statement.params.params}
            self.suite(statement.body, names | parameters)
            return names
        if isinstance(statement, cst.Match):
            self._expression(statement.subject, names)
            after = names
            for case in statement.cases:
                after = _join(after, self.suite(case.body, names)) or names
            return after
        return self._simple(statement, names)

    def _simple(self, statement: cst.CSTNode, names: _Names) -> _Names | None:
        parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
        for part in parts:
            self._expression(part, names)
            if isinstance(part, cst.Assign):
                for target in part.targets:
                    self._bind(target.target, part.value, names)
            elif isinstance(part, cst.AnnAssign) and part.value is not None:
                self._bind(part.target, part.value, names)
            if isinstance(part, cst.Return | cst.Raise):
                return None
        return names

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression | None, names: _Names) -> None:
        if isinstance(target, cst.Name):
            names[target.value] = None if value is None else self._held(value, names)
        elif isinstance(target, cst.Tuple):
            values: list[cst.BaseExpression | None] = [None] * len(target.elements)
            if isinstance(value, cst.Tuple) and len(value.elements) == len(values):
                values = [element.value for element in value.elements]
            # All of the right side is taken before any name changes.
            before = dict(names)
            for element, one in zip(target.elements, values, strict=True):
                after = dict(before)
                self._bind(element.value, one, after)
                names.update({name: held for name, held in after.items() if name not in before or before[name] != held})

    def _expression(self, expression: cst.CSTNode, names: _Names) -> None:
        for node in walk(expression):
            if isinstance(node, cst.NamedExpr):
                self._bind(node.target, node.value, names)
            if not isinstance(node, cst.BaseExpression):
                continue
            held = _either(self._held(node, names), self.found.get(node))
            if held is not None:
                self.found[node] = held
            if isinstance(node, cst.Call) and self._cast_operand(node, names) is not None:
                self.casts.add(node)

    def _held(self, node: cst.CSTNode, names: _Names) -> _Held | None:
        """The pool that `node` evaluates to, or None if it is something else."""
        if isinstance(node, cst.Name):
            return names.get(node.value)
        if isinstance(node, cst.Attribute) and node.attr.value in SOURCE_ATTRIBUTES:
            return _Held(node.attr.value, raw=True)
        name = called_name(node) if isinstance(node, cst.Call) else None
        if name in self._sources:
            return _Held(name or "", raw=True)
        held = None
        for part in self._carriers(node, names):
            held = _either(held, self._held(part, names))
        converts = isinstance(node, cst.Call) and (self._cast_operand(node, names) is not None or _is_dispatch(name))
        return held._replace(raw=False) if held is not None and converts else held

    def _carriers(self, node: cst.CSTNode, names: _Names) -> tuple[cst.BaseExpression, ...]:
        """The parts of an expression that are the pool if the expression is."""
        if isinstance(node, cst.Attribute):
            return (node.value,) if node.attr.value in _VIEW_ATTRIBUTES else ()
        if isinstance(node, cst.Subscript):
            # A slice keeps all the rows, or most; an index by a number or a tensor picks some.
            first = node.slice[0].slice
            keeps = isinstance(first, cst.Slice) or (
                isinstance(first, cst.Index) and isinstance(first.value, cst.Ellipsis)
            )
            return (node.value,) if keeps else ()
        if isinstance(node, cst.IfExp):
            return node.body, node.orelse
        if isinstance(node, cst.BooleanOperation):
            return node.left, node.right
        if isinstance(node, cst.NamedExpr):
            return (node.value,)
        return self._carriers_of_call(node, names) if isinstance(node, cst.Call) else ()

    def _carriers_of_call(self, call: cst.Call, names: _Names) -> tuple[cst.BaseExpression, ...]:
        name = called_name(call) or ""
        operand = self._cast_operand(call, names)
        if operand is not None:
            return (operand,)
        if isinstance(call.func, cst.Attribute) and name in _VIEWS:
            return (call.func.value,)
        # SGLang's `paged_view(cache, page_size)`, and the dispatch of a file that is fixed.
        passes_on = name.endswith("view") or _is_dispatch(name)
        return (call.args[0].value,) if call.args and passes_on else ()

    def _cast_operand(self, call: cst.Call, names: _Names) -> cst.BaseExpression | None:
        """The pool that `call` converts, as in `pool.to(dtype)` or `torch.Tensor.to(pool, dtype)`."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _CASTS:
            return None
        operands = (call.func.value, *(arg.value for arg in call.args[:1]))
        return next((operand for operand in operands if self._held(operand, names) is not None), None)


def _join(one: _Names | None, other: _Names | None) -> _Names | None:
    if one is None or other is None:
        return other if one is None else one
    return {name: _either(one.get(name), other.get(name)) for name in one.keys() | other.keys()}


def _either(one: _Held | None, other: _Held | None) -> _Held | None:
    if one is None or other is None:
        return one or other
    return _Held(one.source, one.raw or other.raw)


def _is_dispatch(name: str | None) -> bool:
    return name is not None and name.startswith("kv_for_")


def _end(node: cst.CSTNode, raw: bool, parents: Parents, flow: PoolFlow) -> None:
    """Record where the pool goes from `node`, whose parent is not the pool itself."""
    parent = parents[node]
    if isinstance(parent, cst.Arg):
        call = parents[parent]
        if isinstance(call, cst.Call):
            flow.consumers[call] = raw or flow.consumers.get(call, False)
        return
    if isinstance(parent, cst.Return):
        flow.returned = True
    if isinstance(parent, cst.Assign | cst.AnnAssign):
        targets = [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else [parent.target]
        flow.escapes += [target for target in targets if not isinstance(target, cst.Name)]
        return
    picks_rows = isinstance(parent, cst.Subscript) and parent.value is node
    asks = isinstance(parent, cst.Attribute) and parent.attr.value in _QUESTIONS
    compares = isinstance(parent, cst.Comparison | cst.ComparisonTarget | cst.Expr | cst.AssignTarget | cst.NamedExpr)
    if not (picks_rows or asks or compares or _is_unpacked(parent, parents)):
        flow.escapes.append(node)


def _is_unpacked(element: cst.CSTNode, parents: Parents) -> bool:
    """Whether an element belongs to a side of `a, b = x, y`, which is followed name by name."""
    container = parents.get(element)
    if not isinstance(element, cst.Element) or not isinstance(container, cst.Tuple):
        return False
    assign = parents[container]
    if isinstance(assign, cst.AssignTarget):
        return True
    return isinstance(assign, cst.Assign) and all(
        isinstance(target.target, cst.Tuple)
        and len(target.target.elements) == len(container.elements)
        and all(isinstance(each.value, cst.Name) for each in target.target.elements)
        for target in assign.targets
    )
