"""Launch configurations of the gated activation's kernels: what may be chosen, and what is chosen untuned.

The kernels run for any two arrays of at least 128 values, all but the last of them in accesses of 16 bytes; packed, for
any rows of 2 * 128 features and more, in accesses as wide as the number of features is aligned; the rest is "xla".
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.elementwise import access_columns

FEW_BLOCKS = 1024
"""Below about this many blocks a GPU is not full, and smaller blocks end sooner."""


@dataclass(frozen=True, kw_only=True)
class ElementwiseConfig:
    """How many values of each array a block takes: `vectors` accesses of 16 bytes a thread."""

    vectors: int = 4

    def columns(self, itemsize: int) -> int:
        """The same in values of `itemsize` bytes."""
        return access_columns(self.vectors, itemsize)


def default_forward(elements: int, itemsize: int) -> ElementwiseConfig:
    """The untuned choice for `elements` results of `itemsize` bytes."""
    return _enough_blocks(elements, itemsize, ElementwiseConfig(vectors=2))


def default_backward(elements: int, itemsize: int) -> ElementwiseConfig:
    """The untuned choice for `elements` cotangents of `itemsize` bytes."""
    return _enough_blocks(elements, itemsize, ElementwiseConfig(vectors=2))


def _enough_blocks(elements: int, itemsize: int, config: ElementwiseConfig) -> ElementwiseConfig:
    return config if elements // config.columns(itemsize) >= FEW_BLOCKS else ElementwiseConfig(vectors=1)


def candidates() -> dict[str, ElementwiseConfig]:
    """The configurations worth measuring, by name, in both phases."""
    return {f"{vectors} vectors": ElementwiseConfig(vectors=vectors) for vectors in (1, 2, 4, 8)}
