"""The public functions: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.checks import linear_unsupported
from pallas_kernels.ops._products.layer import Layer, LayerArrays, checked_layer
from pallas_kernels.ops._products.norm import after_norm, check_norm, is_fusable, norm_unsupported, normalised
from pallas_kernels.ops._products.rings import choose_in_place, summed_product
from pallas_kernels.ops.linear import config
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward, linear_mosaic, linear_residual_norm_mosaic
from pallas_kernels.ops.linear.reference import (
    given_product,
    layer_reference,
    linear_reference,
    linear_residual_norm_reference,
)
from pallas_kernels.primitives.call import is_open
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gemm.row_blocks import RowBlock
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.overlapped import is_overlapping
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.triton_calls import triton_missing


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where features are cut: what follows the product follows the sum of the parts' products."""
    given = dict(arguments)
    x, w, dtype = given.pop("x"), given.pop("w"), given["out_dtype"]
    wide = None if dtype is None else jnp.promote_types(x.dtype, dtype)
    multiply = partial(linear, out_dtype=wide, implementation=given.pop("implementation"))
    product = summed_product(x, w, sums["k"], multiply)
    return linear_reference(product, w, **given, multiply=given_product)


def _in_place(arguments: Mapping[str, Any], written: RowBlock) -> jax.Array:
    """Computes the layer, with or without a norm, for one block of rows."""
    given = dict(arguments)
    norm, implementation = given.pop("norm", None), given.pop("implementation")
    operation = "linear" if norm is None else "norm_linear"
    layer, arrays = checked_layer(operation, **given)
    support = partial(mosaic_unsupported, layer, arrays, norm)
    choose_in_place(operation, implementation, arrays.x, written, support)
    rows = arrays.by_rows()
    return linear_forward(layer, rows._replace(x=normalised(norm, rows.x)), written=written)[0]


@operation("x: ... +k, w: k n, bias: n, residual: ... n -> ... n", _from_parts, scatters=True, in_place=_in_place)
def linear(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies a linear layer with optional bias, activation and residual, in one launch.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        y = activation(x @ w + bias) + residual

    "xla" also rounds the product, to the wider of x's dtype and `out_dtype`.

    The backward pass needs x and w. With an activation it also needs x @ w, which the forward pass writes in x's dtype.
    With "mosaic" it is one kernel for activation and bias, and XLA's products. If x has 16 bits and the result is
    float32, XLA computes all of it, and computes x @ w again for an activation.

    Args:
        x: (..., features), bfloat16 or float16 (float32 with "triton", any floating dtype with "xla"). The leading
            dimensions are rows.
        w: (features, outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs), of the result's dtype, or None.
        out_dtype: the result's floating dtype; None: x's.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs
            must be multiples of 64, with at least 128 outputs, and the result must have x's dtype or float32.
            "triton": through jax_triton, which the extra `triton` installs, for NVIDIA GPUs. The result has x's dtype.
            "xla": always runs.
            None: the entry of the GPU's tuned table (`pallas_kernels.tuning`). Without an entry, "mosaic" for up to 64
            rows with at least 2048 features and 4096 outputs, and for more than 64 rows with an activation or residual
            if it is estimated to be faster. "xla" otherwise, and if "mosaic" cannot run; then with zeros added to
            features and outputs that are no multiples of 8 where that is estimated to be faster.

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    layer, arrays = checked_layer("linear", x, w, **given)
    support = {
        "mosaic": partial(mosaic_unsupported, layer, arrays),
        "triton": partial(triton_unsupported, layer, arrays),
        "xla": lambda: None,
    }

    def order() -> Sequence[str]:
        # A program for several devices may let a kernel overlap with collectives where XLA's product is faster.
        return ("mosaic",) if is_overlapping() and is_open("linear") else config.preferred(layer, arrays)

    chosen = choose("linear", implementation, support, preferred=order)
    if chosen == "xla" or not arrays.has_work:
        return layer_reference(layer, arrays, multiply=matmul if implementation is None else jnp.matmul)
    rows = varying_alike(arrays.by_rows())
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        y: jax.Array = linear_triton(activation, *rows)  # pyright: ignore
    else:
        y = linear_mosaic(layer, rows)  # pyright: ignore
    return y.reshape(*arrays.x.shape[:-1], -1)


@operation(
    "x: ... k, w: k n, norm.scale: !e, norm.bias: e, norm.mean_square: ..., bias: n, residual: ... n -> ... n",
    in_place=_in_place,
)
def norm_linear(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: Norm,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies a norm and a linear layer with optional bias, activation and residual.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        y = activation(norm(x) @ w + bias) + residual

    One launch computes the product and all that follows. The norm is a launch before it, unless it has no scale and its
    mean squares are given (see `Norm`). A norm with its own launch, and "xla", round norm(x) to x's dtype.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        norm: the norm of x.
        bias, activation, residual, out_dtype: as in `linear`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`,
            and at least 128 features.
            "xla": always runs.
            None: "mosaic" if it can run, for few rows where it was measured to be faster, for more than 64 rows if it
                is estimated to be, and without a residual for 512 rows or more where a gradient is taken through the
                norm; else "xla", with zeros added to odd sizes as in `linear`.

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: division after the product as in Graef et al., "FlashNorm", 2024, https://arxiv.org/abs/2407.09577
    """
    if norm is None:
        raise TypeError("norm_linear: norm must be a pallas_kernels.Norm, got None; without one, call linear.")

    given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    layer, arrays = checked_layer("norm_linear", x, w, **given)
    check_norm("norm_linear", norm, arrays.x)
    support = {"mosaic": partial(mosaic_unsupported, layer, arrays, norm), "xla": lambda: None}
    preference = partial(config.preferred_with_norm, layer, arrays, norm)
    chosen = choose("norm_linear", implementation, support, preferred=lambda: preference()[0])
    if chosen == "xla" or not arrays.has_work:
        multiply = matmul if implementation is None else jnp.matmul
        return layer_reference(layer, arrays, norm=norm, multiply=multiply)

    def kernel(norm, arrays):
        known = config.tuned_key(layer, arrays)
        own = config.tuned_config(known, arrays.x.shape[0], is_normed=is_fusable(norm, arrays.x))

        def forward(x, norm, *others):
            return linear_forward(layer, LayerArrays(x, *others), norm=norm, config=own)[0]

        return after_norm(lambda *rows: linear_mosaic(layer, LayerArrays(*rows)), forward, norm, *arrays)

    def reference(norm, arrays):
        return layer_reference(layer, arrays, norm=norm)

    is_best = implementation is not None or preference()[1]
    y = partly_by_xla(kernel, reference, forward=not is_best)(*varying_alike((norm, arrays.by_rows())))
    return y.reshape(*arrays.x.shape[:-1], -1)


def _residual_norm_from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Computes the layer where features are cut: what follows the product follows the sum of the parts' products."""
    x, w = arguments["x"], arguments["w"]
    after = {name: arguments[name] for name in ("bias", "residual")}
    return linear_residual_norm_reference(sums["k"].total(linear(x, w)), w, **after, multiply=given_product)


@operation("x: ... +k, w: k !n, residual: ... n, bias: n -> ... n, ...", _residual_norm_from_parts, scatters=True)
def linear_residual_norm(
    x: jax.Array,
    w: jax.Array,
    *,
    residual: jax.Array,
    bias: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a linear layer to the residual stream and computes the mean squares for the RMSNorm of the sum.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        total = x @ w + bias + residual                 # rounded to x.dtype
        mean_square = mean(total**2, axis=-1)           # of the rounded sum

    Pass the mean squares to the next layer as `Norm(None, mean_square=mean_square)`, and fold the norm's scale into
    that layer's weights (`fold_scale`). Then the norm needs no pass over the residual stream.

    The backward pass needs x, w and total. It is one pass over total and its cotangent, and XLA's products.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        residual: (..., outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`.
            "xla": always runs.
            None: "mosaic" if it can run, for more than 64 rows if it is estimated to be faster, and with 4096 outputs
                or more for up to 16 rows of 8192 features or more, or 33 to 64 rows of 4096 or more; else "xla".

    Returns:
        (total, mean_square): total (..., outputs), of x's dtype; mean_square (...), float32 (float64 for float64 x).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: the next layer divides by the norm, as in Graef et al., "FlashNorm", 2024, https://arxiv.org/abs/2407.09577
    """
    (residual,) = as_arrays("linear_residual_norm", residual=residual)
    layer, arrays = checked_layer("linear_residual_norm", x, w, bias=bias, residual=residual)
    outputs, shape = arrays.w.shape[1], arrays.x.shape
    support = {"mosaic": partial(mosaic_unsupported, layer, arrays), "xla": lambda: None}
    rows = arrays.by_rows()
    chosen = choose(
        "linear_residual_norm",
        implementation,
        support,
        preferred=lambda: ("mosaic",) if config.is_preferred_with_squares(rows.x.shape[0], outputs, shape[-1]) else (),
    )
    if chosen == "xla" or not arrays.has_work:
        return linear_residual_norm_reference(arrays.x, arrays.w, residual=residual, bias=arrays.bias)
    results: tuple[jax.Array, jax.Array] = linear_residual_norm_mosaic(*varying_alike(rows))  # pyright: ignore
    total, mean_square = results
    return total.reshape(residual.shape), mean_square.reshape(shape[:-1])


def mosaic_unsupported(layer: Layer, arrays: LayerArrays, norm: Norm | None = None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    x, w, bias, _ = arrays
    return operands_unsupported(x, w) or linear_unsupported(x, bias, layer.out_dtype) or norm_unsupported(norm, x)


def triton_unsupported(layer: Layer, arrays: LayerArrays) -> str | None:
    """Returns why the Triton kernel cannot take these arguments here, or None if it can."""
    if layer.out_dtype != arrays.x.dtype:
        return f"the result is {layer.out_dtype.name}, the kernel gives x's {arrays.x.dtype.name}"
    return triton_missing(arrays.x)
