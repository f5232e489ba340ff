"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_operands, check_weight
from pallas_kernels.ops._products.norm import (
    as_rows,
    can_fuse_norm,
    check_norm,
    norm_unsupported,
    prologue,
    row_norm,
    scaled_rows,
)
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_forward
from pallas_kernels.ops.gated_linear.config import Config, preferred, problem, tuned_config
from pallas_kernels.ops.gated_linear.mosaic_gpu import gated_linear_forward
from pallas_kernels.ops.gated_linear.mosaic_gpu_vjp import gated_linear_backward
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gradients import products_apart
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
def gated_linear(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    norm: Norm | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies two linear layers to one input and gates one by the other: SwiGLU ("silu"), GEGLU ("gelu"), ReGLU.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        n = norm(x)
        y = activation(n @ w_gate) * (n @ w_up)

    One launch computes the products and the gating, and reads n once. The norm is a launch before it, with two
    exceptions: a norm without a scale whose mean squares are given (see `Norm`) needs no launch, and with few bfloat16
    rows the configuration may fuse the norm into the product's launch, which then rounds x times the norm's scale to
    x's dtype instead of n. "xla" rounds n and the products to x's dtype.

    The backward pass needs x, the weights and both products. So a call that is differentiated has XLA's products,
    rounded to x's dtype, and a kernel for the gating. The backward pass is another kernel for the gating, XLA's
    products for the weights, and one launch for x where it is estimated to be faster.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w_gate: (features, outputs), of x's dtype.
        w_up: an array of w_gate's shape and dtype.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        norm: the norm of x, or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, with at least 128 outputs, and with a norm at least 128 features.
            "xla": always runs.
            None: the entry of the GPU's tuned table (`pallas_kernels.tuning`). Without an entry, "mosaic" for up to 64
            rows with at least 2688 outputs, and for more if it is estimated to be faster. "xla" otherwise, and if
            "mosaic" cannot run.

    Returns:
        y, (..., outputs), of x's dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    x, w_gate, w_up = as_arrays("gated_linear", x=x, w_gate=w_gate, w_up=w_up)
    get_activation("gated_linear", activation)
    check_operands("gated_linear", x=x, w_gate=w_gate, w_up=w_up)
    check_weight("gated_linear", "w_gate", w_gate.shape, x)
    if w_up.shape != w_gate.shape:
        raise ValueError(f"gated_linear: w_up must be like w_gate {w_gate.shape}, got {w_up.shape}.")
    check_norm("gated_linear", norm, x)
    support = {"mosaic": partial(mosaic_unsupported, x, w_gate, w_up, norm), "xla": lambda: None}
    chosen = choose("gated_linear", implementation, support, preferred=lambda: preferred(x, w_gate, activation))
    if chosen == "xla" or x.size == 0 or w_gate.size == 0:
        return gated_linear_reference(x, w_gate, w_up, activation=activation, norm=norm)
    rows, w_gate, w_up, norm = varying_alike((as_rows(x), w_gate, w_up, norm))
    config = tuned_config(problem(rows, w_gate, activation), rows.shape[0], is_normed=norm is not None)
    product = partial(_with_fused_norm, config) if can_fuse_norm(config, norm, rows) else _with_norm_before
    y: jax.Array = product(activation, rows, norm, w_gate, w_up)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w_gate.shape[1])


def mosaic_unsupported(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, norm: Norm | None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    return operands_unsupported(x, w_gate, w_up) or norm_unsupported(norm, x) or mosaic_gpu_unsupported()


def _with_norm_before(activation: str, x, norm, w_gate, w_up):
    normed, row_scale = prologue(norm, x)
    return _gated_linear_mosaic(activation, normed, w_gate, w_up, row_scale)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_fused_norm(config: Config, activation: str, x, norm, w_gate, w_up):
    function = get_activation("gated_linear", activation)
    return gated_linear_forward(x, w_gate, w_up, activation=function, norm=row_norm(norm), config=config)


def _fused_fwd(config, activation, *operands):
    return jax.vjp(partial(_with_norm_before, activation), *operands)


def _fused_bwd(config, activation, pullback, cotangent):
    return pullback(cotangent)


_with_fused_norm.defvjp(_fused_fwd, _fused_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_linear_mosaic(
    activation: str, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, row_scale: jax.Array | None
) -> jax.Array:
    function = get_activation("gated_linear", activation)
    return gated_linear_forward(x, w_gate, w_up, activation=function, row_scale=row_scale)


def _mosaic_fwd(activation, x, w_gate, w_up, row_scale):
    # From 512 rows on, one launch that also writes the products takes 4 to 5 % longer: tensor cores wait for results.
    gate, up = products_apart(scaled_rows(x, row_scale), (w_gate, w_up))
    function = get_activation("gated_linear", activation)
    y = gated_activation_forward(gate.reshape(1, -1), up.reshape(1, -1), activation=function).reshape(gate.shape)
    return y, (x, w_gate, w_up, gate, up, row_scale)


def _mosaic_bwd(activation, saved, dy):
    x, w_gate, w_up, gate, up, row_scale = saved
    function = get_activation("gated_linear", activation)
    return gated_linear_backward(x, w_gate, w_up, gate, up, dy, activation=function, row_scale=row_scale)


_gated_linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
