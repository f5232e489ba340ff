"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_bias, check_operands, check_weight, vector_unsupported
from pallas_kernels.ops._products.norm import (
    after_norm,
    as_rows,
    check_norm,
    is_fusable,
    norm_unsupported,
    normalised,
)
from pallas_kernels.ops._products.product import default_config
from pallas_kernels.ops._products.rings import choose_in_place
from pallas_kernels.ops.gated_linear.config import is_preferred
from pallas_kernels.ops.gated_linear.mosaic_gpu import gated_linear_apart, gated_linear_forward
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gemm.row_blocks import RowBlock
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike


def _in_place(arguments: Mapping[str, Any], written: RowBlock) -> jax.Array:
    """Computes the layer for one block of rows."""
    x, w_gate, w_up, norm = (arguments[name] for name in ("x", "w_gate", "w_up", "norm"))
    biases = arguments["bias_gate"], arguments["bias_up"]
    support = partial(mosaic_unsupported, x, w_gate, w_up, biases, norm)
    choose_in_place("gated_linear", arguments["implementation"], x, written, support)
    rows, activation = normalised(norm, as_rows(x)), get_activation("gated_linear", arguments["activation"])
    config = default_config(rows.shape[0], w_gate.shape[1], w_gate.shape[0], products=2)
    return gated_linear_forward(rows, None, w_gate, w_up, biases, activation=activation, config=config, written=written)


@operation(
    "x: ... k, w_gate: k n, w_up: k n, bias_gate: n, bias_up: n, norm.scale: !e, norm.bias: e, norm.mean_square: ... "
    "-> ... n",
    in_place=_in_place,
)
def gated_linear(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies two linear layers to one input and gates one by the other: SwiGLU ("silu"), GEGLU ("gelu"), ReGLU.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        n = norm(x)
        y = activation(n @ w_gate + bias_gate) * (n @ w_up + bias_up)

    One launch computes the products and the gating, and reads n once. The norm is a launch before it, with two
    exceptions: a norm without a scale whose mean squares are given (see `Norm`) needs no launch, and with few bfloat16
    rows the configuration may fuse the norm into the product's launch, which then rounds x times the norm's scale to
    x's dtype instead of n. "xla" rounds n and the products to x's dtype.

    The backward pass needs x, the weights and both products. So a call that is differentiated has XLA's products, and a
    kernel for the gating; products and biases are rounded to x's dtype. The backward pass is another kernel for the
    gating, XLA's products for the weights, and one launch for x where it is estimated to be faster.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w_gate: (features, outputs), of x's dtype.
        w_up: an array of w_gate's shape and dtype.
        bias_gate, bias_up: (outputs,), any floating dtype (at most float32 with "mosaic"), each None for none.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        norm: the norm of x, or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, with at least 128 outputs, and with a norm at least 128 features.
            "xla": always runs.
            None: "mosaic" for up to 64 rows with at least 2688 outputs, and for more if it is estimated to be faster.
            "xla" otherwise, and if "mosaic" cannot run.

    Returns:
        y, (..., outputs), of x's dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    x, w_gate, w_up = as_arrays("gated_linear", x=x, w_gate=w_gate, w_up=w_up)
    biases = optional_arrays("gated_linear", bias_gate=bias_gate, bias_up=bias_up)
    function = get_activation("gated_linear", activation)
    check_operands("gated_linear", x=x, w_gate=w_gate, w_up=w_up)
    check_weight("gated_linear", "w_gate", w_gate.shape, x)
    if w_up.shape != w_gate.shape:
        raise ValueError(f"gated_linear: w_up must be like w_gate {w_gate.shape}, got {w_up.shape}.")
    for name, bias in zip(("bias_gate", "bias_up"), biases, strict=True):
        check_bias("gated_linear", bias, w_gate.shape[1], name=name)
    check_norm("gated_linear", norm, x)
    support = {"mosaic": partial(mosaic_unsupported, x, w_gate, w_up, biases, norm), "xla": lambda: None}
    rows = as_rows(x)
    sizes = rows.shape[0], w_gate.shape[1], w_gate.shape[0]
    preferred = lambda: ("mosaic",) if is_preferred(*sizes) else ()  # noqa: E731
    chosen = choose("gated_linear", implementation, support, preferred=preferred)
    if chosen == "xla" or x.size == 0 or w_gate.size == 0:
        given = {"bias_gate": biases[0], "bias_up": biases[1], "norm": norm}
        return gated_linear_reference(x, w_gate, w_up, activation=activation, **given)
    rows, norm, *operands = varying_alike((rows, norm, w_gate, w_up, biases))
    config = default_config(*sizes, products=2, is_normed=is_fusable(norm, rows))
    forward = partial(gated_linear_forward, activation=function, config=config)
    y = after_norm(partial(gated_linear_apart, function), forward, norm, rows, *operands)
    return y.reshape(*x.shape[:-1], w_gate.shape[1])


def mosaic_unsupported(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, biases: Sequence[jax.Array | None], norm: Norm | None
) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    reasons = (vector_unsupported(name, bias) for name, bias in zip(("bias_gate", "bias_up"), biases, strict=True))
    reason = operands_unsupported(x, w_gate, w_up) or norm_unsupported(norm, x) or next(filter(None, reasons), None)
    return reason or mosaic_gpu_unsupported()
