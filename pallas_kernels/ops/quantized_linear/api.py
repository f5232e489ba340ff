"""The public function: checks, dispatch, and the gradient."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.quantized_linear.config import is_preferred
from pallas_kernels.ops.quantized_linear.mosaic_gpu import quantized_linear_forward
from pallas_kernels.ops.quantized_linear.mosaic_gpu_vjp import quantized_linear_backward
from pallas_kernels.ops.quantized_linear.reference import quantized_linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.few_rows.choice import MOST_ROWS
from pallas_kernels.primitives.gemm.operands import COLUMNS, DTYPES
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_like

_LINE_BYTES = 128
"""Features of an output that come at once: rows of the weights are whole multiples."""


def quantized_linear(
    x: jax.Array,
    w: QuantizedWeight,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """A linear layer with int8 or int4 weights and what follows it, in one launch.

    The same as, with products accumulated in float32 and float32 between the casts,

        y = activation(x @ w + bias) + residual

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w: of `quantize`, (features, outputs).
        bias: (outputs,), any floating dtype, or None.
        activation: a name of `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs) of `out_dtype`, or None.
        out_dtype: the result's dtype; None: x's.
        implementation: "mosaic" (one Mosaic GPU kernel, which reads the weights once and widens them in registers;
            Hopper GPUs; at most 64 rows where scales are of groups; features a multiple of 128, of 256 with int4;
            outputs a multiple of 64; a result of x's dtype or float32), "xla", a sequence of them in order of
            preference, or None: "mosaic" where it runs and is the faster one, else "xla".

    Returns:
        y, (..., outputs), of `out_dtype`. Gradients go to x, bias and residual; w is a constant, with gradient zero.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown activation or implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.
    """
    x = jnp.asarray(x)
    bias = None if bias is None else jnp.asarray(bias)
    residual = None if residual is None else jnp.asarray(residual)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if activation is not None:
        get_activation("quantized_linear", activation)
    _check(x, w, bias, residual, dtype)
    w = jax.lax.stop_gradient(w)
    support = {"mosaic": partial(mosaic_unsupported, x, w, bias, dtype), "xla": lambda: None}
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    is_best = is_preferred(rows.shape[0], w.shape[1], w.shape[0])
    chosen = choose("quantized_linear", implementation, support, preferred=("mosaic",) if is_best else ())
    if chosen == "xla" or x.size == 0 or w.values.size == 0:
        y = quantized_linear_reference(x, w, bias=bias, activation=activation, residual=residual, out_dtype=dtype)
        return y.astype(dtype)
    residual = None if residual is None else residual.reshape(-1, w.shape[1])
    # Marked as varying like the others, so that shard_map sums gradients over the devices that those are spread over.
    operands = jax.tree.leaves((rows, w, bias, residual))
    rows, w, bias, residual = jax.tree.map(lambda leaf: varying_like(leaf, *operands), (rows, w, bias, residual))
    y: jax.Array = _quantized_linear_mosaic(activation, dtype, rows, w, bias, residual)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, out_dtype: jnp.dtype) -> str | None:
    """Why the Mosaic GPU kernel cannot take these arguments here, or None where it can."""
    features, outputs = w.shape
    line = _LINE_BYTES * 8 // w.bits
    rows = math.prod(x.shape[:-1])
    if x.dtype.name not in DTYPES:
        return f"x is {x.dtype.name}, the kernel takes {', '.join(DTYPES)}"
    if rows > MOST_ROWS and w.scales.shape[0] > 1:
        return f"x has {rows} rows, the kernel takes at most {MOST_ROWS} where scales are of groups of features"
    if features % line or outputs % COLUMNS:
        return (
            f"w is {features} by {outputs} of {w.bits} bits; the kernel takes multiples of {line} features and of "
            f"{COLUMNS} outputs"
        )
    if out_dtype not in (x.dtype, jnp.float32):
        return f"the result is {out_dtype.name}, the kernel gives {x.dtype.name} or float32"
    if bias is not None and bias.dtype.itemsize > 4:
        return f"bias is {bias.dtype.name}, the kernel takes at most float32"
    return mosaic_gpu_unsupported()


def _check(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, dtype: jnp.dtype
) -> None:
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"quantized_linear: w must be a QuantizedWeight, got {type(w).__name__}; `quantize` makes one.")
    for name, array in (("x", x), ("bias", bias), ("residual", residual)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"quantized_linear: {name} must be floating, got {array.dtype.name}; cast it first.")
    if x.ndim == 0 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"quantized_linear: w must have the features of x {x.shape}, got shape {w.shape}.")
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"quantized_linear: bias must be one value an output, {w.shape[1:]}, got {bias.shape}.")
    expected = (*x.shape[:-1], w.shape[1])
    if residual is not None and (residual.shape, residual.dtype) != (expected, dtype):
        raise ValueError(
            f"quantized_linear: residual must be like the result, {dtype.name}{list(expected)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized_linear_mosaic(
    activation: str | None,
    out_dtype: jnp.dtype,
    x: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    function = None if activation is None else get_activation("quantized_linear", activation)
    return quantized_linear_forward(x, w, bias, residual, activation=function, out_dtype=out_dtype)


def _mosaic_fwd(activation, out_dtype, x, w, bias, residual):
    y = _quantized_linear_mosaic(activation, out_dtype, x, w, bias, residual)
    return y, (x, w, bias, residual is not None)


def _mosaic_bwd(activation, out_dtype, saved, dy):
    x, w, bias, has_residual = saved
    dx, dbias = quantized_linear_backward(x, w, bias, dy, activation=activation)
    return dx, None, dbias, dy if has_residual else None


_quantized_linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
