"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.lora_linear.config import default_gradient_config, is_preferred
from pallas_kernels.ops.lora_linear.mosaic_gpu import lora_linear_forward
from pallas_kernels.ops.lora_linear.mosaic_gpu_vjp import lora_linear_backward
from pallas_kernels.ops.lora_linear.reference import lora_linear_reference
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_like

MOST_RANK = 128


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
    """A linear layer with a low-rank correction, as low-rank adaptation (LoRA) trains it.

        y = x @ w + alpha * (x @ a) @ b + bias

    accumulated in float32 with "mosaic", where only x @ a is rounded to x's dtype on the way.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w: (features, outputs), of x's dtype, as a and b are.
        a: (features, rank).
        b: (rank, outputs).
        alpha: a number; LoRA's alpha / rank.
        bias: (outputs,), any floating dtype, or None.
        implementation: "mosaic" (one Mosaic GPU kernel for few rows, and for many rows a product x @ a before it;
            Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; features and outputs multiples of 64, at least 128
            outputs, a rank of at most 128), "xla", a sequence of them in order of preference, or None: "mosaic" where
            it runs and is the faster one, else "xla".

    Returns:
        y, (..., outputs), of x's dtype.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Hu et al., 2021, https://arxiv.org/abs/2106.09685; in one launch as in Zhu et al., 2025,
    https://arxiv.org/abs/2510.00206
    """
    x, w, a, b = (jnp.asarray(value) for value in (x, w, a, b))
    bias = None if bias is None else jnp.asarray(bias)
    _check(x, w, a, b, bias)
    alpha = float(alpha)
    rows, rank = math.prod(x.shape[:-1]), a.shape[1]
    support = {"mosaic": partial(mosaic_unsupported, x, w, rank, bias), "xla": lambda: None}
    preferred = ("mosaic",) if is_preferred(rows, w.shape[1], w.shape[0], rank) else ()
    chosen = choose("lora_linear", implementation, support, preferred=preferred)
    if chosen == "xla" or x.size == 0 or w.size == 0 or rank == 0:
        return lora_linear_reference(x, w, a, b, alpha=alpha, bias=bias)
    flat = x.reshape(rows, x.shape[-1])
    operands = [flat, w, a, b] + ([] if bias is None else [bias])
    # Marked as varying like the others, so that shard_map sums gradients over the devices that those are spread over.
    flat, w, a, b = (varying_like(value, *operands) for value in (flat, w, a, b))
    bias = None if bias is None else varying_like(bias, *operands)
    y: jax.Array = _lora_mosaic(alpha, flat, w, a, b, bias)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: jax.Array, rank: int, bias: jax.Array | None) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    reason = operands_unsupported(x, w)
    if reason:
        return reason
    if rank > MOST_RANK:
        return f"the rank is {rank}, the kernels take at most {MOST_RANK}"
    if bias is not None and bias.dtype.itemsize > 4:
        return f"bias is {bias.dtype.name}, the kernels take at most float32"
    return mosaic_gpu_unsupported()


def _check(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> None:
    for name, array in (("x", x), ("w", w), ("a", a), ("b", b), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"lora_linear: {name} must be floating, got {array.dtype.name}; cast it first.")
    for name, array in (("w", w), ("a", a), ("b", b)):
        if array.dtype != x.dtype:
            raise TypeError(
                f"lora_linear: {name} must have x's dtype {x.dtype.name}, got {array.dtype.name}; cast one of them."
            )
    if x.ndim == 0 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"lora_linear: w must be (features, outputs) with the features of x {x.shape}, got {w.shape}.")
    if a.ndim != 2 or a.shape[0] != w.shape[0]:
        raise ValueError(f"lora_linear: a must be (features, rank) with the features of w {w.shape}, got {a.shape}.")
    if b.shape != (a.shape[1], w.shape[1]):
        raise ValueError(f"lora_linear: b must be (rank, outputs), {(a.shape[1], w.shape[1])}, got {b.shape}.")
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"lora_linear: bias must be one value an output, shape {w.shape[1:]}, got {bias.shape}.")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lora_mosaic(
    alpha: float, x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return lora_linear_forward(x, w, a, b, bias, alpha=alpha)


def _mosaic_fwd(alpha, x, w, a, b, bias):
    return lora_linear_forward(x, w, a, b, bias, alpha=alpha), (x, w, a, b, bias)


def _mosaic_bwd(alpha, saved, dy):
    x, w, a, b, bias = saved
    config = default_gradient_config(x.shape[0], w.shape[1], w.shape[0])
    return lora_linear_backward(x, w, a, b, bias, dy, alpha=alpha, config=config)


_lora_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
