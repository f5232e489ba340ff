"""Tables of cosines and sines: of positions, their checks, and gradients of what is rotated by them.

A float32 angle of position 131072 is off by up to 0.004 radians before any sine is taken. Here the angles of positions
are counted in turns, as fixed-point numbers whose overflow is the full turn: the frequency is an integer of 2**-32
turns and a fraction of one, so that the product with the position wraps round exactly, for any int32 position. The
remainder of a quarter turn is the argument of polynomials with 24 bits of precision.

Source of the polynomials: Moshier, Cephes Mathematical Library, sinf.c, https://www.netlib.org/cephes/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.primitives.checks import check_floating
from pallas_kernels.primitives.gradients import instantiated

_TURN = 2.0**32
_QUARTER_BITS = 30
_SINE = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
_COSINE = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)


def angle_tables(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Computes cosines and sines of int32 positions' angles, (..., head_size / 2) float32 each."""
    whole, fraction = turns(head_size, theta)
    return cosine_and_sine(positions[..., None], jnp.asarray(whole), jnp.asarray(fraction))


def turns(head_size: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the frequencies of the `head_size` / 2 pairs, in units of 2**-32 turns per position.

    Returns:
        The integer part, int32 modulo a turn, and the fraction, float32.
    """
    half = head_size // 2
    frequency = float(theta) ** (-np.arange(half, dtype=np.float64) / half)
    units = np.mod(frequency / (2 * math.pi), 1.0) * _TURN
    whole = np.floor(units)
    return whole.astype(np.uint32).view(np.int32), (units - whole).astype(np.float32)


def cosine_and_sine(position: jax.Array, whole: jax.Array, fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine, float32, of `position` (int32, scalar or array) times the frequency from `turns`."""
    phase = position * whole + (position.astype(jnp.float32) * fraction).astype(jnp.int32)
    quarter = (phase + jnp.int32(1 << (_QUARTER_BITS - 1))) >> jnp.int32(_QUARTER_BITS)
    rest = phase - (quarter << jnp.int32(_QUARTER_BITS))
    angle = rest.astype(jnp.float32) * jnp.float32(2 * math.pi / _TURN)
    square = angle * angle
    sine = angle + angle * square * (_SINE[0] + square * (_SINE[1] + square * _SINE[2]))
    cosine = 1.0 - 0.5 * square + square * square * (_COSINE[0] + square * (_COSINE[1] + square * _COSINE[2]))
    is_odd = (quarter & 1) != 0
    cosine, sine = jnp.where(is_odd, sine, cosine), jnp.where(is_odd, cosine, sine)
    cosine = jnp.where(((quarter + 1) & 2) != 0, -cosine, cosine)
    return cosine, jnp.where((quarter & 2) != 0, -sine, sine)


def check_tables(operation: str, cos: jax.Array, sin: jax.Array, leading: Sequence[int], size: int) -> None:
    """Raises TypeError or ValueError unless tables fit heads of (*leading, heads, at least `size` columns).

    leading: the shape of the tokens. size: the number of columns that are rotated.
    """
    check_floating(operation, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        shape = table.shape[:-2] + table.shape[-1:] if table.ndim == len(leading) + 2 else table.shape
        has_heads = table.ndim == len(leading) + 2 and table.shape[-2] != 1
        is_fitting = 1 <= len(shape) <= len(leading) + 1 and not has_heads and shape[-1] in (size // 2, size)
        tail = leading[len(leading) - len(shape) + 1 :]
        if not is_fitting or any(have not in (1, want) for have, want in zip(shape[:-1], tail, strict=True)):
            raise ValueError(
                f"{operation}: {name} must be ({', '.join(map(str, leading))}, columns) or broadcast to that, or with "
                f"an axis of one head before the columns, which are {size // 2}, one a pair, or {size}; got "
                f"{table.shape}."
            )
    if cos.shape[-1] != sin.shape[-1]:
        raise ValueError(f"{operation}: cos and sin must have as many columns, got {cos.shape} and {sin.shape}.")


def row_tables(
    positions: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    leading: Sequence[int],
    *,
    size: int,
    theta: float,
    repeats: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines as (rows, columns), of positions or of tables; they have been checked.

    repeats: whether to return the rows of one batch's tokens if all batches share them.
    """
    given = [array for array in (cos, sin) if array is not None] if positions is None else [positions[..., None]]
    given = [array[..., 0, :] if array.ndim == len(leading) + 2 else array for array in given]
    is_shared = repeats and all(length == 1 for array in given for length in array.shape[:-2])
    shape = tuple(leading[-1:] if is_shared else leading)

    def rows(array: jax.Array) -> jax.Array:
        own = array.reshape(array.shape[-len(shape) - 1 :])
        return jnp.broadcast_to(own, (*shape, own.shape[-1])).reshape(-1, own.shape[-1])

    if positions is not None:
        return angle_tables(rows(given[0]).reshape(-1).astype(jnp.int32), size, theta)
    return rows(given[0]), rows(given[1])


def rotating(
    forward: Callable[[Any, Any], tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    reference: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """Returns a differentiable function of operands and tables; where tables are differentiated, by XLA.

    forward: returns the result and what `backward` needs, which returns the operands' gradients of that and of the
    result's cotangents. reference: returns the result.
    """

    def first(operands: Any, tables: Any) -> tuple[Any, Any]:
        is_wanted = any(each.perturbed for each in jax.tree.leaves(tables))
        operands, tables = jax.tree.map(lambda each: each.value, (operands, tables))
        return jax.vjp(reference, operands, tables) if is_wanted else forward(operands, tables)

    def second(saved: Any, cotangents: Any) -> tuple[Any, Any]:
        cotangents = instantiated(cotangents)
        if callable(saved):
            return saved(cotangents)  # pyright: ignore[reportReturnType]
        return backward(saved, cotangents), None

    run = jax.custom_vjp(lambda operands, tables: forward(operands, tables)[0])
    run.defvjp(first, second, symbolic_zeros=True)
    return run
