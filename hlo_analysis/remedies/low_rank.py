"""Finds low-rank corrections of a product, `x @ w + (x @ a) @ b`, as low-rank adaptation (LoRA) trains them."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.patterns.attention_scores import elements
from hlo_analysis.patterns.launch_patterns import LINEAR, has, is_batched, is_product
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies.table import Table

_MOST_RANK = 128
"""What `lora_linear` takes at most."""

_MOST_STEPS = 3
"""The longest chain of launches from x @ a to (x @ a) @ b: a split-K sum, a slice of a joined product, a cast."""


def corrects(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> bool:
    """Whether a product corrects another that is made of the same rows, or the matrix that they are multiplied by."""
    if producer.phase != "forward" or not is_product(producer):
        return False
    return _merges(producer, readers) or any(_adds(table, reader) for reader in readers)


def _merges(producer: LaunchRow, readers: Sequence[LaunchRow]) -> bool:
    """Whether it adds a @ b to an argument of the result's size, by which others are multiplied."""
    whole = elements(producer.outputs[0])
    of_arguments = all(value.producer is None for value in producer.inputs)
    adds = has(producer, "add") and any(elements(value) == whole for value in producer.inputs)
    plain = all(is_product(reader) and not is_batched(reader) for reader in readers)
    return of_arguments and adds and plain and _is_low_rank(producer)


def _adds(table: Table, reader: LaunchRow) -> bool:
    """Whether it adds a product of low rank to another of the same input."""
    near = [found for found in (reader, *table.producers(reader)) if is_product(found)]
    for low in filter(_is_low_rank, near):
        inputs = {value.name for producer in _first_products(table, low) for value in producer.inputs}
        others = [other for other in near if other is not low and inputs & {value.name for value in other.inputs}]
        if any(_sums(reader, low, other) for other in others):
            return True
    return False


def _is_low_rank(product: LaunchRow) -> bool:
    """Whether it multiplies two matrices that are both smaller than what it makes of them, over a short axis."""
    whole = elements(product.outputs[0]) if product.outputs else 0
    factors = [size for size in map(elements, product.inputs) if 1 < size < whole]
    if is_batched(product) or len(factors) != 2:
        return False
    return factors[0] * factors[1] <= whole * _MOST_RANK**2


def _first_products(table: Table, low: LaunchRow) -> list[LaunchRow]:
    """The products behind a factor, where nothing but sums and moves stands between."""
    found, new = [], [low]
    for _ in range(_MOST_STEPS):
        new = [producer for launch in new for producer in table.producers(launch)]
        found += [producer for producer in new if is_product(producer)]
        new = [
            producer
            for producer in new
            if not is_product(producer) and {opcode for opcode, _ in producer.opcodes} <= LINEAR
        ]
    return found


def _sums(reader: LaunchRow, low: LaunchRow, other: LaunchRow) -> bool:
    """Whether a launch adds what two others made, or what one made to a product of its own."""
    outer, inner = (other, low) if low is reader else (low, other)
    shown = {outer.name} if inner is reader else {outer.name, inner.name}
    sums = [reader.facts.operand_origins(found) for found in reader.facts.of("add")]
    return any(
        {outer.name} in sides and outer.name not in (sides[0] & sides[1]) and shown <= sides[0] | sides[1]
        for sides in sums
    )
