"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import linear_unsupported
from pallas_kernels.ops._products.layer import Layer, LayerArrays, checked_layer
from pallas_kernels.ops._products.norm import norm_unsupported, normalised
from pallas_kernels.ops._products.rings import choose_in_place, summed_product
from pallas_kernels.ops.linear.config import preferred
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward, linear_mosaic
from pallas_kernels.ops.linear.reference import layer_reference, linear_reference
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gemm.row_blocks import RowBlock
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.overlapped import is_overlapping
from pallas_kernels.primitives.partitioned import is_open
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import operation
from pallas_kernels.primitives.triton_calls import triton_missing


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where features are cut: what follows the product follows the sum of the parts' products."""
    given = dict(arguments)
    x, w, dtype = given.pop("x"), given.pop("w"), given["out_dtype"]
    wide = None if dtype is None else jnp.promote_types(x.dtype, dtype)
    multiply = partial(linear, out_dtype=wide, implementation=given.pop("implementation"))
    product = summed_product(x, w, sums["k"], multiply)
    return linear_reference(product, w, **given, multiply=lambda rows, *_, **__: rows)


def linear_in_place(arguments: Mapping[str, Any], written: RowBlock) -> jax.Array:
    """Computes the layer, with or without a norm, for one block of rows."""
    given = dict(arguments)
    norm, implementation = given.pop("norm", None), given.pop("implementation")
    operation = "linear" if norm is None else "norm_linear"
    layer, arrays = checked_layer(operation, **given)
    support = partial(mosaic_unsupported, layer, arrays, norm)
    choose_in_place(operation, implementation, arrays.x, written, support)
    rows = arrays.by_rows()
    return linear_forward(layer, rows._replace(x=normalised(norm, rows.x)), written=written)[0]


@shares("x: ... +k, w: k n, bias: n, residual: ... n -> ... n", _from_parts, scatters=True, in_place=linear_in_place)
@operation
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
        return ("mosaic",) if is_overlapping() and is_open("linear") else preferred(layer, arrays)

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


def mosaic_unsupported(layer: Layer, arrays: LayerArrays, norm: Norm | None = None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    x, w, bias, _ = arrays
    return operands_unsupported(x, w) or linear_unsupported(x, bias, layer.out_dtype) or norm_unsupported(norm, x)


def triton_unsupported(layer: Layer, arrays: LayerArrays) -> str | None:
    """Returns why the Triton kernel cannot take these arguments here, or None if it can."""
    if layer.out_dtype != arrays.x.dtype:
        return f"the result is {layer.out_dtype.name}, the kernel gives x's {arrays.x.dtype.name}"
    return triton_missing(arrays.x)
