"""The operations that `fuse` searches a program for, and the ways to write them.

A spelling is a function that means the same as the operation. It is traced, and its jaxpr is the pattern: a new way of
writing an operation is a new function here, and no matcher.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from xlafuse.fusion.spelling import Spelling
from xlafuse.fusion.spellings import (
    attention,
    batch_norm,
    embedding,
    grouped,
    losses,
    low_rank,
    products,
    quantized,
    rope,
    rows,
)

PARTS = {
    "norm_linear": ("rms_norm", "layer_norm", "linear"),
    "qkv_projection": ("linear", "rms_norm", "layer_norm", "rotation", "attention"),
    "linear_residual_norm": ("linear", "rms_norm", "gated_linear"),
    "linear_cross_entropy": ("linear", "cross_entropy"),
    "quantized_linear": ("dequantized", "linear"),
    "rope": ("rotation",),
    "gated_linear": ("rms_norm", "layer_norm"),
}
"""The parts that `combine` makes operations of: other operations, "rotation" and "dequantized"."""
OPERATIONS = {"rotation": "rope", "dequantized": "quantized_linear"}
"""The operations that reports name for parts that are none themselves."""
OTHERS = frozenset(("padded_product",))
"""What `fuse` also does, and `ops` and `skip` name: see `odd_sizes`."""
_JOINED = {"linear", "rms_norm", "layer_norm", "cross_entropy"}
"""Operations that are found also where they are not wanted, as parts of larger ones."""


OF_GRADIENTS = ("embedding",)
"""Operations whose forward pass is XLA's, and whose gradient is not."""


_EVERY: tuple[Spelling, ...] = tuple(
    itertools.chain.from_iterable(
        module.SPELLINGS
        for module in (attention, losses, low_rank, grouped, products, quantized, rope, batch_norm, embedding, rows)
    )
)


def operations() -> frozenset[str]:
    """Returns the names that `ops` and `skip` may have."""
    return frozenset({spelling.operation for spelling in _EVERY} | PARTS.keys() | OTHERS) - OPERATIONS.keys()


def spellings(ops: Sequence[str] | None = None, skip: Collection[str] = frozenset()) -> tuple[Spelling, ...]:
    """Returns the spellings of some operations and their parts, or all; the largest sites first.

    skip: operations that are not wanted, whose parts may be sites of smaller ones.

    Raises:
        ValueError: no such operation.
    """
    known = operations()
    for option, names in (("ops", ops or ()), ("skip", skip)):
        for name in names:
            if name not in known:
                among = ", ".join(map(repr, sorted(known)))
                raise ValueError(f"fuse: no operation {name!r}; {option} are among {among}.")
    wanted = (known if ops is None else {*ops}) - {*skip}
    parts = {part for name in wanted for part in PARTS.get(name, ())}
    needed = (wanted | parts) - ({*skip} - _JOINED)
    return tuple(spelling for spelling in _EVERY if spelling.operation in needed)
