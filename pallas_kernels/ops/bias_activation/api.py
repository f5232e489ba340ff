"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_forward
from pallas_kernels.ops.bias_activation.mosaic_gpu_vjp import bias_activation_backward
from pallas_kernels.ops.bias_activation.reference import bias_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, dropout_words, optional_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.elementwise import (
    FOLD_ELEMENTS,
    elementwise_unsupported,
    folded_rows,
)
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.random import of_part
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.settings import usual_promotion

_FEW_COLUMNS = 192


@shares("x: ... d, bias: d, residual: ... d, dropout_key: key of ... d -> ... d")
@usual_promotion
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
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. It needs at least 128
            features, or rows that fold: a power of two that divides the rows, with 128 values in so many rows. Without
            a bias it needs 128 values.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla". Without dropout, also "xla" for fewer than 2**20 values in rows of
            fewer than 128, or in 4096 float32 rows or more of 129 to 192; and for "relu" and "relu_squared" in rows of
            up to 192; forward for fewer than 2**20 values of 16 bits in rows of up to 192 (128 with a gradient), and
            for "silu" in rows of fewer than 128 if they have fewer than 2**21 values or are float32.

    Returns:
        y, with x's shape and dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source of dropout: Srivastava et al., 2014, https://jmlr.org/papers/v15/srivastava14a.html
    """
    (x,) = as_arrays("bias_activation", x=x)
    bias, residual = optional_arrays("bias_activation", bias=bias, residual=residual)
    get_activation("bias_activation", activation)
    _check(x, bias, residual)
    words = dropout_words("bias_activation", dropout_rate, dropout_key)
    may_fold = words is None or not of_part(words)
    support = {"mosaic": partial(mosaic_unsupported, x, bias, may_fold=may_fold), "xla": lambda: None}
    preferred = lambda: () if is_best_by_xla(x, bias, activation, is_plain=words is None) else ("mosaic",)  # noqa: E731
    chosen = choose("bias_activation", implementation, support, preferred=preferred)
    if chosen == "xla" or x.size == 0:
        return bias_activation_reference(
            x, bias, activation=activation, dropout_rate=dropout_rate, dropout_key=dropout_key, residual=residual
        )
    # Without a bias the row length does not matter, and one long row has the fewest unaligned accesses.
    rows = x.reshape((1, -1) if bias is None and may_fold else (-1, x.shape[-1]))
    operands = varying_alike((rows, bias, None if residual is None else residual.reshape(rows.shape), words))
    kernel = partial(_bias_activation_mosaic, activation, float(dropout_rate))
    by_xla = implementation is None and is_best_forward_by_xla(x, bias, activation, is_plain=words is None)

    def reference(x, bias, residual, words):
        del words
        return bias_activation_reference(x, bias, activation=activation, residual=residual)

    def backward(x, bias, residual, words, dy):
        return _mosaic_bwd(activation, float(dropout_rate), (x, bias, words, residual is not None), dy)

    # With a gradient, on an H200, µs of the kernels and with XLA's forward pass: 4902x128 8.0, 6.8; 2816x192 7.1, 7.7.
    own = backward if x.shape[-1] <= THREADS else None
    return partly_by_xla(kernel, reference, forward=by_xla, backward=own)(*operands).reshape(x.shape)


def is_best_by_xla(x: jax.Array, bias: jax.Array | None, activation: str | None, *, is_plain: bool = True) -> bool:
    """Whether XLA was measured to be faster than the kernel.

    is_plain: without dropout, whose mask XLA computes slowly.

    Rows of fewer than 128 values are folded, and the launch before that repeats the bias takes 1 µs. Of few columns
    threads have one value at a time. On an H100, float32, µs of the kernel and of XLA: 11680x64 3.3 and 2.9, but with
    dropout 14784x64 4.8 and 5.6; 7553x136 4.0 and 2.8, 5000x192 3.5 and 2.6, with gradients 12.0 and 7.7, 10.2 and 7.4.
    In bf16 22005x128 takes 4.4 and 5.8; on an H200, float32, 6307x128 2.2 and 2.6, with gradients 6.7 and 7.7.
    Without an exponential there is little to save: relu and a residual, 21376x128 float16 6.0 and 4.9, with gradients
    17.1 and 12.5; 21952x192 float32 13.2 and 12.0, with gradients 34.3 and 28.8.
    """
    if bias is None or not is_plain:
        return False
    rows, features = x.size // max(1, x.shape[-1]), x.shape[-1]
    if features <= _FEW_COLUMNS and (activation or "").startswith("relu"):
        return True
    if x.size >= FOLD_ELEMENTS:
        return False
    return features < THREADS or (x.dtype.itemsize == 4 and THREADS < features <= _FEW_COLUMNS and rows >= 4096)


def is_best_forward_by_xla(
    x: jax.Array, bias: jax.Array | None, activation: str | None, *, is_plain: bool = True
) -> bool:
    """Whether XLA was measured to be faster forward, though its sums for the bias's gradient take longer.

    On an H200, bf16: 4902x128 with silu 4.1 µs and by XLA 2.1, the rest of the gradient 4.2 and 5.3; 2816x192 with gelu
    3.2 and 2.9, and 4.5 and 12.7. Folded rows with silu: 13000x120 4.0 and 3.1, 32768x64 3.4 and 3.7; float32,
    40000x120 8.1 and 7.3.
    """
    if bias is None or not is_plain:
        return False
    is_wide = x.dtype.itemsize == 4
    if x.shape[-1] < THREADS and activation == "silu":
        return is_wide or x.size < 2 * FOLD_ELEMENTS
    return not is_wide and x.size < FOLD_ELEMENTS and x.shape[-1] <= _FEW_COLUMNS


def mosaic_unsupported(x: jax.Array, bias: jax.Array | None, *, may_fold: bool = True) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can.

    may_fold: whether rows may be joined; not those of a part of an array with dropout.
    """
    if reason := dtypes_unsupported(x=x, bias=bias):
        return reason
    rows, features = 1, x.size
    if bias is not None or not may_fold:
        rows, features = x.size // max(1, x.shape[-1]), x.shape[-1]
    if bias is not None and may_fold:
        fold = folded_rows(rows, features, x.dtype.itemsize)
        rows, features = rows // fold, features * fold
    return elementwise_unsupported(rows, features) or mosaic_gpu_unsupported()


def _check(x: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> None:
    for name, array in (("x", x), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"bias_activation: {name} must be floating, got {array.dtype.name}; cast it first.")
    if bias is not None and (x.ndim == 0 or bias.shape != x.shape[-1:]):
        raise ValueError(
            f"bias_activation: bias must be one value a feature of x {x.shape}, shape {x.shape[-1:]}, got {bias.shape}."
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"bias_activation: residual must be like x, {x.dtype.name}{list(x.shape)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bias_activation_mosaic(
    activation: str,
    rate: float,
    x: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    words: jax.Array | None,
) -> jax.Array:
    function = get_activation("bias_activation", activation)
    return bias_activation_forward(x, bias, residual, words, activation=function, rate=rate)


def _mosaic_fwd(activation, rate, x, bias, residual, words):
    function = get_activation("bias_activation", activation)
    y = bias_activation_forward(x, bias, residual, words, activation=function, rate=rate)
    return y, (x, bias, words, residual is not None)


def _mosaic_bwd(activation, rate, saved, dy):
    x, bias, words, has_residual = saved
    function = get_activation("bias_activation", activation)
    dx, dbias = bias_activation_backward(x, bias, words, dy, activation=function, rate=rate)
    return dx, dbias, dy if has_residual else None, None


_bias_activation_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
