"""A linear layer with a low-rank correction."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.ops.lora_linear.reference import lora_linear_reference
from xlafuse.fusion.graph import Value
from xlafuse.fusion.spelling import Proposal, Spelling, is_narrow, struct
from xlafuse.fusion.spellings.products import depth_of, layouts, product_before, products_before


def _low_ranks(value: Value, *, bias: bool, wide: bool) -> Iterator[Proposal]:
    if not is_narrow(value):
        return
    for outer in products_before(value):
        for operand in outer.inputs:
            inner = product_before(operand)
            if inner is None or (rank := depth_of(outer)) >= (depth := depth_of(inner)):
                continue
            for rows, columns, order in layouts(value):
                shapes = {"x": (*rows, depth), "w": (depth, columns), "a": (depth, rank), "b": (rank, columns)}
                arrays = {name: struct(value, *shape) for name, shape in shapes.items()}
                arrays |= {"bias": struct(value, columns, dtype=jnp.float32 if wide else None)} if bias else {}
                yield Proposal(arrays=arrays, order=order)


def _narrow(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    alpha: float,
    scaled: str,
) -> jax.Array:
    """Computes each step in 16 bits. scaled: the factor of alpha, "result" or "rank"."""
    factor = jnp.asarray(alpha, x.dtype)
    low = x @ a
    low = (low * factor) @ b if scaled == "rank" else (low @ b) * factor
    y = x @ w + low
    return y if bias is None else y + bias


def _spellings() -> Iterator[Spelling]:
    functions = (
        (functools.partial(_narrow, scaled="result"), False),
        (functools.partial(_narrow, scaled="rank"), False),
        (lora_linear_reference, True),
    )
    for bias, (function, wide) in itertools.product((True, False), functions):
        yield Spelling(
            operation="lora_linear",
            function=function,
            propose=functools.partial(_low_ranks, bias=bias, wide=wide),
            roots=frozenset(("add", "convert_element_type")),
            needs=frozenset(("dot_general",)),
            unknowns={"alpha": 0.3217654321},
            floating=frozenset(("bias",)),
        )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
