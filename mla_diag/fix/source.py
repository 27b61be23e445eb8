"""A Python source file as a syntax tree that knows its lines, and writes back to the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from mla_diag.fix.flow import children, walk


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: where it is.
        module: its syntax tree.
        parents: each node's parent.
    """

    path: Path
    module: cst.Module
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    _positions: Mapping[cst.CSTNode, CodeRange]

    @classmethod
    def parse(cls, path: Path, content: bytes) -> Source:
        """Read a file's content.

        Raises:
            ValueError: it is not Python, or would not be written back byte for byte.
        """
        try:
            wrapper = MetadataWrapper(cst.parse_module(content), unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not readable as Python: {str(error).splitlines()[0]}") from error
        if wrapper.module.bytes != content:
            raise ValueError(f"{path}: its syntax tree does not write back to the same bytes")
        parents = {child: node for node in walk(wrapper.module) for child in children(node)}
        return cls(path, wrapper.module, parents, wrapper.resolve(PositionProvider))

    def parts_below_srt(self) -> tuple[str, ...]:
        """The path's parts below SGLang's `srt`: where SGLang is installed says nothing about a file."""
        parts = self.path.parts
        return parts[len(parts) - parts[::-1].index("srt") :] if "srt" in parts else parts[-1:]

    def line(self, node: cst.CSTNode) -> int:
        """The line a node begins on, from 1."""
        return self._positions[node].start.line

    def code(self, node: cst.CSTNode) -> str:
        """A node as it is written."""
        return self.module.code_for_node(node).strip()

    def outer_functions(self) -> list[cst.FunctionDef]:
        """Functions and methods, without the closures in them."""
        functions = [node for node in walk(self.module) if isinstance(node, cst.FunctionDef)]
        return [function for function in functions if self.function_of(function) is None]

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The innermost function around a node."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, cst.FunctionDef):
            parent = self.parents.get(parent)
        return parent

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The innermost class around a node."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, cst.ClassDef):
            parent = self.parents.get(parent)
        return parent

    def qualified_name(self, node: cst.CSTNode) -> str:
        """The class and function around a node, as in `Backend.forward_decode`; closures go by what they are in."""
        function = self.function_of(node)
        while function is not None and self.function_of(function) is not None:
            function = self.function_of(function)
        names = [each.name.value for each in (self.class_of(node), function) if each is not None]
        return ".".join(names) or "module"
