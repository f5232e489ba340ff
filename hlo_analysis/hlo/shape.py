"""Parses XLA shapes: `bf16[8,4096]{1,0:T(8,128)S(1)}`, tuples of them, tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from hlo_analysis.hlo.lexer import Lexer, token

ELEMENT_BITS: dict[str, int] = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **dict.fromkeys(("f4e2m1fn",), 4),
    **dict.fromkeys(("f8e3m4", "f8e4m3", "f8e4m3fn", "f8e4m3b11fnuz", "f8e4m3fnuz"), 8),
    **dict.fromkeys(("f8e5m2", "f8e5m2fnuz", "f8e8m0fnu"), 8),
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
"""Bits of one element in memory. A predicate takes a byte; smaller types are packed, as in XLA:GPU and XLA:CPU."""

_ARRAY = token(r"""([a-z][a-z0-9]*+)\[([^\[\]{}()"']*+)\](\{[^{}]*+\}|(?!\{))""")
_ARRAY_HEAD = token(r"""([a-z][a-z0-9]*+)\[([^\[\]{}()"']*+)\]""")
_TUPLE = token(r"\(")
_BUFFER = token(r"b\(")
_COMMA = token(",")
_CLOSE = token(r"\)")
_DIMENSION = re.compile(r"\s*(<=|)\s*(?:(\d{1,18})|\?)\s*", re.ASCII)
_INTEGERS = re.compile(r"\s*(?:\d{1,18}\s*(?:,\s*\d{1,18}\s*)*+)?", re.ASCII)
_LAYOUT_FIELD = re.compile(r"([A-Z#]+)?\(([^()]*+)\)", re.ASCII)
_DEEPEST = 64  # nested tuples; XLA's programs stay below five


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of an array in memory."""

    minor_to_major: tuple[int, ...]
    """Dimension numbers, fastest-varying first."""
    memory_space: int = 0
    element_bits: int = 0
    """Size of an element if it differs from the type's own (`E(4)`), otherwise 0."""
    text: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The type of a value: an array, a tuple of shapes, a buffer of one shape, a token or an opaque handle.

    `element_type` is XLA's lower-case name ('bf16', 's32', 'f8e4m3fn'), or 'tuple', 'buffer', 'token', 'opaque'.
    `dimensions` holds sizes; if `dynamic` is set for a dimension, it is the bound, or -1 without a bound (`?`).
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    dynamic: tuple[bool, ...] = ()
    layout: Layout | None = None
    elements: tuple[Shape, ...] = ()

    @property
    def is_tuple(self) -> bool:
        """Whether the shape is a tuple."""
        return self.element_type == "tuple"

    @property
    def is_token(self) -> bool:
        """Whether the shape is a token, which orders effects and holds no data."""
        return self.element_type == "token"

    @property
    def element_count(self) -> int:
        """Returns the number of elements, dynamic dimensions at their bound; for a tuple, the sum over its leaves."""
        if self.elements:
            return sum(element.element_count for element in self.elements)
        return 0 if self.element_type in ("tuple", "token", "opaque") else prod(self.dimensions)

    @property
    def byte_size(self) -> int:
        """Returns the bytes of the data, dynamic dimensions at their bound; for a tuple, the sum over its leaves.

        The pointer table of a tuple and the padding of tiles do not count.

        Raises:
            ValueError: a dimension has no bound.
        """
        if self.elements:
            return sum(element.byte_size for element in self.elements)
        if -1 in self.dimensions:
            raise ValueError(f"{self} has a dimension without a bound, so no size in bytes")
        bits = (self.layout.element_bits if self.layout else 0) or ELEMENT_BITS.get(self.element_type, 0)
        return (prod(self.dimensions) * bits + 7) // 8

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of one element of an array, 0 of an empty one."""
        return self.byte_size // max(self.element_count, 1)

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """Returns the dimensions of an array, those first whose elements lie side by side; row-major if unknown."""
        order = self.layout.minor_to_major if self.layout else ()
        return order if len(order) == len(self.dimensions) else tuple(reversed(range(len(self.dimensions))))

    @property
    def text(self) -> str:
        """Returns the shape as XLA prints it, with layouts."""
        return self._print(with_layout=True)

    def __str__(self) -> str:
        return self._print(with_layout=False)

    def _print(self, *, with_layout: bool) -> str:
        if self.element_type == "tuple":
            parts = (
                (f"/*index={index}*/" if index and index % 5 == 0 else "") + element._print(with_layout=with_layout)
                for index, element in enumerate(self.elements)
            )
            return f"({', '.join(parts)})"
        if self.element_type == "buffer":
            return f"b({self.elements[0]._print(with_layout=with_layout)})"
        sizes = ",".join(
            "?" if size < 0 else f"<={size}" if dynamic else str(size)
            for size, dynamic in zip(self.dimensions, self.dynamic, strict=True)
        )
        layout = self.layout.text if with_layout and self.layout else ""
        return f"{self.element_type}[{sizes}]{layout}"


def parse_shape(text: str) -> Shape:
    """Parses one shape; nothing may follow it.

    Raises:
        HloParseError: `text` is not a shape.
    """
    lexer = Lexer(text)
    shape = read_shape(lexer, {})
    if not lexer.at_end():
        raise lexer.unexpected("the end of the shape")
    return shape


def read_shape(lexer: Lexer, known: dict[str, Shape], depth: int = 0) -> Shape:
    """Reads a shape. `known` caches array shapes by their text, so equal shapes are one object."""
    match = lexer.accept(_ARRAY)
    if match:
        return array_shape(lexer, known, match[1], match[2], match[3], match.start(1))
    match = lexer.accept(_ARRAY_HEAD)
    if match:  # the layout itself contains braces
        return array_shape(lexer, known, match[1], match[2], lexer.read_group(), match.start(1))
    if depth == _DEEPEST:
        raise lexer.error(f"tuples nested deeper than {_DEEPEST}")
    if lexer.accept(_BUFFER):
        inner = read_shape(lexer, known, depth + 1)
        lexer.expect(_CLOSE, "')' after the shape of a buffer")
        return Shape(element_type="buffer", elements=(inner,))
    lexer.expect(_TUPLE, "a shape")
    if lexer.accept(_CLOSE):
        return Shape(element_type="tuple")
    elements = [read_shape(lexer, known, depth + 1)]
    while lexer.accept(_COMMA):
        elements.append(read_shape(lexer, known, depth + 1))
    lexer.expect(_CLOSE, "',' or ')' in a tuple shape")
    return Shape(element_type="tuple", elements=tuple(elements))


def array_shape(lexer: Lexer, known: dict[str, Shape], kind: str, sizes: str, layout: str, at: int) -> Shape:
    """Builds the shape of `kind[sizes]layout`, found at offset `at`."""
    key = f"{kind}[{sizes}]{layout}"
    shape = known.get(key)
    if shape is None:
        shape = known[key] = _array_shape(lexer, kind, sizes, layout, at)
    return shape


def _array_shape(lexer: Lexer, kind: str, sizes: str, layout: str, at: int) -> Shape:
    if kind not in ELEMENT_BITS:
        raise lexer.error(f"unknown element type {kind!r}", at)
    dimensions: list[int] = []
    dynamic: list[bool] = []
    for size in sizes.split(",") if sizes.strip() else ():
        match = _DIMENSION.fullmatch(size)
        if not match:
            raise lexer.error(f"expected dimension sizes, found '{kind}[{sizes[:40]}]'", at)
        dimensions.append(int(match[2]) if match[2] else -1)
        dynamic.append(bool(match[1]) or not match[2])
    return Shape(
        element_type=kind,
        dimensions=tuple(dimensions),
        dynamic=tuple(dynamic),
        layout=_layout(lexer, layout, at) if layout else None,
    )


def _layout(lexer: Lexer, text: str, at: int) -> Layout:
    order, _, rest = text[1:-1].partition(":")
    if not _INTEGERS.fullmatch(order):
        raise lexer.error(f"expected dimension numbers in the layout, found {text[:40]!r}", at)
    numbers = {"S": 0, "E": 0}
    kind = ""
    for match in _LAYOUT_FIELD.finditer(rest.partition("P(")[0]):  # P(...) is a physical shape with its own layout
        kind = match[1] or kind  # T(8,128)(2,1): the second tile has no letter of its own
        if kind in numbers:
            if not _INTEGERS.fullmatch(match[2]):
                raise lexer.error(f"expected a number in {kind}(...) of the layout, found {match[2][:40]!r}", at)
            numbers[kind] = int(match[2] or 0) if "," not in match[2] else 0
    return Layout(
        minor_to_major=tuple(int(number) for number in order.split(",")) if order.strip() else (),
        memory_space=numbers["S"],
        element_bits=numbers["E"],
        text=text,
    )
