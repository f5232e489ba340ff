"""Finds values of pairs, as distances and additive scores, that are much larger than what they are computed from."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.patterns.launch_patterns import elementwise_inputs, is_library_kernel, is_product
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy

_GROWTH = 8
"""A value of pairs is at least so many times as large as all that it is computed from."""

RECOMPUTED_PAIRS = Remedy(
    kind="rewrite",
    code="# before: scores = (jnp.tanh(a[:, None] + b) * v).sum(-1)\n"
    "scores = jax.checkpoint(lambda a, b, v: (jnp.tanh(a[:, None] + b) * v).sum(-1))(a, b, v)",
    text="compute it again in the backward pass: jax.checkpoint around the function that makes it and reduces it, from "
    "its small inputs to its small result. It is much larger than what it is made of: that saves memory and "
    "traffic, and time where it is computed fast (not by tanh or erf). Around the part that makes it alone it would be "
    "written twice",
)


def of_pairs(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for values of pairs that the forward pass reads, too; None for others."""
    largest = max(producer.outputs, key=lambda value: value.bytes)
    later = [reader for reader in table.readers.get(producer.index, ()) if reader.phase == "backward"]
    is_kept = bool(later) and all(reader.phase == "forward" for reader in readers)
    return RECOMPUTED_PAIRS if is_kept and is_pairwise(table, producer, largest.name) else None


def is_pairwise(table: Table, producer: LaunchRow, name: str) -> bool:
    """Whether a launch of the forward pass makes a value of much smaller ones, which are there anyway.

    A product reads what another launch has written, and would do so again. So would the sums and maxima of pairs be
    made again, which a softmax of them is computed from.
    """
    size = next((value.bytes for value in producer.outputs if value.name == name), 0)
    inputs = elementwise_inputs(producer, name, is_pairwise=True)
    given = [value for value in producer.inputs if value.name in inputs]
    if producer.phase != "forward" or not given or _GROWTH * sum(value.bytes for value in given) > size:
        return False
    if any(is_product(reader) or is_library_kernel(reader) for reader in table.readers.get(producer.index, ())):
        return False
    makers = [table.launches[value.producer] for value in given if value.producer is not None]
    largest = max((found.shape.byte_size for maker in makers for found in maker.facts.instructions.values()), default=0)
    return largest < size
