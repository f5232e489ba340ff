"""Queries, keys and values as TMA brings them: lengths are whole groups of rows, and some of them share an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

GROUP = 8
"""TMA brings groups of eight rows: lengths are multiples of them."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Some heads of an array.

    array: (batch, length, heads of all, head size), the length in whole groups. first, heads: which of its heads.
    """

    array: jax.Array
    first: int
    heads: int

    def of(self, ref: Any) -> Any:
        """What of a reference to the array is the operand's."""
        return ref if ref.shape[2] == self.heads else ref.at[:, :, pl.ds(self.first, self.heads)]


def whole_groups(*arrays: jax.Array, columns: int = 1) -> list[Operand]:
    """Each (batch, length, heads, head size) with zeros up to whole groups of rows and of so many columns.

    Those of one length that have to be padded come into one array: XLA makes one kernel of it in place of one each.
    """
    operands: list[Operand | None] = [None] * len(arrays)
    ragged: dict[int, list[int]] = {}
    for i, array in enumerate(arrays):
        if _missing(array, columns) == (0, 0):
            operands[i] = Operand(array=array, first=0, heads=array.shape[2])
        else:
            ragged.setdefault(array.shape[1], []).append(i)
    for members in ragged.values():
        whole = _padded([arrays[i] for i in members], columns)
        first = 0
        for i in members:
            operands[i] = Operand(array=whole, first=first, heads=arrays[i].shape[2])
            first += arrays[i].shape[2]
    return [operand for operand in operands if operand is not None]


def _padded(arrays: Sequence[jax.Array], columns: int) -> jax.Array:
    whole = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=2)
    rows, missing = _missing(whole, columns)
    return jnp.pad(whole, ((0, 0), (0, rows), (0, 0), (0, missing)))


def _missing(array: jax.Array, columns: int) -> tuple[int, int]:
    return -array.shape[1] % GROUP, -array.shape[3] % columns


def clipped(rows: int, size: int, dtype: jnp.dtype) -> Any:
    """Shared memory for so many rows, of which TMA stores those that are there, whatever their number.

    The one row more is no whole group: Mosaic GPU would choose the layout of groups, and wants whole ones of the array.
    """
    return plgpu.SMEM((rows + 1, size), dtype)
