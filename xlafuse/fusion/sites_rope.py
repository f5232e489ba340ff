"""Rotary position embedding of one array; `combine` makes `rope` of two such."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.fusion.graph import Value
from xlafuse.fusion.indices import Index
from xlafuse.fusion.layouts import Ref, element, operand, peel
from xlafuse.fusion.sites import Proposal, Spelling, is_narrow, wide

_ANGLES = {"product": ("mul",), "quotient": ("div",), "contraction": ("outer",), "mixed contraction": ("outer",)}
"""Ways to compute angles of positions, and their primitives."""
_ORDERS = {4: ((0, 1, 2, 3), (0, 2, 1, 3)), 3: ((0, 1, 2, 3), (0, 2, 1, 3))}
"""Orders of the axes (batch, tokens, heads, size), by the value's rank; a value of three axes has no batch."""


def _rotated(
    x: jax.Array,
    positions: jax.Array,
    frequency: jax.Array,
    *,
    interleaved: bool,
    negates: bool = False,
    narrow: bool = False,
    angles: str = "product",
) -> tuple[jax.Array, jax.Array]:
    """Rotates, and returns the first and the second of each pair.

    narrow: in x's dtype. negates: adds the product with -second. angles: "product", "quotient" (of positions and
    wavelengths), "contraction" (of no axis), or "mixed contraction" (of integers and floating numbers).
    """
    more = wide(x.dtype)
    position = positions.astype(more)
    if angles in ("contraction", "mixed contraction"):
        angle = jnp.einsum("bt,f->btf", positions if angles == "mixed contraction" else position, frequency)
    else:
        angle = position[..., None] * frequency if angles == "product" else position[..., None] / frequency
    cosine, sine = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    size = x.shape[-1]
    if interleaved:
        first, second = (jax.lax.slice_in_dim(x, k, size - 1 + k, 2, axis=3) for k in range(2))
    else:
        first, second = x[..., : size // 2], x[..., size // 2 :]
    if narrow:
        cosine, sine = cosine.astype(x.dtype), sine.astype(x.dtype)
    else:
        first, second = first.astype(more), second.astype(more)
    low = first * cosine + -second * sine if negates else first * cosine - second * sine
    return low.astype(x.dtype), (second * cosine + first * sine).astype(x.dtype)


def theta_of(frequency: np.ndarray, *, is_wavelength: bool = False) -> float | None:
    """Returns the base of frequencies that are theta ** (-k / length); None where there is none.

    Of those that fit about as well as any, the one with the fewest digits.
    """
    with np.errstate(all="ignore"):
        found = np.asarray(frequency, np.float64)
        found = 1 / found if is_wavelength else found
        length = found.size
        if length < 2 or found.ndim != 1 or not np.all((found > 0) & np.isfinite(found)):
            return None
        exponents = np.arange(length) / length

        def error(theta: float) -> float:
            return float(np.max(np.abs(theta**-exponents / found - 1)))

        theta = float(found[-1] ** (-1 / exponents[-1]))
        if not np.isfinite(theta) or not (least := error(theta)) < 1e-5:
            return None
        rounded = (float(f"{theta:.{digits}g}") for digits in range(1, 9))
        return next((each for each in rounded if each > 0 and error(each) <= max(2 * least, 2**-24)), theta)


def integers_of(positions: np.ndarray) -> np.ndarray | None:
    """Returns positions that are whole numbers as integers (tokens,) or (batch, tokens); None for others."""
    rounded = np.rint(positions)
    if not np.all(np.isfinite(positions)) or not np.array_equal(rounded, positions) or np.any(abs(rounded) >= 2**24):
        return None
    whole = rounded.astype(np.int32)
    return whole[0] if np.all(whole == whole[:1]) else whole


def halves(length: int) -> tuple[tuple[int, int], ...]:
    """Returns where the first and the second of pairs are, in halves."""
    return (0, 1), (length // 2, 1)


def neighbours(length: int) -> tuple[tuple[int, int], ...]:
    """Returns where the first and the second of pairs are, side by side."""
    return (0, 2), (1, 2)


def _is_rotated(value: Value, *, narrow: bool, interleaved: bool, negates: bool) -> bool:
    """Returns whether the first of each pair is a sum in the dtype of the rotation."""
    whole = element(value)
    (offset, stride), _ = (neighbours if interleaved else halves)(value.shape[-1])
    (variable, _, size), *_ = whole.indices[-1].digits
    first = Index(((variable, 1, size // 2),), offset, stride)
    ref = peel(Ref(value, (*whole.indices[:-1], first)))
    if ref.value.primitive == "convert_element_type":
        ref = peel(operand(ref, 0))
    sums = ("add",) if negates else ("add", "sub")
    return ref.value.primitive in sums and ref.value.dtype == (value.dtype if narrow else wide(value.dtype))


def _rotations(
    value: Value, *, positions_in: Any, narrow: bool, interleaved: bool, negates: bool
) -> Iterator[Proposal]:
    rank = len(value.shape)
    if rank not in _ORDERS or value.shape[-1] % 2 or value.shape[-1] < 4 or (narrow and not is_narrow(value)):
        return
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return
    if not _is_rotated(value, narrow=narrow, interleaved=interleaved, negates=negates):
        return
    more = wide(value.dtype)
    for order in _ORDERS[rank]:
        shape = tuple(((1, *value.shape) if rank == 3 else value.shape)[axis] for axis in order)
        if shape[1] == 1 and positions_in != jnp.int32:
            continue
        yield Proposal(
            arrays={
                "x": jax.ShapeDtypeStruct(shape, value.dtype),
                "positions": jax.ShapeDtypeStruct(shape[:2], positions_in(more)),
                "frequency": jax.ShapeDtypeStruct((shape[-1] // 2,), more),
            },
            order=order,
            static={"interleaved": interleaved},
        )


def _spellings() -> Iterator[Spelling]:
    ends = frozenset(("concatenate", "reshape", "convert_element_type", "add"))
    choices = itertools.product((False, True), (False, True), (False, True), _ANGLES, (True, False))
    for interleaved, narrow, negates, angles, is_integer in choices:
        if angles == "mixed contraction" and not is_integer:
            continue

        def dtype(more: Any, is_integer: bool = is_integer) -> Any:
            return jnp.int32 if is_integer else more

        constants: dict[str, Any] = {} if is_integer else {"positions": ("positions", integers_of)}
        needs = frozenset(("cos", "sin", "concatenate", *_ANGLES[angles]))
        theta = partial(theta_of, is_wavelength=angles == "quotient")
        yield Spelling(
            operation="rotation",
            function=partial(_rotated, narrow=narrow, negates=negates, angles=angles),
            propose=partial(_rotations, positions_in=dtype, narrow=narrow, interleaved=interleaved, negates=negates),
            roots=ends,
            needs=needs,
            broadcasting=frozenset(("positions",)),
            pieces=neighbours if interleaved else halves,
            constants={**constants, "frequency": ("theta", theta)},
        )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
