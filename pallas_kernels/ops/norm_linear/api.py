"""The public function: checks and dispatch. Its kernels and gradients are `linear`'s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.layer import LayerArrays, checked_layer
from pallas_kernels.ops._products.norm import after_norm, check_norm, is_fusable
from pallas_kernels.ops.linear import api as linear_api
from pallas_kernels.ops.linear.config import tuned_config, tuned_key
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward, linear_mosaic
from pallas_kernels.ops.linear.reference import layer_reference
from pallas_kernels.ops.norm_linear.config import preferred
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import operation


@shares(
    "x: ... k, w: k n, norm.scale: !e, norm.bias: e, norm.mean_square: ..., bias: n, residual: ... n -> ... n",
    in_place=linear_api.linear_in_place,
)
@operation
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
    support = {"mosaic": partial(linear_api.mosaic_unsupported, layer, arrays, norm), "xla": lambda: None}
    preference = partial(preferred, layer, arrays, norm)
    chosen = choose("norm_linear", implementation, support, preferred=lambda: preference()[0])
    if chosen == "xla" or not arrays.has_work:
        multiply = matmul if implementation is None else jnp.matmul
        return layer_reference(layer, arrays, norm=norm, multiply=multiply)

    def kernel(norm, arrays):
        known = tuned_key(layer, arrays)
        config = tuned_config(known, arrays.x.shape[0], is_normed=is_fusable(norm, arrays.x))

        def forward(*rows, **before):
            return linear_forward(layer, LayerArrays(*rows), **before, config=config)[0]

        return after_norm(lambda *rows: linear_mosaic(layer, LayerArrays(*rows)), forward, config, norm, *arrays)

    def reference(norm, arrays):
        return layer_reference(layer, arrays, norm=norm)

    is_best = implementation is not None or preference()[1]
    y = partly_by_xla(kernel, reference, forward=not is_best)(*varying_alike((norm, arrays.by_rows())))
    return y.reshape(*arrays.x.shape[:-1], -1)
