"""Sine and cosine of position * frequency, exact for any int32 position.

A float32 angle of position 131072 is off by up to 0.004 radians before any sine is taken. Here angles are counted in
turns, as fixed-point numbers whose overflow is the full turn: the frequency is an integer of 2**-32 turns and a
fraction of one, so that the product with the position wraps round exactly. The remainder of a quarter turn is the
argument of polynomials with 24 bits of precision.

Source of the polynomials: Moshier, Cephes Mathematical Library, sinf.c, https://www.netlib.org/cephes/
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

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
