"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_operands, check_weight
from pallas_kernels.ops.cross_entropy.api import Reduction, checked_labels, checked_options
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import scale_in_place
from pallas_kernels.ops.cross_entropy.reference import label_kinds
from pallas_kernels.ops.linear_cross_entropy.config import LossConfig, default_config, is_preferred, kept_rows
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import Statistics, logits_statistics
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu_vjp import gradients
from pallas_kernels.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from pallas_kernels.ops.linear_cross_entropy.slopes import RowSlopes
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.gemm.operands import COLUMNS, FEWEST_OUTPUTS, operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.settings import usual_promotion

_ROWS = 8
"""TMA brings groups of so many rows."""
_IGNORED = -1


@usual_promotion
def linear_cross_entropy(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    implementation: Implementation = None,
) -> jax.Array:
    """Cross-entropy of hidden states times a vocabulary matrix, and integer labels, without the logits in memory.

    With logits = hidden @ w and lse = logsumexp(logits, axis=-1), in float32,

        loss = lse - (1 - label_smoothing) * logits[labels] - label_smoothing * mean(logits, -1) + z_loss * lse**2

    and 0 where the label is `ignore_index`, NaN (with a gradient of zero) where it names no token. Labels have no
    gradient.

    What "mosaic" computes, for n tokens, and has in memory besides arguments and results:

    * without gradients: one matrix product, and two or three float32 numbers for every 256 logits.
    * with gradients, `reduction` "mean" or "sum": three products as with logits, since the forward pass knows what each
      token's gradient is multiplied with and computes all gradients at once. The logits of as many tokens as there are
      features lie where w's gradient will, those of further tokens are computed twice (four products for them; for all
      tokens where w needs no gradient). Beside those a sixth to a twelfth of the logits is in memory at a time. Where
      the result is multiplied before it is differentiated (a loss scale), the written gradients are multiplied once
      more, after having been rounded.
    * with gradients, "none", and float16 (whose loss scale must come before the rounding): four products. The forward
      pass keeps three numbers a token, the backward pass computes the logits again, a chunk at a time.

    Args:
        hidden: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w: (features, vocabulary), of hidden's dtype. Pass an embedding table (vocabulary, features) as `table.T`, which
            XLA makes a copy of.
        labels: (...), integers of any width, from 0 to below vocabulary, or `ignore_index`.
        ignore_index: the label of tokens that do not count; it and the next two are Python numbers.
        label_smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.
        z_loss: weight of the squared lse, which keeps logits from drifting.
        reduction: "none", "sum", or "mean" over the tokens that count (0 where none does).
        implementation: "mosaic" (Mosaic GPU kernels; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; features and
            vocabulary multiples of 64, at least 128 of the latter), "xla" (with logits, of hidden's dtype), a sequence
            of them in order of preference, or None: "mosaic" where it was measured to be faster (bfloat16, a reduction,
            512 tokens or more, but no more than features, a vocabulary of 32000 or more), else "xla". Ask for
            ("mosaic", "xla") where memory counts.

    Returns:
        float32 (float64 for float64 hidden states): (...), or a scalar with a reduction.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

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
    chosen = choose("linear_cross_entropy", implementation, support, preferred=lambda: ("mosaic",) if is_best() else ())
    if chosen == "xla" or hidden.size == 0:
        return linear_cross_entropy_reference(hidden, w, labels, **options, reduction=reduction)
    hidden, flat_labels = hidden.reshape(rows, -1), labels.reshape(rows)
    hidden, w, flat_labels = varying_alike((hidden, w, flat_labels))
    is_ignored, is_valid = label_kinds(flat_labels, w.shape[1], options["ignore_index"])
    flat_labels = jnp.where(is_valid, flat_labels.astype(jnp.int32), jnp.where(is_ignored, _IGNORED, -2))
    padding = -rows % _ROWS
    if padding:
        hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
        flat_labels = jnp.pad(flat_labels, (0, padding), constant_values=_IGNORED)
    terms = Terms(vocabulary=w.shape[1], **{**options, "ignore_index": _IGNORED})
    call = Call(terms=terms, reduction=reduction, config=default_config(rows, w.shape[1], w.shape[0]))
    loss: jax.Array = _loss_mosaic(call, hidden, w, flat_labels)  # pyright: ignore
    return loss[:rows].reshape(labels.shape) if reduction == "none" else loss


def mosaic_unsupported(hidden: jax.Array, w: jax.Array) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    reason = operands_unsupported(hidden, w)
    return reason.replace("x is", "hidden is") if reason else mosaic_gpu_unsupported()


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is static of a call."""

    terms: Terms
    reduction: Reduction
    config: LossConfig

    def weight(self, labels: jax.Array) -> jax.Array:
        """What every loss is multiplied with before they are added up."""
        if self.reduction != "mean":
            return jnp.float32(1)
        return 1 / jnp.maximum(1, jnp.sum(labels != self.terms.ignore_index)).astype(jnp.float32)

    def result(self, statistics: Statistics, labels: jax.Array) -> jax.Array:
        """The losses, or the reduced loss."""
        losses = statistics.losses(self.terms, self.terms.token(labels, self.weight(labels)))
        return losses if self.reduction == "none" else jnp.sum(losses)

    def labels_in_range(self, labels: jax.Array) -> jax.Array:
        """With stand-ins for those that name no token."""
        return self.terms.token(labels, 1.0).label


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_mosaic(call: Call, hidden: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """(rows,) losses, or their sum or mean. hidden: (rows, features), whole groups of rows. labels: (rows,) int32."""
    return _loss(call, hidden, w, labels)[0]


# Compiled as wholes where the caller compiles nothing.


@partial(jax.jit, static_argnums=0)
def _loss(call: Call, hidden: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, Statistics]:
    statistics, _ = logits_statistics(
        hidden, w, call.labels_in_range(labels), terms=call.terms, kept_rows=0, config=call.config.statistics
    )
    return call.result(statistics, labels), statistics


@partial(jax.jit, static_argnums=0, static_argnames=("wants_hidden", "wants_w"))
def loss_and_gradients(
    call: Call, hidden: jax.Array, w: jax.Array, labels: jax.Array, *, wants_hidden: bool = True, wants_w: bool = True
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (sum or mean, dhidden, dw), the last two None where not wanted; arguments as the kernels take them."""
    kept = kept_rows(*hidden.shape) if wants_w and call.config.keeps_logits else 0
    statistics, logits = logits_statistics(
        hidden, w, call.labels_in_range(labels), terms=call.terms, kept_rows=kept, config=call.config.statistics
    )
    slopes = _slopes(call, statistics, labels, call.weight(labels))
    dhidden, dw = gradients(
        hidden, w, slopes, logits, kept_rows=kept, wants_hidden=wants_hidden, wants_w=wants_w, config=call.config
    )
    return call.result(statistics, labels), dhidden, dw


def _slopes(call: Call, statistics: Statistics, labels: jax.Array, weights: jax.Array) -> RowSlopes:
    token = call.terms.token(labels, jnp.broadcast_to(weights, labels.shape))
    return RowSlopes.of(statistics.slope(call.terms, token), token.label)


def _keeps_gradients(reduction: Reduction, dtype: jnp.dtype) -> bool:
    """Whether the forward pass makes the gradients: of one number, and rounded before a loss scale multiplies them."""
    return reduction != "none" and dtype != jnp.float16


def _mosaic_fwd(call, hidden, w, labels):
    wants = (hidden.perturbed, w.perturbed)
    hidden, w, labels = hidden.value, w.value, labels.value
    if _keeps_gradients(call.reduction, hidden.dtype):
        loss, dhidden, dw = loss_and_gradients(call, hidden, w, labels, wants_hidden=wants[0], wants_w=wants[1])
        return loss, ((dhidden, dw), None)
    loss, statistics = _loss(call, hidden, w, labels)
    # None or an empty array says which gradients are wanted, in a way that transformations keep.
    marks = tuple(jnp.zeros(0) if wanted else None for wanted in wants)
    return loss, (None, (hidden, w, labels, statistics, marks))


def _mosaic_bwd(call, saved, cotangent):
    written, inputs = saved
    if isinstance(cotangent, SymbolicZero):
        return None, None, None
    if written is not None:
        return *(None if array is None else _scaled(array, cotangent) for array in written), None
    *arrays, marks = inputs
    wanted = [mark is not None for mark in marks]
    return *_gradients(call, *arrays, cotangent, wants_hidden=wanted[0], wants_w=wanted[1]), None


@partial(jax.jit, static_argnums=0, static_argnames=("wants_hidden", "wants_w"))
def _gradients(call, hidden, w, labels, statistics, cotangent, *, wants_hidden, wants_w):
    weights = cotangent if call.reduction == "none" else cotangent * call.weight(labels)
    return gradients(
        hidden,
        w,
        _slopes(call, statistics, labels, weights),
        None,
        kept_rows=0,
        wants_hidden=wants_hidden,
        wants_w=wants_w,
        config=call.config,
    )


def _scaled(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """In place. Few features, of which there are whole groups of rows, in rows that the kernel takes."""
    rows = gradient.reshape(-1, _ROWS * COLUMNS) if gradient.shape[1] < FEWEST_OUTPUTS else gradient
    return scale_in_place(rows, factor).reshape(gradient.shape)


_loss_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd, symbolic_zeros=True)
