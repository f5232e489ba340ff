"""The public function, and what the linear layers with and without a norm share: checks, dispatch and launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.checks import (
    check_linear,
    check_operands,
    linear_unsupported,
    optional_activation,
    result_dtype,
)
from pallas_kernels.ops._products.norm import (
    after_norm,
    as_rows,
    check_norm,
    is_fusable,
    norm_unsupported,
)
from pallas_kernels.ops.linear.config import preferred, tuned_config, tuned_key
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward, linear_mosaic
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import operation
from pallas_kernels.primitives.triton_calls import triton_missing


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where features are cut: what follows the product follows the sum of the parts' products."""
    given = dict(arguments)
    x, w, dtype = given.pop("x"), given.pop("w"), given["out_dtype"]
    wide = None if dtype is None else jnp.promote_types(x.dtype, dtype)
    product = sums["k"].total(linear(x, w, out_dtype=wide, implementation=given.pop("implementation")))
    return linear_reference(product, w, **given, multiply=lambda rows, *_, **__: rows)


@shares("x: ... +k, w: k n, bias: n, residual: ... n -> ... n", _from_parts, scatters=True)
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
    options = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    return apply_linear("linear", x, w, None, **options, implementation=implementation, preference=_preference)


def _preference(*operands) -> tuple[Sequence[str], bool]:
    return preferred(*operands), True


def apply_linear(
    operation: str,
    x: jax.Array,
    w: jax.Array,
    norm: Norm | None,
    *,
    bias: jax.Array | None,
    activation: str | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike | None,
    implementation: Implementation,
    preference: Callable[..., tuple[Sequence[str], bool]],
) -> jax.Array:
    """Computes activation(norm(x) @ w + bias) + residual; arguments as for `linear`.

    preference: returns, for x, w, bias, activation, residual and the result's dtype, the implementations to try if the
    caller requests none, and whether the kernel is the best where no gradient is taken.
    """
    x, w = as_arrays(operation, x=x, w=w)
    bias, residual = optional_arrays(operation, bias=bias, residual=residual)
    dtype = result_dtype(operation, x, out_dtype)
    check_operands(operation, x=x, w=w)
    check_linear(operation, x, w.shape, bias=bias, activation=activation, residual=residual, dtype=dtype)
    check_norm(operation, norm, x)
    support = {
        "mosaic": partial(mosaic_unsupported, x, w, bias, dtype, norm),
        "triton": partial(triton_unsupported, x, dtype),
        "xla": lambda: None,
    }
    if norm is not None:
        del support["triton"]
    preference = partial(preference, x, w, bias, activation, residual, dtype)
    chosen = choose(operation, implementation, support, preferred=lambda: preference()[0])

    def reference(multiply, x, norm, w, bias, residual):
        options = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": dtype}
        return linear_reference(x, w, norm=norm, **options, multiply=multiply).astype(dtype)

    if chosen == "xla" or x.size == 0 or w.size == 0:
        return reference(matmul if implementation is None else jnp.matmul, x, norm, w, bias, residual)
    operands = varying_alike((as_rows(x), norm, w, bias, None if residual is None else as_rows(residual)))
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        rows, _, *others = operands
        y: jax.Array = linear_triton(activation, rows, *others)  # pyright: ignore
        return y.reshape(*x.shape[:-1], w.shape[1])

    def kernel(rows, norm, w, bias, residual):
        function = optional_activation(operation, activation)
        known = tuned_key(rows, w, bias, activation, residual, dtype)
        config = tuned_config(known, rows.shape[0], is_normed=is_fusable(norm, rows))

        def forward(*operands, **before):
            return linear_forward(*operands, **before, activation=function, out_dtype=dtype, config=config)[0]

        return after_norm(partial(linear_mosaic, function, dtype), forward, config, norm, rows, w, bias, residual)

    is_best = implementation is not None or preference()[1]
    y = partly_by_xla(kernel, partial(reference, jnp.matmul), forward=not is_best)(*operands)
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype, norm: Norm | None = None
) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    return operands_unsupported(x, w) or linear_unsupported(x, bias, out_dtype) or norm_unsupported(norm, x)


def triton_unsupported(x: jax.Array, out_dtype: jnp.dtype) -> str | None:
    """Returns why the Triton kernel cannot take these arguments here, or None if it can."""
    if out_dtype != x.dtype:
        return f"the result is {out_dtype.name}, the kernel gives x's {x.dtype.name}"
    return triton_missing(x)
