"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.checks import check_operands, check_weight
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops.cross_entropy.api import (
    IGNORED,
    Reduction,
    checked_labels,
    checked_options,
    cross_entropy,
    dimensions,
    loss_from_parts,
    plain_labels,
)
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.cross_entropy.mosaic_gpu import scale_in_place
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.linear_cross_entropy.config import (
    columns_for,
    is_preferred,
    is_preferred_forward,
)
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import Statistics, logits_statistics
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu_vjp import gradients
from pallas_kernels.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.gemm.operands import COLUMNS, FEWEST_OUTPUTS, operands_unsupported
from pallas_kernels.primitives.hopper import TMA_ROWS
from pallas_kernels.primitives.odd_sizes import MATRICES, matmul, padding_of
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.specs import Static

Arrays = tuple[jax.Array, jax.Array, jax.Array]
"""Hidden states, weights and labels."""
Wants = tuple[bool, bool]
"""Whether the gradients of hidden states and weights are wanted."""


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    return loss_from_parts(linear_cross_entropy, linear_cross_entropy_reference, arguments, sums)


@operation(partial(dimensions, inputs="hidden: ... k, w: k +v"), _from_parts)
def linear_cross_entropy(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    implementation: Implementation = None,
) -> jax.Array:
    """Computes the cross-entropy of `hidden @ w` and integer labels without keeping all logits in memory.

    Equivalent to this, in float32 after the product:

        logits = hidden @ w
        lse = logsumexp(logits, axis=-1)
        loss = lse - (1 - label_smoothing) * logits[labels] - label_smoothing * mean(logits, -1) + z_loss * lse**2

    Labels that are ignored or outside the vocabulary count as in `cross_entropy`. Labels have no gradient.

    Work and memory of "mosaic", besides arguments and results:

    * Without gradients: one matrix product, and two or three float32 numbers for every 256 logits.
    * With gradients and `reduction` "mean" or "sum": three products, as with logits in memory. The forward pass already
      knows each token's factor and computes all gradients at once. It keeps the logits in the memory of w's gradient.
      Where that is too small, with more tokens than features, or not needed, logits are computed twice, which makes
      four products. Another sixth to twelfth of the logits is in memory at a time. If the result is multiplied before
      it is differentiated (a loss scale), the rounded gradients are multiplied again.
    * With gradients and "none", or float16, whose loss scale must come before rounding: four products. The forward pass
      keeps three numbers per token; the backward pass computes the logits again, a chunk at a time.

    Args:
        hidden: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w: (features, vocabulary), of hidden's dtype. Pass an embedding table (vocabulary, features) as `table.T`; XLA
            copies it.
        labels: (...), integers of any width, `0 <= label < vocabulary` or `ignore_index`.
        ignore_index, label_smoothing, z_loss, reduction: as in `cross_entropy`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features must be a
            multiple of 64, and the vocabulary at least 128. If the vocabulary is no multiple of 64, w is copied with
            columns of zeros at its end, which no loss and no gradient sees.
            "xla": keeps the logits in memory, in hidden's dtype.
            None: "mosaic" where it was measured to be faster (bfloat16, a reduction, at least 512 tokens but no more
            than features, a vocabulary of at least 32000; if not differentiated, at least 512 tokens and 2**23 logits),
            else XLA's product and `cross_entropy`, of a padded vocabulary where that is estimated to be faster. Pass
            ("mosaic", "xla") to save memory.

    Returns:
        The losses (...), or a scalar with a reduction; float32 (float64 for float64 hidden states).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: gradients in the forward pass as in Liger, Hsu et al., 2024, https://arxiv.org/abs/2410.10989; losses from
    tiles as in Wijmans et al., 2024, https://arxiv.org/abs/2411.09009
    """
    hidden, w, labels = as_arrays("linear_cross_entropy", hidden=hidden, w=w, labels=labels)
    check_operands("linear_cross_entropy", hidden=hidden, w=w)
    check_weight("linear_cross_entropy", "w", w.shape, hidden, of="hidden", columns="vocabulary")
    if not w.size:
        raise ValueError(f"linear_cross_entropy: w must have at least one feature and one token, got {w.shape}.")
    labels = checked_labels("linear_cross_entropy", labels, hidden.shape[:-1], each="hidden state")
    options = checked_options("linear_cross_entropy", labels.dtype, ignore_index, label_smoothing, z_loss, reduction)
    rows = math.prod(hidden.shape[:-1])
    support = {"mosaic": partial(mosaic_unsupported, hidden, w), "xla": lambda: None}
    keeps_gradients = _keeps_gradients(reduction, hidden.dtype)
    is_best = partial(is_preferred, rows, w.shape[1], w.shape[0], keeps_gradients=keeps_gradients)
    preferred = lambda: ("mosaic",) if is_best() or is_preferred_forward(rows, w.shape[1]) else ()  # noqa: E731
    chosen = choose("linear_cross_entropy", implementation, support, preferred=preferred)
    apart = linear_cross_entropy_reference if implementation is not None else _product_and_loss
    apart = partial(apart, **options, reduction=reduction)
    if chosen == "xla" or hidden.size == 0:
        return apart(hidden, w, labels)
    kernel = partial(_kernel, options=options, reduction=reduction)
    is_apart = implementation is None and not is_best()
    return partly_by_xla(kernel, apart, gradient=is_apart)(*varying_alike((hidden, w, labels)))


def _product_and_loss(hidden: jax.Array, w: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
    """Computes the logits with an XLA product, and their loss with `cross_entropy`.

    The kernel reads the logits of the padding, too, where that pays: they are minus infinity, which adds nothing to a
    sum of exponentials. A mean of logits, as label smoothing has, needs a copy without them.
    """
    features, vocabulary = w.shape
    padding = padding_of(as_rows(hidden), w, MATRICES)
    if padding is None or padding.rhs[0] != features or options["label_smoothing"]:
        return cross_entropy(linear_reference(hidden, w, multiply=matmul), labels, **options)
    logits = linear_reference(hidden, _with_columns(w, padding.rhs[1]))
    logits = logits.at[..., vocabulary:].set(-jnp.inf)
    labels = plain_labels(labels, vocabulary, options["ignore_index"])
    ignored = None if options["ignore_index"] is None else IGNORED
    return cross_entropy(logits, labels, **{**options, "ignore_index": ignored})


def _with_columns(w: jax.Array, columns: int) -> jax.Array:
    """Adds columns of zeros to w."""
    return w if columns == w.shape[1] else jnp.pad(w, ((0, 0), (0, columns - w.shape[1])))


def _kernel(
    hidden: jax.Array, w: jax.Array, labels: jax.Array, *, options: dict[str, Any], reduction: Reduction
) -> jax.Array:
    rows = labels.size
    hidden, flat_labels = hidden.reshape(rows, -1), labels.reshape(rows)
    vocabulary = w.shape[1]
    flat_labels = plain_labels(flat_labels, vocabulary, options["ignore_index"])
    w = _with_columns(w, columns_for(vocabulary))
    padding = -rows % TMA_ROWS
    if padding:
        hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
        flat_labels = jnp.pad(flat_labels, (0, padding), constant_values=IGNORED)
    is_one_hot = options["ignore_index"] is None
    terms = Terms(vocabulary=vocabulary, is_one_hot=is_one_hot, **{**options, "ignore_index": IGNORED})
    call = Call(terms=terms, reduction=reduction)
    loss: jax.Array = _loss_mosaic(call, hidden, w, flat_labels)  # pyright: ignore
    return loss[:rows].reshape(labels.shape) if reduction == "none" else loss


def mosaic_unsupported(hidden: jax.Array, w: jax.Array) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    features, vocabulary = w.shape
    columns = jax.ShapeDtypeStruct((features, columns_for(vocabulary)), w.dtype)
    reason = operands_unsupported(hidden, columns)  # pyright: ignore[reportArgumentType]
    return reason.replace("x is", "hidden is") if reason else mosaic_gpu_unsupported()


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static arguments of a call."""

    terms: Terms
    reduction: Reduction

    def weight(self, labels: jax.Array) -> jax.Array:
        """Returns the factor of every loss in the sum."""
        if self.reduction != "mean":
            return jnp.float32(1)
        return 1 / jnp.maximum(1, jnp.sum(labels != self.terms.ignore_index)).astype(jnp.float32)

    def result(self, statistics: Statistics, labels: jax.Array) -> jax.Array:
        """Returns the losses, or the reduced loss."""
        losses = statistics.losses(self.terms, self.terms.token(labels, self.weight(labels)))
        return losses if self.reduction == "none" else jnp.sum(losses)

    def labels_in_range(self, labels: jax.Array) -> jax.Array:
        """Returns the labels, with a valid token in place of those outside the vocabulary."""
        return self.terms.token(labels, 1.0).label

    def gradients(self, arrays: Arrays, statistics: Statistics, weights: jax.Array, wants: Wants, *kept: Any) -> Any:
        """Returns those gradients of hidden and w that are wanted. weights: of the losses. kept: the logits, if any."""
        hidden, w, labels = arrays
        token = self.terms.token(labels, jnp.broadcast_to(weights, labels.shape))
        slopes = statistics.slope(self.terms, token), token.label
        return gradients(hidden, w, slopes, *kept, vocabulary=self.terms.vocabulary, wants=wants)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_mosaic(call: Call, hidden: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns (rows,) losses, or their sum or mean. hidden: (rows, features), whole groups of rows. labels: int32."""
    return _loss(call, (hidden, w, labels))[0]


# Under jit, so that they are compiled as wholes even if the caller does not use jit.


@partial(jax.jit, static_argnums=0)
def _loss(call: Call, arrays: Arrays) -> tuple[jax.Array, Statistics]:
    hidden, w, labels = arrays
    statistics, _ = logits_statistics(hidden, w, call.labels_in_range(labels), terms=call.terms)
    return call.result(statistics, labels), statistics


@partial(jax.jit, static_argnums=(0, 2))
def _loss_and_gradients(call: Call, arrays: Arrays, wants: Wants) -> tuple[jax.Array, Any]:
    hidden, w, labels = arrays
    keeps = wants[1] and hidden.shape[0] <= hidden.shape[1]  # in the memory of w's gradient
    statistics, logits = logits_statistics(
        hidden, w, call.labels_in_range(labels), terms=call.terms, keeps_logits=keeps
    )
    return call.result(statistics, labels), call.gradients(arrays, statistics, call.weight(labels), wants, logits)


@partial(jax.jit, static_argnums=(0, 4))
def _gradients(call: Call, arrays: Arrays, statistics: Statistics, cotangent: jax.Array, wants: Wants) -> Any:
    weights = cotangent if call.reduction == "none" else cotangent * call.weight(arrays[2])
    return call.gradients(arrays, statistics, weights, wants)


def _keeps_gradients(reduction: Reduction, dtype: jnp.dtype) -> bool:
    """Whether the forward pass computes the gradients: with a reduction, unless float16 needs its loss scale first."""
    return reduction != "none" and dtype != jnp.float16


def _mosaic_fwd(call, *arrays):
    wants, arrays = tuple(each.perturbed for each in arrays[:2]), tuple(each.value for each in arrays)
    if _keeps_gradients(call.reduction, arrays[0].dtype):
        loss, written = _loss_and_gradients(call, arrays, wants)
        return loss, (written, None)
    loss, statistics = _loss(call, arrays)
    return loss, (None, (arrays, statistics, Static(wants)))


def _mosaic_bwd(call, saved, cotangent):
    written, inputs = saved
    if written is not None:
        return *(None if array is None else _scaled(array, cotangent) for array in written), None
    arrays, statistics, wants = inputs
    return *_gradients(call, arrays, statistics, cotangent, wants.value), None


def _scaled(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies a gradient by a factor in place. Rows too short for the kernel are folded into longer ones."""
    rows = gradient.reshape(-1, TMA_ROWS * COLUMNS) if gradient.shape[1] < FEWEST_OUTPUTS else gradient
    return scale_in_place(rows, factor).reshape(gradient.shape)


_loss_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd, symbolic_zeros=True)
