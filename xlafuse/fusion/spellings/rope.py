"""Rotary position embedding of one array; `combine` makes `rope` of two such."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.fusion.graph import Value
from xlafuse.fusion.indices import Index
from xlafuse.fusion.layouts import Ref, element, operand, peel
from xlafuse.fusion.spelling import Proposal, Spelling, is_narrow, wide
from xlafuse.fusion.terms import primitives_before

_ANGLES = {"product": ("mul",), "quotient": ("div",), "contraction": ("outer",), "mixed contraction": ("outer",)}
"""Ways to compute angles of positions, and their primitives."""
_TABLES = "its cosines and sines come from tables; rope takes positions and a base, and computes the angles itself"
_COORDINATES = (
    "its positions are two-dimensional, and half of the frequencies belong to each coordinate; rope takes one position "
    "for each row"
)
_ANGLES_OF_ITS_OWN = (
    "its angles are no products of one position for each row and powers of one base, as where positions are "
    "two-dimensional; rope computes no others"
)
_UNKNOWN_BASE = (
    "its frequencies are no powers of one base, as where they are scaled for long contexts, or its positions and "
    "frequencies are not known when it is traced; rope computes theta ** (-k / length)"
)
_COMPLEX = "it multiplies complex numbers; rope takes positions and a base, and computes cosines and sines itself"
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
    factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Rotates by angles, and returns the first and the second of each pair.

    angles: "product", "quotient" (of positions and wavelengths), "contraction" (of no axis), "mixed contraction" (of
    integers and floating numbers), or "coordinates" (products by two positions, of a half of the frequencies each).
    """
    more = wide(x.dtype)
    position = positions.astype(more)
    if angles in ("contraction", "mixed contraction"):
        angle = jnp.einsum("bt,f->btf", positions if angles == "mixed contraction" else position, frequency)
    elif angles == "coordinates":
        angle = (position[..., None] * frequency * factor).reshape(*position.shape[:2], -1)
    else:
        angle = position[..., None] * frequency if angles == "product" else position[..., None] / frequency
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    if narrow:
        cosine, sine = cosine.astype(x.dtype), sine.astype(x.dtype)
    return _rotated_by_tables(x, cosine, sine, interleaved=interleaved, negates=negates, narrow=narrow)


def _rotated_by_tables(
    x: jax.Array, cosine: jax.Array, sine: jax.Array, *, interleaved: bool, negates: bool = False, narrow: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Rotates by tables of one element a pair, or a column; returns the first and the second of each pair.

    narrow: in x's dtype. negates: adds the product with -second.
    """
    size = x.shape[-1]

    def pairs(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        if interleaved:
            first, second = (jax.lax.slice_in_dim(array, k, size - 1 + k, 2, axis=3) for k in range(2))
            return first, second
        return array[..., : size // 2], array[..., size // 2 :]

    first, second = pairs(x if narrow else x.astype(wide(x.dtype)))
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    cosines, sines = (pairs(each) if each.shape[-1] == size else (each, each) for each in (cosine, sine))
    low = first * cosines[0] + -second * sines[0] if negates else first * cosines[0] - second * sines[0]
    return low.astype(x.dtype), (second * cosines[1] + first * sines[1]).astype(x.dtype)


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
    """Returns whether the first of each pair is a sum, or a real part, in the dtype of the rotation."""
    whole = element(value)
    (offset, stride), _ = (neighbours if interleaved else halves)(value.shape[-1])
    (variable, _, size), *_ = whole.indices[-1].digits
    first = Index(((variable, 1, size // 2),), offset, stride)
    ref = peel(Ref(value, (*whole.indices[:-1], first)))
    if ref.value.primitive == "convert_element_type":
        ref = peel(operand(ref, 0))
    ends = ("add",) if negates else ("add", "sub", "real")
    return ref.value.primitive in ends and ref.value.dtype == (value.dtype if narrow else wide(value.dtype))


def _rotations(
    value: Value,
    *,
    factors: Callable[[tuple[int, ...], Any], dict[str, jax.ShapeDtypeStruct]],
    narrow: bool,
    interleaved: bool,
    negates: bool,
) -> Iterator[Proposal]:
    """Proposes an array that is rotated. factors: returns the other arrays, for its shape and dtype."""
    rank = len(value.shape)
    if rank not in _ORDERS or value.shape[-1] % 2 or value.shape[-1] < 4 or (narrow and not is_narrow(value)):
        return
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return
    if not _is_rotated(value, narrow=narrow, interleaved=interleaved, negates=negates):
        return
    for order in _ORDERS[rank]:
        shape = tuple(((1, *value.shape) if rank == 3 else value.shape)[axis] for axis in order)
        if others := factors(shape, value.dtype):
            arrays = {"x": jax.ShapeDtypeStruct(shape, value.dtype), **others}
            yield Proposal(arrays=arrays, order=order, static={"interleaved": interleaved})


def _angle_factors(shape: tuple[int, ...], dtype: Any, *, is_integer: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns positions and frequencies; nothing for one token whose position is a number."""
    more = wide(dtype)
    if shape[1] == 1 and not is_integer:
        return {}
    return {
        "positions": jax.ShapeDtypeStruct(shape[:2], jnp.int32 if is_integer else more),
        "frequency": jax.ShapeDtypeStruct((shape[-1] // 2,), more),
    }


def _coordinate_factors(shape: tuple[int, ...], dtype: Any, *, is_integer: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns positions of two coordinates, and the frequencies of each."""
    if shape[-1] % 4:
        return {}
    more = wide(dtype)
    return {
        "positions": jax.ShapeDtypeStruct((*shape[:2], 2), jnp.int32 if is_integer else more),
        "frequency": jax.ShapeDtypeStruct((shape[-1] // 4,), more),
    }


def _table_factors(
    shape: tuple[int, ...], dtype: Any, *, narrow: bool, columns: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns tables of cosines and sines. columns: those of a pair."""
    table = jax.ShapeDtypeStruct((*shape[:2], shape[-1] * columns // 2), dtype if narrow else wide(dtype))
    return {"cosine": table, "sine": table}


def _multiplied(x: jax.Array, factors: jax.Array, *, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Multiplies pairs, as complex numbers, by factors; returns the real and the imaginary parts."""
    (first, stride), (second, _) = (neighbours if interleaved else halves)(x.shape[-1])
    pairs = [x.astype(wide(x.dtype))[..., start::stride][..., : x.shape[-1] // 2] for start in (first, second)]
    product = jax.lax.complex(*pairs) * factors[:, :, None]
    return product.real.astype(x.dtype), product.imag.astype(x.dtype)


def _complex_factors(shape: tuple[int, ...], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {"factors": jax.ShapeDtypeStruct((*shape[:2], shape[-1] // 2), jnp.result_type(wide(dtype), jnp.complex64))}


def _tables(value: Value, *, has_angles: bool, **options: Any) -> Iterator[Proposal]:
    """Proposes tables. has_angles: whether the program computes them as cosines of angles."""
    if ("cos" in primitives_before(value)) == has_angles:
        yield from _rotations(value, **options)


def _spellings() -> Iterator[Spelling]:
    ends = frozenset(("concatenate", "reshape", "convert_element_type", "add"))
    for interleaved, narrow, negates in itertools.product((False, True), repeat=3):
        form = {"narrow": narrow, "negates": negates}
        common: dict[str, Any] = {
            "operation": "rotation",
            "roots": ends,
            "pieces": neighbours if interleaved else halves,
        }
        for angles, is_integer in itertools.product(_ANGLES, (True, False)):
            if angles == "mixed contraction" and not is_integer:
                continue
            factors = partial(_angle_factors, is_integer=is_integer)
            constants: dict[str, Any] = {} if is_integer else {"positions": ("positions", integers_of)}
            theta = partial(theta_of, is_wavelength=angles == "quotient")
            yield Spelling(
                function=partial(_rotated, angles=angles, **form),
                propose=partial(_rotations, factors=factors, interleaved=interleaved, **form),
                needs=frozenset(("cos", "sin", "concatenate", *_ANGLES[angles])),
                broadcasting=frozenset(("positions",)),
                constants={**constants, "frequency": ("theta", theta)},
                unknown=_UNKNOWN_BASE,
                changed="x",
                **common,
            )
        for is_integer in (True, False):
            factors = partial(_coordinate_factors, is_integer=is_integer)
            yield Spelling(
                function=partial(_rotated, angles="coordinates", **form),
                propose=partial(_rotations, factors=factors, interleaved=interleaved, **form),
                needs=frozenset(("cos", "sin", "concatenate")),
                unknowns={"factor": 0.7123454321},
                broadcasting=frozenset(("positions",)),
                difference=_COORDINATES,
                **common,
            )
        for columns, (has_angles, difference) in itertools.product(
            (1, 2), ((False, _TABLES), (True, _ANGLES_OF_ITS_OWN))
        ):
            factors = partial(_table_factors, narrow=narrow, columns=columns)
            yield Spelling(
                function=partial(_rotated_by_tables, **form),
                propose=partial(_tables, factors=factors, has_angles=has_angles, interleaved=interleaved, **form),
                needs=frozenset(("mul", "concatenate")),
                difference=difference,
                **common,
            )


def _complex() -> Iterator[Spelling]:
    for interleaved in (False, True):
        form = {"narrow": False, "negates": False, "interleaved": interleaved}
        yield Spelling(
            operation="rotation",
            function=_multiplied,
            propose=partial(_rotations, factors=_complex_factors, **form),
            roots=frozenset(("concatenate", "reshape", "convert_element_type")),
            needs=frozenset(("complex", "concatenate")),
            pieces=neighbours if interleaved else halves,
            difference=_COMPLEX,
        )


SPELLINGS: tuple[Spelling, ...] = (*_spellings(), *_complex())
