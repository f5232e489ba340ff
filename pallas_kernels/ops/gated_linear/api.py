"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.prologue import as_rows, check_norm, norm_unsupported, prologue, varying_alike
from pallas_kernels.ops.gated_linear.config import preferred
from pallas_kernels.ops.gated_linear.mosaic_gpu import gated_linear_forward
from pallas_kernels.ops.gated_linear.mosaic_gpu_vjp import gated_linear_backward
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported


def gated_linear(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    norm: Norm | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Two linear layers of one input, the first activated and multiplied by the second, in one launch: SwiGLU ("silu"),
    GEGLU ("gelu" or "gelu_tanh"), ReGLU ("relu").

    The same as, with products accumulated in float32 and float32 between the casts,

        n = norm(x)
        y = activation(n @ w_gate) * (n @ w_up)

    Everything from the products on is one launch, which reads n once. The norm is another, unless it has no scale and
    its mean squares are given; see `Norm`.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w_gate: (features, outputs), of x's dtype.
        w_up: like w_gate.
        activation: a name of `pallas_kernels.primitives.activations.ACTIVATIONS`.
        norm: of x, or None.
        implementation: "mosaic" (Mosaic GPU; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; features and
            outputs multiples of 64, at least 128 outputs), "xla", a sequence of them in order of preference, or None:
            "mosaic" where it runs and is the faster one, else "xla".

    Returns:
        y, (..., outputs), of x's dtype.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown activation or implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    x, w_gate, w_up = jnp.asarray(x), jnp.asarray(w_gate), jnp.asarray(w_up)
    get_activation("gated_linear", activation)
    _check(x, w_gate, w_up)
    check_norm("gated_linear", norm, x)
    support = {"mosaic": partial(mosaic_unsupported, x, w_gate, w_up, norm), "xla": lambda: None}
    rows = as_rows(x)
    chosen = choose("gated_linear", implementation, support, preferred=preferred(x, w_gate, activation))
    if chosen == "xla" or x.size == 0 or w_gate.size == 0:
        return gated_linear_reference(x, w_gate, w_up, activation=activation, norm=norm)
    # Marked as varying like the others, so that shard_map sums gradients over the devices that those are spread over.
    rows, w_gate, w_up, norm = varying_alike((rows, w_gate, w_up, norm))
    normed, row_scale = prologue(norm, rows)
    y: jax.Array = _gated_linear_mosaic(activation, normed, w_gate, w_up, row_scale)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w_gate.shape[1])


def mosaic_unsupported(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, norm: Norm | None) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    return operands_unsupported(x, w_gate, w_up) or norm_unsupported(norm, x) or mosaic_gpu_unsupported()


def _check(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> None:
    for name, array in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"gated_linear: {name} must be floating, got {array.dtype.name}; cast it first.")
        if array.dtype != x.dtype:
            raise TypeError(
                f"gated_linear: {name} must have x's dtype {x.dtype.name}, got {array.dtype.name}; cast one of them."
            )
    if x.ndim == 0 or w_gate.ndim != 2 or w_gate.shape[0] != x.shape[-1]:
        raise ValueError(
            f"gated_linear: w_gate must be (features, outputs) with the features of x {x.shape}, got {w_gate.shape}."
        )
    if w_up.shape != w_gate.shape:
        raise ValueError(f"gated_linear: w_up must be like w_gate {w_gate.shape}, got {w_up.shape}.")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_linear_mosaic(
    activation: str, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, row_scale: jax.Array | None
) -> jax.Array:
    function = get_activation("gated_linear", activation)
    return gated_linear_forward(x, w_gate, w_up, activation=function, row_scale=row_scale)[0]


def _mosaic_fwd(activation, x, w_gate, w_up, row_scale):
    function = get_activation("gated_linear", activation)
    y, gate, up = gated_linear_forward(x, w_gate, w_up, activation=function, row_scale=row_scale, keeps_products=True)
    return y, (x, w_gate, w_up, gate, up, row_scale)


def _mosaic_bwd(activation, saved, dy):
    x, w_gate, w_up, gate, up, row_scale = saved
    function = get_activation("gated_linear", activation)
    return gated_linear_backward(x, w_gate, w_up, gate, up, dy, activation=function, row_scale=row_scale)


_gated_linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
