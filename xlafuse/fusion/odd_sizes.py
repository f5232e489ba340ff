"""Pads matrix products of odd sizes that no operation takes.

It is a rewrite of single equations and no operation: nothing has to be matched, and any product of two matrices is
taken, whatever its result is read by. `pallas_kernels.primitives.odd_sizes` says where it pays.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.primitives.odd_sizes import Padding, padded_product, padding_of
from xlafuse.fusion.binding import whole
from xlafuse.fusion.graph import Equation, Graph, Value, frozen, readers
from xlafuse.fusion.site import Site
from xlafuse.fusion.terms import primitives_before

NAME = "padded_product"
_READING_WHOLE = frozenset((
    "conv_general_dilated", "custom_vjp_call", "ffi_call", "pallas_call", "scan", "sort", "top_k", "while",
))  # fmt: skip
"""Primitives that take whole arrays only: a part of one is copied for them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedProduct(Site):
    """A product at padded sizes in place of one equation."""

    padding: Padding

    @property
    def note(self) -> str:
        """Says what is padded, and from which size to which."""
        contracted = self.root.params["dimension_numbers"][0]
        sizes: dict[str, str] = {}
        for side, (name, free) in enumerate((("lhs", "rows"), ("rhs", "columns"))):
            padded = self.padding.lhs if name == "lhs" else self.padding.rhs
            for axis, (own, size) in enumerate(zip(self.arrays[name].shape, padded, strict=True)):
                if own != size:
                    sizes[f"from {own} to {size} "] = "features" if axis in contracted[side] else free
        what = " and ".join(f"{change}{kind}" for change, kind in sizes.items())
        return f"product padded {what}" + (" in gradients" if self.padding.serves_gradients_only else "")

    def key(self, values: Sequence[Value]) -> Hashable:
        """Returns the key of the product that is padded."""
        return super().key(values), self.padding, frozen(self.root.params)

    def call(self, arrays: dict[str, Any], implementation: str | None = None) -> tuple[jax.Array, ...]:
        """Computes the product of `lhs` and `rhs`."""
        params = {name: each for name, each in self.root.params.items() if name != "dimension_numbers"}
        dimensions = self.root.params["dimension_numbers"]
        return (padded_product(arrays["lhs"], arrays["rhs"], dimensions, self.padding, **params),)


def padded_products(graph: Graph, called: Sequence[Site]) -> tuple[PaddedProduct, ...]:
    """Returns the products outside the sites of operations that are worth padding."""
    owned = frozenset().union(*(site.covered for site in called))
    return tuple(
        site
        for equation in graph.equations
        if equation.primitive == "dot_general" and equation not in owned
        if (site := _padded(equation, owned, set(graph.outputs))) is not None
    )


def padding_for(product: Equation, *, copies_result: bool = False) -> Padding | None:
    """Returns how a product is padded, None where it is not. copies_result: see `padding_of`."""
    lhs, rhs = product.inputs
    if any(each.literal is not None or "iota" in primitives_before(each) for each in (lhs, rhs)):
        return None  # one-hot rows are made in the product's launch
    return padding_of(
        lhs.aval,
        rhs.aval,
        product.params["dimension_numbers"],
        result_dtype=product.outputs[0].dtype,
        minor=(_minor_axis(lhs), _minor_axis(rhs)),
        copies_result=copies_result,
    )


def _padded(product: Equation, owned: Collection[Equation], returned: Collection[Value]) -> PaddedProduct | None:
    (result,), (lhs, rhs) = product.outputs, product.inputs
    users = set(readers(result, returned))
    needs_whole = any(each is None or each in owned or each.primitive in _READING_WHOLE for each in users)
    padding = padding_for(product, copies_result=needs_whole)
    if padding is None:
        return None
    return PaddedProduct(
        operation=NAME,
        arrays={"lhs": whole(lhs), "rhs": whole(rhs)},
        options={},
        results=(result,),
        orders=((),),
        covered=frozenset((product,)),
        padding=padding,
    )


def _minor_axis(value: Value) -> int:
    """Returns the axis whose elements are neighbours in memory; XLA multiplies by a transposed array as it lies."""
    order = list(range(len(value.shape)))
    while value.primitive in ("transpose", "convert_element_type") and value.equation is not None:
        if value.primitive == "transpose":
            order = [value.equation.params["permutation"][axis] for axis in order]
        value = value.equation.inputs[0]
    return order.index(len(order) - 1)
