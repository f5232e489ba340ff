"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_backward, bias_activation_forward
from pallas_kernels.ops.bias_activation.reference import bias_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, check_features, check_like, dropout_words, optional_arrays
from pallas_kernels.primitives.elementwise import elementwise_unsupported
from pallas_kernels.primitives.gradients import with_backward
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.random import of_part

_FEW_COLUMNS = 192
"""Up to this number of float32 columns XLA is faster: 7553x136 takes 2.8 µs, by the kernel 4.0, with gradients 7.7 and
12.0 (H100). Of 16 bits 2816x192 takes 7.1 with gradients, and 7.7 with XLA's forward pass (H200)."""


@operation("x: ... d, bias: d, residual: ... d, dropout_key: key of ... d -> ... d")
def bias_activation(
    x: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str = "gelu_tanh",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    residual: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Adds a bias, applies an activation and dropout, and adds a residual.

    Equivalent to this, in float32 between the casts:

        y = activation(x + bias)
        y = where(keep, y / (1 - dropout_rate), 0) + residual

    `keep` is `pallas_kernels.primitives.random.array_keep_mask` of the key. It is the same for every implementation and
    is never stored: the backward pass computes it again.

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        bias: (features,), any floating dtype, or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        dropout_rate: the share of elements set to zero, a Python number, 0 <= rate < 1.
        dropout_key: one key from `jax.random.key` or `jax.random.PRNGKey`; needed if the rate is above 0. Members of a
            `jax.vmap`, and devices of a `jax.shard_map`, that share a key get the same mask. Give each its own key.
        residual: an array of x's shape and dtype, or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; at least 128 features,
            or 128 values without a bias.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla". Also "xla" for a bias of up to 192 float32 features.

    Returns:
        y, with x's shape and dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source of dropout: Srivastava et al., 2014, https://jmlr.org/papers/v15/srivastava14a.html
    """
    (x,) = as_arrays("bias_activation", x=x)
    bias, residual = optional_arrays("bias_activation", bias=bias, residual=residual)
    function = get_activation("bias_activation", activation)
    check_features("bias_activation", x, bias=bias)
    check_like("bias_activation", "residual", residual, "x", x)
    words = dropout_words("bias_activation", dropout_rate, dropout_key)
    # Without a bias the row length does not matter, and one long row has the fewest unaligned accesses.
    is_one_row = bias is None and (words is None or not of_part(words))
    support = {"mosaic": partial(mosaic_unsupported, x, bias, is_one_row=is_one_row), "xla": lambda: None}
    is_narrow = bias is not None and x.dtype.itemsize == 4 and x.shape[-1] <= _FEW_COLUMNS
    chosen = choose("bias_activation", implementation, support, preferred=() if is_narrow else ("mosaic",))
    if chosen == "xla" or x.size == 0:
        return bias_activation_reference(
            x, bias, activation=activation, dropout_rate=dropout_rate, dropout_key=dropout_key, residual=residual
        )
    rows = x.reshape((1, -1) if is_one_row else (-1, x.shape[-1]))
    operands = varying_alike((rows, bias, None if residual is None else residual.reshape(rows.shape), words))
    options = {"activation": function, "rate": float(dropout_rate)}

    def backward(x, bias, words, residual, dy):
        dx, dbias = bias_activation_backward(x, bias, words, dy, **options)
        return dx, dbias, None if residual is None else dy, None

    def saved(x, bias, residual, words):
        return x, bias, words, None if residual is None else ()  # only whether there is one

    forward = partial(bias_activation_forward, **options)
    return with_backward(forward, backward, saves=saved)(*operands).reshape(x.shape)


def mosaic_unsupported(x: jax.Array, bias: jax.Array | None, *, is_one_row: bool) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can.

    is_one_row: whether all rows of x may be one.
    """
    if reason := dtypes_unsupported(x=x, bias=bias):
        return reason
    features = x.size if is_one_row else x.shape[-1]
    return elementwise_unsupported(x.size // max(1, features), features) or mosaic_gpu_unsupported()
