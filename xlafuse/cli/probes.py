"""Marks the expressions of a user's file, so that a trace tells which value each of them holds."""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from xlafuse.cli.fingerprints import MARK

Span = tuple[int, int]
"""First byte in a file and the one after the last."""


@dataclass(frozen=True)
class Source:
    """A user's file."""

    file: str
    data: bytes

    @classmethod
    def of(cls, file: str) -> Source | None:
        """Reads a file; None where it holds no Python in UTF-8."""
        try:
            made = cls(str(Path(file).resolve()), Path(file).read_bytes())
            made.data.decode()
            ast.parse(made.data)
        except (OSError, SyntaxError, ValueError):
            return None
        return made

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.data)

    @cached_property
    def nodes(self) -> dict[Span, ast.expr]:
        """The expressions by their place; of several at one place the outermost."""
        found: dict[Span, ast.expr] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr):
                found.setdefault(self.span(node), node)
        return found

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: Any) -> Span:
        """Returns the place of a node."""
        first = self._starts[node.lineno - 1] + node.col_offset
        return first, self._starts[node.end_lineno - 1] + node.end_col_offset

    def lines(self, node: Any) -> Span | None:
        """Returns the place of a statement's lines; None where it shares them with another."""
        (first, last), begin = self.span(node), self._starts[node.lineno - 1]
        end = self._starts[node.end_lineno]
        before, after = self.data[begin:first], self.data[last:end].strip()
        return None if before.strip() or (after and not after.startswith(b"#")) else (begin, end)

    def around(self, node: ast.AST, *kinds: type) -> Any:
        """Returns the innermost node of these kinds around a node, or the node itself; the module if there is none."""
        while not isinstance(node, kinds) and node in self.parents:
            node = self.parents[node]
        return node

    def probed(self) -> CodeType:
        """Compiles the file with every expression marked."""
        tree = _Marking(self).visit(ast.parse(self.data))
        return compile(ast.fix_missing_locations(tree), self.file, "exec", dont_inherit=True)


_CALL = "__xlafuse_mark__"
"""Name of the function that marked code calls."""


class _Marking(ast.NodeTransformer):
    """Wraps the expressions in functions' bodies in calls that mark their values."""

    def __init__(self, source: Source):
        self._source = source
        self._is_inside = False

    def visit(self, node: ast.AST) -> Any:
        span = self._source.span(node) if isinstance(node, ast.expr) else None
        node = super().visit(node)
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not self._is_inside or span is None or not is_read or isinstance(node, _UNMARKED):
            return node
        where: list[Any] = [*map(ast.Constant, (self._source.file, *span)), node]
        call = ast.Call(ast.Name(_CALL, ast.Load()), where, [])
        return ast.copy_location(call, node)

    def _function(self, node: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        bodies = node.body if isinstance(node.body, list) else [node.body]
        made = [self.visit(each) for each in bodies]
        node.body = made if isinstance(node.body, list) else made[0]
        self._is_inside = before
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            node.func = self.visit(node.func)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        node.value = self.visit(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        node.body = [self.visit(each) for each in node.body]
        return node


_UNMARKED = (ast.Constant, ast.JoinedStr, ast.Starred, ast.Slice, ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await)


@dataclass(frozen=True)
class Marked:
    """One evaluation of an expression. frame: number of the call of the function that holds it."""

    file: str
    span: Span
    frame: int


@contextlib.contextmanager
def marking() -> Iterator[Sequence[Marked]]:
    """Makes marked code run within the context; yields what it evaluated, in order: the n-th is the mark n."""
    found: list[Marked] = []
    frames: dict[Any, int] = {}  # kept, so that no two frames have the same id

    def mark(file: str, first: int, last: int, value: Any) -> Any:
        array: Any = value
        if not isinstance(value, jax.Array) and (as_array := getattr(type(value), "__jax_array__", None)) is not None:
            array = as_array(value)  # of nnx.Param
        if isinstance(array, jax.Array | np.ndarray):
            frame = frames.setdefault(sys._getframe(1), len(frames))
            checkpoint_name(array, f"{MARK}{len(found)}")
            found.append(Marked(file, (first, last), frame))
        return value

    setattr(builtins, _CALL, mark)
    try:
        yield found
    finally:
        delattr(builtins, _CALL)
        frames.clear()
