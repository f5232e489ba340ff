"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_bias, check_operands, check_weight, linear_unsupported
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops.lora_linear.config import preferred
from pallas_kernels.ops.lora_linear.mosaic_gpu import lora_linear_backward, lora_linear_forward
from pallas_kernels.ops.lora_linear.reference import lora_linear_reference
from pallas_kernels.primitives.checks import as_arrays, finite_number, optional_arrays
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gradients import with_backward
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import varying_alike

MOST_RANK = 128


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where features are cut: it is a sum over them, but for the bias."""
    bias, total = arguments["bias"], sums["k"].total(lora_linear(**{**arguments, "bias": None}))
    return total if bias is None else (total.astype(jnp.float32) + bias).astype(total.dtype)


@operation("x: ... +k, w: k n, a: k !r, b: r n, bias: n -> ... n", _from_parts, scatters=True)
def lora_linear(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    alpha: float = 1.0,
    bias: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies a linear layer with a low-rank correction, as low-rank adaptation (LoRA) trains it.

    Equivalent to this:

        y = x @ w + alpha * (x @ a) @ b + bias

    "mosaic" accumulates in float32 and rounds only alpha * (x @ a) to x's dtype; "xla" rounds each product.

    The backward pass is XLA's products and computes x @ a again. It skips the gradient of w if nothing needs it.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        a: (features, rank), of x's dtype.
        b: (rank, outputs), of x's dtype.
        alpha: a Python number; LoRA's alpha / rank.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, with at least 128 outputs and a rank of at most 128. With 512 to 2047 rows and a rank of
            at most 64 it is one kernel, whose blocks wait for each other by semaphores that another launch clears
            before it; otherwise it is XLA's product x @ a and one kernel.
            "xla": always runs.
            None: "mosaic" for 2048 rows or more, and where it is one kernel, if it can run and features are less than
                four times the outputs; else "xla".

    Returns:
        y, (..., outputs), of x's dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685; one launch as in Zhu et al., 2025,
    https://arxiv.org/abs/2510.00206
    """
    x, w, a, b = as_arrays("lora_linear", x=x, w=w, a=a, b=b)
    (bias,) = optional_arrays("lora_linear", bias=bias)
    _check(x, w, a, b, bias)
    alpha = finite_number("lora_linear", "alpha", alpha)
    rows, rank = as_rows(x), a.shape[1]
    support = {"mosaic": partial(mosaic_unsupported, x, w, rank, bias), "xla": lambda: None}
    untuned = partial(preferred, rows.shape[0], w.shape[1], w.shape[0], rank)
    chosen = choose("lora_linear", implementation, support, preferred=untuned)
    if chosen == "xla" or x.size == 0 or w.size == 0 or rank == 0:
        return lora_linear_reference(x, w, a, b, alpha=alpha, bias=bias)
    operands = varying_alike((rows, w, a, b, bias))
    kernel = with_backward(partial(lora_linear_forward, alpha=alpha), partial(lora_linear_backward, alpha=alpha))
    return kernel(*operands).reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: jax.Array, rank: int, bias: jax.Array | None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if rank > MOST_RANK:
        return f"the rank is {rank}, the kernels take at most {MOST_RANK}"
    return operands_unsupported(x, w) or linear_unsupported(x, bias, x.dtype)


def _check(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> None:
    check_operands("lora_linear", x=x, w=w, a=a, b=b)
    check_weight("lora_linear", "w", w.shape, x)
    check_weight("lora_linear", "a", a.shape, x, columns="rank")
    if b.shape != (a.shape[1], w.shape[1]):
        raise ValueError(f"lora_linear: b must be (rank, outputs), {(a.shape[1], w.shape[1])}, got {b.shape}.")
    check_bias("lora_linear", bias, w.shape[1])
