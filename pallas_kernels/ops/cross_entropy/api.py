"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.cross_entropy.mosaic_gpu import cross_entropy_backward, cross_entropy_forward, scale_in_place
from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference, label_kinds, wide_labels
from pallas_kernels.primitives.checks import as_arrays, check_floating, finite_number, static_integer, static_number
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS

Reduction = Literal["none", "sum", "mean"]
IGNORED = -1


def dimensions(arguments: Mapping[str, Any], inputs: str) -> str:
    """Returns the text for `operation`: a loss without reduction has rows, a reduced one is a sum over them.

    inputs: the dimensions of the arrays but labels.
    """
    return f"{inputs}, labels: ... -> ..." if arguments["reduction"] == "none" else f"{inputs}, labels: +... ->"


def loss_from_parts(
    loss: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    arguments: Mapping[str, Any],
    sums: Mapping[str, Any],
) -> jax.Array:
    """Computes a loss where devices have parts of the rows or of the vocabulary.

    loss, reference: the operation on one device's rows, and its reference, which also takes a part of the vocabulary.
    """

    def losses(reduction: str) -> jax.Array:
        own = {**arguments, "reduction": reduction}
        if "v" not in sums:
            return loss(**own)
        del own["implementation"]
        return reference(**own, vocabulary=sums["v"])

    if "..." not in sums:
        return losses(arguments["reduction"])
    total = sums["..."].total(losses("sum"))
    if arguments["reduction"] == "sum":
        return total
    is_ignored, _ = label_kinds(wide_labels(arguments["labels"]), 1, arguments["ignore_index"])
    return total / jnp.maximum(1, sums["..."].total(jnp.sum(~is_ignored))).astype(total.dtype)


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    return loss_from_parts(cross_entropy, cross_entropy_reference, arguments, sums)


@operation(partial(dimensions, inputs="logits: ... +v"), _from_parts)
def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    implementation: Implementation = None,
) -> jax.Array:
    """Computes the cross-entropy of logits and integer labels.

    Equivalent to this, in float32:

        lse = logsumexp(logits, axis=-1)
        loss = lse - (1 - label_smoothing) * logits[labels] - label_smoothing * mean(logits, -1) + z_loss * lse**2

    The loss is 0 for the label `ignore_index`. Another label outside the vocabulary gives NaN and a gradient of zero.
    Without an `ignore_index` it is a row of zeros instead, as `jax.nn.one_hot` makes it, and its loss is the smoothing
    and the squared lse alone. Labels have no gradient.

    Memory traffic of "mosaic" in a training step (loss and gradient), where n is the size of the logits:

    * `reduction` "mean" or "sum": n read, n written. The forward pass already knows each row's factor and writes the
      gradient with the loss. If the result is multiplied before it is differentiated (a loss scale), the backward pass
      multiplies the written gradient: another n read and n written.
    * "none", or float16, whose loss scale must come before rounding: 2n read, n written. The backward pass computes the
      gradient from the logits and two saved numbers per row.

    The gradient of a reduction costs another n read where a vocabulary above 12288 is no multiple of 8 (4 in float32;
    pad it), or with 66 rows or fewer. A loss alone reads n; above 12288 in two launches, of which the second has the
    logits as an operand too and reads one of each row, so that counts of whole operands say 2n.

    Args:
        logits: (..., vocabulary), bfloat16, float16 or float32 (any floating dtype with "xla").
        labels: (...), integers of any width, `0 <= label < vocabulary` or `ignore_index`.
        ignore_index: the label of tokens that do not count, a Python integer; or None. Gradients are finite only if the
            logits of those tokens are, too.
        label_smoothing: the share of the target spread evenly over the vocabulary, a Python number from 0 to 1.
        z_loss: the weight of the squared lse, which keeps logits from drifting, a Python number.
        reduction: "none", "sum", or "mean" over the tokens that count (0 if none does).
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; a vocabulary of at least
            128.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        The losses (...), or a scalar with a reduction; float32 (float64 for float64 logits).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: online softmax as in Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867; gradient in the forward
    pass as in Liger, Hsu et al., 2024, https://arxiv.org/abs/2410.10989
    """
    logits, labels = as_arrays("cross_entropy", logits=logits, labels=labels)
    check_floating("cross_entropy", logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"cross_entropy: logits must have a vocabulary axis of at least 1, got {logits.shape}.")
    labels = checked_labels("cross_entropy", labels, logits.shape[:-1], each="row of logits")
    options = checked_options("cross_entropy", labels.dtype, ignore_index, label_smoothing, z_loss, reduction)
    support = {"mosaic": partial(mosaic_unsupported, logits), "xla": lambda: None}
    chosen = choose("cross_entropy", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or logits.size == 0:
        return cross_entropy_reference(logits, labels, **options, reduction=reduction)
    vocabulary = logits.shape[-1]
    rows, flat_labels = varying_alike((logits.reshape(-1, vocabulary), labels.reshape(-1)))
    is_one_hot = ignore_index is None
    if labels.dtype != jnp.int32 or is_one_hot:
        flat_labels = plain_labels(flat_labels, vocabulary, ignore_index)
        options["ignore_index"] = IGNORED
    weights = None
    if reduction == "mean":
        weights = jnp.sum(flat_labels != options["ignore_index"], dtype=jnp.int32).reshape(1)
    terms = Terms(vocabulary=vocabulary, is_one_hot=is_one_hot, **options)
    loss: jax.Array = _cross_entropy_mosaic(terms, reduction != "none", rows, flat_labels, weights)  # pyright: ignore
    return loss.reshape(labels.shape) if reduction == "none" else loss


def mosaic_unsupported(logits: jax.Array) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these logits here, or None if they can."""
    if reason := dtypes_unsupported(logits=logits):
        return reason
    if logits.shape[-1] < THREADS and logits.size:
        return f"the vocabulary is {logits.shape[-1]}, a warpgroup shares at least {THREADS} values of a row"
    return mosaic_gpu_unsupported()


def plain_labels(labels: jax.Array, vocabulary: int, ignore_index: int | None) -> jax.Array:
    """Returns int32 labels, with `IGNORED` for what is ignored and -2 for what names no token."""
    is_ignored, is_valid = label_kinds(labels, vocabulary, ignore_index)
    return jnp.where(is_valid, labels.astype(jnp.int32), jnp.where(is_ignored, IGNORED, -2))


def checked_labels(operation: str, labels: jax.Array, shape: tuple[int, ...], *, each: str) -> jax.Array:
    """Returns the labels as int32 or a wider integer.

    Args:
        operation: the public function's name, for messages.
        labels: integers of any width.
        shape: the shape that the labels must have.
        each: what each label belongs to, for messages.

    Raises:
        TypeError: the labels are not integers.
        ValueError: the labels have another shape.
    """
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{operation}: labels must be integers, got {labels.dtype.name}.")
    if labels.shape != shape:
        raise ValueError(f"{operation}: labels must be {shape}, one a {each}, got {labels.shape}.")
    return wide_labels(labels)


def checked_options(
    operation: str,
    labels_dtype: jnp.dtype,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> dict[str, Any]:
    """Returns the options by name.

    Raises:
        TypeError, ValueError: an option is not a Python number, or out of range.
    """
    options: dict[str, Any] = {"ignore_index": None}
    if ignore_index is not None:
        options["ignore_index"] = index = static_integer(operation, "ignore_index", ignore_index)
        if not -(2 ** (8 * labels_dtype.itemsize - 1)) <= index <= jnp.iinfo(labels_dtype).max:
            raise ValueError(f"{operation}: ignore_index must be one of labels' {labels_dtype.name}, got {index}.")
    options["label_smoothing"] = static_number(operation, "label_smoothing", label_smoothing)
    options["z_loss"] = finite_number(operation, "z_loss", z_loss)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{operation}: label_smoothing must be from 0 to 1, got {label_smoothing}.")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"{operation}: reduction must be 'none', 'sum' or 'mean', got {reduction!r}.")
    return options


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy_mosaic(
    terms: Terms, is_reduced: bool, logits: jax.Array, labels: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns weighted losses, or their sum. logits: (rows, vocabulary). labels: (rows,). weights: (1,) int32."""
    losses, _, _ = cross_entropy_forward(logits, labels, weights, terms=terms, with_gradient=False)
    return jnp.sum(losses) if is_reduced else losses


def _mosaic_fwd(terms, is_reduced, logits, labels, weights):
    with_gradient = is_reduced and logits.dtype != jnp.float16  # float16 needs its loss scale first
    losses, statistics, gradient = cross_entropy_forward(
        logits, labels, weights, terms=terms, with_gradient=with_gradient
    )
    losses = jnp.sum(losses) if is_reduced else losses
    return losses, (gradient, None if with_gradient else (logits, labels, weights, statistics))


def _mosaic_bwd(terms, _, saved, cotangent):
    gradient, inputs = saved
    if inputs is None:
        return scale_in_place(gradient, cotangent), None, None
    logits, labels, weights, statistics = inputs
    weights = cotangent.reshape(-1) if weights is None else cotangent / jnp.maximum(weights, 1)
    return cross_entropy_backward(logits, labels, weights, statistics, terms=terms), None, None


_cross_entropy_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
