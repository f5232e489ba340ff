"""Cross-entropy's registry entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.cross_entropy.api import cross_entropy
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.cross_entropy.mosaic_gpu import cross_entropy_backward
from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.spec_builders import array_call, calls, traffic
from pallas_kernels.specs import Arguments, ArraySpec, OpSpec


def label_spec(shape: tuple[int, ...], vocabulary: int, static: Mapping[str, Any]) -> ArraySpec:
    """Returns labels; without an `ignore_index` some are outside the vocabulary."""
    outside = vocabulary // 4 if static.get("ignore_index", -1) is None else 0
    return ArraySpec(shape=shape, dtype="int32", fill="integers", minimum=-outside, maximum=vocabulary + outside)


@array_call
def _call(logits, **static):
    labels = label_spec(logits.shape[:-1], logits.shape[-1], static)
    told = (f"{key}_{value}" for key, value in static.items())
    arguments = {"logits": replace(logits, deviation=3.0), "labels": labels, **static}
    return arguments, logits.fill != "normal" and logits.fill, *told


def is_reduced(arguments: Arguments) -> bool:
    """Whether the losses are summed or averaged."""
    return arguments.get("reduction", "none") != "none"


def terms_of(vocabulary: int, arguments: Arguments) -> Terms:
    """Returns the loss's terms for a call's static arguments."""
    return Terms(vocabulary=vocabulary, **{key: arguments.get(key, 0.0) for key in ("label_smoothing", "z_loss")})


def _statistics(labels):
    """Returns made-up maxima and sums of rows; the gradients have other values, but the work is the same."""
    return jnp.full(labels.shape, 12.0, jnp.float32), jnp.full(labels.shape, 64.0, jnp.float32)


def _backward(implementation, arguments, cotangents):
    """Computes loss and gradient together with a reduction, as in training, or the gradient from saved statistics."""
    logits, labels = arguments["logits"], arguments["labels"]
    options = {key: value for key, value in arguments.items() if key not in ("logits", "labels")}
    if is_reduced(arguments):
        function = partial(cross_entropy, labels=labels, **options, implementation=implementation)
        return jax.value_and_grad(function)(logits)
    if implementation == "mosaic":
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        terms = terms_of(rows.shape[-1], options)
        gradient = cross_entropy_backward(rows, flat, cotangents[0].reshape(-1), _statistics(flat), terms=terms)
        return (gradient.reshape(logits.shape),)
    maximum, total = (value[..., None] for value in _statistics(labels))
    terms = terms_of(logits.shape[-1], arguments)
    token = terms.token(labels[..., None], cotangents[0][..., None])
    is_label = jnp.arange(terms.vocabulary) == token.label
    return (terms.slope(maximum, total, token)(logits.astype(jnp.float32), is_label).astype(logits.dtype),)


CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    function=cross_entropy,
    reference=cross_entropy_reference,
    differentiable=("logits",),
    batched=("logits", "labels"),
    arg_specs=(
        _call(2, 1024),
        _call(1, 2, 256, reduction="mean"),
        _call(2, 512, dtype="float32", reduction="sum", label_smoothing=0.1, z_loss=1e-3),
        _call(8, 512, label_smoothing=0.1, z_loss=1e-3, ignore_index=None),
        _call(8, 16384 + 4101, reduction="mean", label_smoothing=0.1, ignore_index=None, tags="test ragged long"),
        _call(20, 16384, reduction="sum", label_smoothing=0.1, ignore_index=None, tags="test long"),
        _call(2, 256, dtype="float16", reduction="mean"),
        _call(256),
        _call(40, 2, reduction="mean", ignore_index=1, tags="test ragged"),
        _call(2, 1000, reduction="mean", tags="test ragged"),
        *calls(_call, (2, 4097), (2, 127), tags="test ragged"),
        _call(2, 1, dtype="float32", tags="test ragged"),
        _call(2, 16384 + 4101, reduction="mean", tags="test ragged long"),
        _call(2, 512, fill="extreme", reduction="mean", tags="test extreme"),
        _call(2, 512, fill="extreme", dtype="float32", tags="test extreme"),
        _call(0, 512, reduction="mean", tags="test empty"),
        # On a GPU, each kernel once: rows in registers, the rings (whole rows kept, held, read twice), and the split.
        _call(300, 4096, reduction="mean", tags="gpu"),
        _call(1003, 201, reduction="mean", label_smoothing=0.1, tags="gpu ragged"),  # a row for each warp
        _call(300, 201, reduction="mean", label_smoothing=0.1, ignore_index=None, tags="test gpu ragged"),
        _call(600, 136, dtype="float32", z_loss=1e-3, tags="test gpu"),
        _call(300, 12288, dtype="float32", reduction="mean", tags="gpu"),
        _call(300, 32000, dtype="float16", reduction="mean", tags="gpu"),
        _call(300, 50304, reduction="mean", label_smoothing=0.1, z_loss=1e-4, tags="gpu"),
        _call(300, 50304, reduction="mean", label_smoothing=0.1, z_loss=1e-4, ignore_index=None, tags="gpu"),
        _call(200, 50257, reduction="mean", label_smoothing=0.1, tags="gpu ragged"),
        _call(40, 50257, reduction="mean", label_smoothing=0.1, tags="gpu ragged"),
        _call(300, 128256, reduction="mean", tags="gpu"),
        _call(150, 128256, dtype="float32", reduction="sum", z_loss=1e-4, tags="gpu"),
        _call(150, 262144, fill="extreme", reduction="mean", tags="gpu"),
        _call(8192, 128256, reduction="mean", tags="gpu bench block"),
        _call(8192, 128256, tags="gpu bench"),
        *calls(_call, (8192, 32000), (8192, 50304), reduction="mean", tags="gpu bench"),
        _call(4096, 128256, dtype="float32", reduction="mean", tags="gpu bench"),
        _call(64, 128256, reduction="mean", tags="gpu bench"),
        _call(1, 32000, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("logits",)),
    backward_traffic=traffic(read=("logits",), written=("logits",)),
    backward=_backward,
)
