"""Activation functions inside kernels, with their derivatives, from the few instructions of Mosaic GPU.

The usual formulas cancel, divide or call erf. These do not:

- For v >= 1, 1 / v is rsqrt(v)**2: one instruction of the special function unit, where a division takes ten. Its
  relative error of up to 2**-21.9 does not show in 16-bit results. Float32 results use a division.
- The tanh form of gelu is x * sigmoid(2 u), the same function without the cancellation in 1 + tanh(u).
- The normal distribution's tail is q(a) = exp(-a**2 / 2) * t * P(a t), t = 1 / (1 + p a), for a >= 0. The density
  shares its exponential. The form is Hastings' (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26),
  but in powers of a t = (1 - t) / p instead of t: at small a, where the tail is largest, these round a third as much.
  The coefficients are our own minimax fit, to a relative 2e-8 on [0, 14.5]; beyond, the tail is below the normal
  float32 numbers. For 16-bit results the tail is exp2 of a polynomial, fitted to a relative 7e-5 on [0, 9]. That takes
  11 instructions instead of 20, with which 8192 x 8192 bf16 values took 78 µs on an H200; memory takes 64. With the
  tail, gelu(x) = relu(x) - |x| q(|x|), which has a small relative error on the left, too.
- Infinity times a tail of zero would be NaN. So a is kept finite in a t, and where it multiplies a 16-bit result's
  tail: gelu is infinite at inf and 0 at -inf, its limits. For 16 bits this takes two instructions per value but no
  time: 8192 x 8192 bf16 values take 63.3 µs on an H100, and 63.4 without. If a were also finite in the polynomial, it
  would take one instruction but 54 registers instead of 40, and 66.6 µs instead of 64.3.

Source of gelu, and of quick gelu: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016,
https://arxiv.org/abs/1606.08415; of the squared relu: So et al., "Primer", 2021, https://arxiv.org/abs/2109.08668
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.exponents import LOG2_E

Function = Callable[[jax.Array], jax.Array]

_TANH_LINEAR = 2 * math.sqrt(2 / math.pi)  # 2 u = x * (_TANH_LINEAR + _TANH_CUBIC * x**2)
_TANH_CUBIC = 0.044715 * _TANH_LINEAR
_QUICK_RATE = 1.702
_TANH_SQUARE_LIMIT = 4096.0
"""The limit of x**2, which would be infinite for a large x. The gate is 0 or 1 long before."""
_LARGE = 1e18
"""The limit of the magnitude that multiplies the tail. The tail is 0 long before."""
_DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)
_TAIL_RATE = 0.21
_TAIL = (
    0.500000009441,
    -0.293942277691,
    0.104493165478,
    -0.0236251239015,
    0.00312975352071,
    -0.000127184352796,
    -3.0028129888e-05,
    5.1971170471e-06,
    -2.69657647697e-07,
)
_LOG2_TAIL = (
    -1.00009845,
    -1.14989286,
    -0.461469722,
    -0.0514463453,
    0.00750289002,
    -0.000723608217,
    4.03973614e-05,
    -9.77756557e-07,
)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation function.

    reference: in `jax.nn`, for any floating dtype, differentiated by JAX.
    of, with_derivative: in a kernel, float32 to float32; they also take whether 16 bits' accuracy will do.
    """

    name: str
    reference: Function
    of: Callable[[jax.Array, bool], jax.Array]
    with_derivative: Callable[[jax.Array, bool], tuple[jax.Array, jax.Array]]

    def value(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Computes the activation of float32 values, as accurately as a result in `dtype` shows."""
        return self.of(x, _is_rough(dtype))

    def value_and_derivative(self, x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Computes the activation and its derivative, with the same accuracy."""
        return self.with_derivative(x, _is_rough(dtype))


def get_activation(operation: str, name: str) -> Activation:
    """Returns an entry of `ACTIVATIONS`.

    Raises:
        ValueError: there is no such activation; the message has `operation` and the closest name.
    """
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    close = difflib.get_close_matches(str(name), ACTIVATIONS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{operation}: unknown activation {name!r}.{hint} There are {', '.join(map(repr, ACTIVATIONS))}.")


def _is_rough(dtype: jnp.dtype) -> bool:
    return jnp.dtype(dtype).itemsize < 4


def _reciprocal(value: jax.Array, is_rough: bool) -> jax.Array:
    """Computes 1 / value, for a value >= 1."""
    return jnp.square(jax.lax.rsqrt(value)) if is_rough else 1.0 / value


def _sigmoid(x: jax.Array, is_rough: bool) -> jax.Array:
    return _reciprocal(1.0 + jnp.exp2(-LOG2_E * x), is_rough)


def _silu(x: jax.Array, is_rough: bool) -> jax.Array:
    return x * _sigmoid(x, is_rough)


def _silu_and_derivative(x: jax.Array, is_rough: bool) -> tuple[jax.Array, jax.Array]:
    gate = _sigmoid(x, is_rough)
    value = x * gate
    return value, gate + value * (1.0 - gate)


def _quick_gelu(x: jax.Array, is_rough: bool) -> jax.Array:
    return x * _sigmoid(_QUICK_RATE * x, is_rough)


def _quick_gelu_and_derivative(x: jax.Array, is_rough: bool) -> tuple[jax.Array, jax.Array]:
    gate = _sigmoid(_QUICK_RATE * x, is_rough)
    value = x * gate
    return value, gate + value * (1.0 - gate) * _QUICK_RATE


def _gelu_tanh(x: jax.Array, is_rough: bool) -> jax.Array:
    return x * _sigmoid(x * (_TANH_LINEAR + _TANH_CUBIC * (x * x)), is_rough)


def _gelu_tanh_and_derivative(x: jax.Array, is_rough: bool) -> tuple[jax.Array, jax.Array]:
    square = jnp.minimum(x * x, _TANH_SQUARE_LIMIT)
    gate = _sigmoid(x * (_TANH_LINEAR + _TANH_CUBIC * square), is_rough)
    value = x * gate
    return value, gate + value * (1.0 - gate) * (_TANH_LINEAR + 3.0 * _TANH_CUBIC * square)


def _normal_tail(magnitude: jax.Array, is_rough: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the standard normal's tail beyond a magnitude, the magnitude times it, and exp(-magnitude**2 / 2)."""
    falling = jnp.exp2((-0.5 * LOG2_E) * (magnitude * magnitude))
    if is_rough:
        tail = jnp.exp2(_polynomial(_LOG2_TAIL, magnitude))
        return tail, _finite(magnitude) * tail, falling
    t = _reciprocal(1.0 + _TAIL_RATE * magnitude, is_rough)
    product = _finite(magnitude) * t
    common = _polynomial(_TAIL, product) * falling
    return common * t, common * product, falling


def _finite(magnitude: jax.Array) -> jax.Array:
    return jnp.minimum(magnitude, _LARGE)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Evaluates a polynomial; its coefficients start with the constant."""
    value = coefficients[-1] * x + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


def _gelu(x: jax.Array, is_rough: bool) -> jax.Array:
    return jnp.maximum(x, 0.0) - _normal_tail(jnp.abs(x), is_rough)[1]


def _gelu_and_derivative(x: jax.Array, is_rough: bool) -> tuple[jax.Array, jax.Array]:
    tail, product, falling = _normal_tail(jnp.abs(x), is_rough)
    value = jnp.maximum(x, 0.0) - product
    return value, jnp.where(x > 0.0, 1.0 - tail, tail) + x * (_DENSITY_AT_0 * falling)


def _relu(x: jax.Array, _: bool) -> jax.Array:
    return jnp.maximum(x, 0.0)


def _relu_and_derivative(x: jax.Array, _: bool) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(x, 0.0), jnp.where(x > 0.0, jnp.float32(1.0), jnp.float32(0.0))


def _relu_squared(x: jax.Array, _: bool) -> jax.Array:
    return jnp.square(jnp.maximum(x, 0.0))


def _relu_squared_and_derivative(x: jax.Array, _: bool) -> tuple[jax.Array, jax.Array]:
    positive = jnp.maximum(x, 0.0)
    return positive * positive, 2.0 * positive


def _quick_gelu_reference(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(_QUICK_RATE * x)


def _relu_squared_reference(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


_ALL = (
    Activation(
        name="gelu_tanh",
        of=_gelu_tanh,
        with_derivative=_gelu_tanh_and_derivative,
        reference=partial(jax.nn.gelu, approximate=True),
    ),
    Activation(
        name="gelu", of=_gelu, with_derivative=_gelu_and_derivative, reference=partial(jax.nn.gelu, approximate=False)
    ),
    Activation(
        name="quick_gelu", of=_quick_gelu, with_derivative=_quick_gelu_and_derivative, reference=_quick_gelu_reference
    ),
    Activation(name="silu", of=_silu, with_derivative=_silu_and_derivative, reference=jax.nn.silu),
    Activation(name="relu", of=_relu, with_derivative=_relu_and_derivative, reference=jax.nn.relu),
    Activation(
        name="relu_squared",
        of=_relu_squared,
        with_derivative=_relu_squared_and_derivative,
        reference=_relu_squared_reference,
    ),
)
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({each.name: each for each in _ALL})
"""The activations by name: "gelu_tanh", "gelu" (exact), "quick_gelu" (CLIP's), "silu", "relu" and "relu_squared"."""
