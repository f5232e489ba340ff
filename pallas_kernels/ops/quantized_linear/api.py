"""The public function: checks, dispatch, and the gradient."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.checks import linear_unsupported
from pallas_kernels.ops._products.layer import Layer, LayerArrays, checked_layer
from pallas_kernels.ops._products.product import product
from pallas_kernels.ops.linear.reference import layer_reference
from pallas_kernels.ops.quantized_linear.config import MOST_DIFFERENTIATED_ROWS, default_config, is_preferred
from pallas_kernels.ops.quantized_linear.weight import DTYPES as WEIGHT_DTYPES
from pallas_kernels.ops.quantized_linear.weight import GROUP_SIZES, QuantizedWeight
from pallas_kernels.primitives.few_rows.config import MOST_ROWS
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.operands import COLUMNS, DTYPES, FEWEST_OUTPUTS
from pallas_kernels.primitives.integers import SPAN, is_packed_dtype
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import usual_promotion

_LINE_BYTES = 128
"""Features of an output that come at once: rows of the weights are whole multiples."""


@operation("x: ... k, w.values: n k, w.scales: q n, bias: n, residual: ... n -> ... n")
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
    """Applies a linear layer with int8 or int4 weights and optional bias, activation and residual, in one launch.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        y = activation(x @ w.dequantized(float32) + bias) + residual

    "mosaic" multiplies x by the integers, which are exact in 16 bits, and the sums by the scales. "xla" rounds the
    scaled weights to x's dtype, and the product to the wider of x's dtype and `out_dtype`.

    The backward pass is XLA's, with the scaled weights rounded to x's dtype. An activation needs x @ w again.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: the weights (features, outputs), from `quantize`.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs), of the result's dtype, or None.
        out_dtype: the result's floating dtype; None: x's.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`, which reads the
            weights once and widens them in registers. Features must be a multiple of 128 (256 with int4), outputs a
            multiple of 64, and at least 128 for more than 64 rows. The result must have x's dtype or float32. With
            scales for groups, at most 64 rows.
            "xla": always runs.
            None: "mosaic" for up to 8192 rows with at least 1024 features (512 for up to 64 rows) and outputs if it can
                run, else "xla". Also "xla" where a gradient is taken with an activation or more than 1024 rows.

    Returns:
        y, (..., outputs), of `out_dtype`. x, bias and residual have gradients; the gradient of w is zero.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    _check_weights(w)
    given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    layer, arrays = checked_layer("quantized_linear", x, jax.lax.stop_gradient(w), **given, is_quantized=True)
    support = {"mosaic": partial(mosaic_unsupported, layer, arrays), "xla": lambda: None}
    rows = arrays.by_rows()
    chosen = choose(
        "quantized_linear",
        implementation,
        support,
        preferred=lambda: ("mosaic",) if is_preferred(rows.x.shape[0], w.shape[1], w.shape[0]) else (),
    )
    if chosen == "xla" or not arrays.has_work:
        return _reference(layer, arrays)
    # XLA's backward pass would compute an activation's argument, or widen the weights, once more. With gradients, 80
    # rows of 2048 features and 1408 outputs take 36.5 µs so, by XLA alone 24.7; 1706 of 7168 and 6656 873 and 805. But
    # 128 rows of 4096 and 4288 take 52.1 and 62.8.
    is_slow = implementation is None and (activation is not None or rows.x.shape[0] > MOST_DIFFERENTIATED_ROWS)
    kernel, reference = (partial(each, layer) for each in (_quantized_linear_mosaic, _reference))
    y = partly_by_xla(kernel, reference, gradient=is_slow)(varying_alike(rows))
    return y.reshape(*arrays.x.shape[:-1], -1)


def _reference(layer: Layer, arrays: LayerArrays) -> jax.Array:
    """Computes the layer with the scaled weights rounded to x's dtype."""
    return layer_reference(layer, arrays._replace(w=arrays.w.dequantized(arrays.x.dtype)))


def mosaic_unsupported(layer: Layer, arrays: LayerArrays) -> str | None:
    """Returns why the Mosaic GPU kernel cannot take these arguments here, or None if it can."""
    x, w, bias, _ = arrays
    features, outputs = w.shape
    line = _LINE_BYTES * 8 // w.bits
    rows = math.prod(x.shape[:-1])
    if x.dtype.name not in DTYPES:
        return f"x is {x.dtype.name}, the kernel takes {', '.join(DTYPES)}"
    if rows > MOST_ROWS and w.scales.shape[0] > 1:
        return f"x has {rows} rows, the kernel takes at most {MOST_ROWS} where scales are of groups of features"
    fewest = COLUMNS if rows <= MOST_ROWS else FEWEST_OUTPUTS
    if features % line or outputs % COLUMNS or outputs < fewest:
        return (
            f"w is {features} by {outputs} of {w.bits} bits; the kernel takes multiples of {line} features and of "
            f"{COLUMNS} outputs, and at least {fewest} outputs for {rows} rows"
        )
    return linear_unsupported(x, bias, layer.out_dtype)


def _check_weights(w: QuantizedWeight) -> None:
    name = "quantized_linear"
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"{name}: w must be a QuantizedWeight, got {type(w).__name__}; `quantize` makes one.")
    if w.bits not in WEIGHT_DTYPES or w.group_size not in (None, *GROUP_SIZES):
        raise ValueError(
            f"{name}: w must be of 8 or 4 bits, in groups of None, 64 or 128 features, got {w.bits} and {w.group_size}."
        )
    dtypes = WEIGHT_DTYPES[w.bits]
    if w.values.ndim != 2 or w.values.dtype.name not in dtypes:
        raise ValueError(
            f"{name}: w.values must be (outputs, features) of {' or '.join(dtypes)}, got {w.values.dtype.name}"
            f"{list(w.values.shape)}."
        )
    features, outputs = w.shape
    if is_packed_dtype(w.values.dtype) and features % SPAN:
        raise ValueError(f"{name}: w.values of uint8 must have a multiple of {SPAN} features, got {features}.")
    groups = 1 if w.group_size is None else features // w.group_size
    if (w.scales.shape, w.scales.dtype) != ((groups, outputs), jnp.float32):
        raise ValueError(
            f"{name}: w.scales must be float32[{groups}, {outputs}], groups of {w.group_size or 'all'} features by "
            f"outputs, got {w.scales.dtype.name}{list(w.scales.shape)}."
        )


def _forward(layer: Layer, arrays: LayerArrays) -> jax.Array:
    """Returns activation(x @ w + bias) + residual, (rows, outputs). x: few rows if scales are for groups."""
    x, w, bias, residual = arrays
    return product(
        x,
        [w.values],
        scales=[w.scales],
        config=default_config(x.shape[0], w.shape[1], w.shape[0], w.values.dtype),
        name="quantized_linear",
        epilogue=Epilogue(activation=layer.activation),
        bias=bias,
        residual=residual,
        out_dtype=layer.out_dtype,
    )[0]


def _kept_forward(layer, arrays):
    # Saved values are arrays, or a structure without any: of the residual only whether there is one.
    kept = arrays._replace(residual=None if arrays.residual is None else ())
    return _forward(layer, arrays), kept


@usual_promotion()
def _backward(layer, saved, dy):
    """Computes the gradients by XLA, and the product again if the activation needs it."""
    x, w, bias, residual = saved
    dx, dbias = jax.vjp(lambda x, bias: _reference(layer, LayerArrays(x, w, bias)), x, bias)[1](dy)
    return (LayerArrays(dx, None, dbias, None if residual is None else dy),)


_quantized_linear_mosaic = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_quantized_linear_mosaic.defvjp(_kept_forward, _backward)
