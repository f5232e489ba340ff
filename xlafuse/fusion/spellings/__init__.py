"""The operations that `fuse` searches a program for, and the ways to write them.

A spelling is a function that means the same as the operation. It is traced, and its jaxpr is the pattern: a new way of
writing an operation is a new function here, and no matcher.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from xlafuse.fusion.spelling import Spelling
from xlafuse.fusion.spellings import (
    attention,
    batch_norm,
    decode,
    embedding,
    grouped,
    losses,
    low_rank,
    products,
    quantized,
    rope,
    rows,
)

ALLOWANCES = ("rounding",)
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
        for module in (
            decode,
            attention,
            losses,
            low_rank,
            grouped,
            products,
            quantized,
            rope,
            batch_norm,
            embedding,
            rows,
        )
    )
)


def operations() -> frozenset[str]:
    """Returns the names that `ops` and `skip` may have."""
    return frozenset({spelling.operation for spelling in _EVERY} | PARTS.keys() | OTHERS) - OPERATIONS.keys()


@dataclass(frozen=True)
class Choices:
    """The operations that `fuse` may call, and the differences that it accepts; its arguments of these names."""

    ops: tuple[str, ...] | None = None
    skip: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()

    def __post_init__(self):
        known = operations()
        for option, names in (("ops", self.ops or ()), ("skip", self.skip)):
            for name in names:
                if name not in known:
                    among = ", ".join(map(repr, sorted(known)))
                    raise ValueError(f"fuse: no operation {name!r}; {option} are among {among}.")
        for name in self.allow:
            if name not in ALLOWANCES:
                raise ValueError(f"fuse: unknown allowance {name!r}; there are {', '.join(map(repr, ALLOWANCES))}.")

    def __contains__(self, operation: str) -> bool:
        """Returns whether an operation may be called."""
        return (self.ops is None or operation in self.ops) and operation not in self.skip

    @cached_property
    def spellings(self) -> tuple[Spelling, ...]:
        """Returns the spellings of the operations and their parts; the largest sites first.

        Parts of a skipped operation may be sites of smaller ones.
        """
        wanted = {name for name in operations() if name in self}
        parts = {part for name in wanted for part in PARTS.get(name, ())}
        needed = (wanted | parts) - (self.skip - _JOINED)
        return tuple(spelling for spelling in _EVERY if spelling.operation in needed)
