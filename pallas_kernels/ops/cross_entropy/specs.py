"""Cross-entropy's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.cross_entropy.api import cross_entropy
from pallas_kernels.ops.cross_entropy.config import forward_candidates
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.cross_entropy.mosaic_gpu import cross_entropy_forward
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import cross_entropy_backward
from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.specs import (
    BENCH,
    GPU,
    ArgSpec,
    Arguments,
    ArraySpec,
    Fill,
    OpSpec,
    Traffic,
    array_bytes,
    call_name,
)


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
    **static: Any,
) -> ArgSpec:
    arguments = {
        "logits": ArraySpec(shape=shape, dtype=dtype, fill=fill, deviation=3.0),
        "labels": ArraySpec(shape=shape[:-1], dtype="int32", fill="integers", minimum=0, maximum=shape[-1]),
        **static,
    }
    name = call_name(shape, dtype, fill != "normal" and fill, *(f"{key}_{value}" for key, value in static.items()))
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(2, 1024),
    _call(1, 2, 256, reduction="mean"),
    _call(2, 512, dtype="float32", reduction="sum", label_smoothing=0.1, z_loss=1e-3),
    _call(2, 512, dtype="float32", label_smoothing=0.1),
    _call(2, 512, z_loss=1e-3),
    _call(2, 256, dtype="float16", reduction="mean"),
    _call(256),
    _call(40, 2, reduction="mean", ignore_index=1, tags=("test", "ragged")),
    _call(2, 1000, reduction="mean", tags=("test", "ragged")),
    _call(2, 4097, tags=("test", "ragged")),
    _call(2, 127, tags=("test", "ragged")),
    _call(2, 1, dtype="float32", tags=("test", "ragged")),
    _call(2, 16384 + 4096 + 768, reduction="mean", label_smoothing=0.1, tags=("test", "long")),
    _call(2, 16384 + 4101, reduction="mean", tags=("test", "ragged", "long")),
    _call(2, 512, fill="extreme", reduction="mean", tags=("test", "extreme")),
    _call(2, 512, fill="extreme", dtype="float32", tags=("test", "extreme")),
    _call(2, 512, fill="zeros", tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(0, 512, reduction="mean", tags=("test", "empty")),
    # On a GPU each kernel once: what holds rows in registers, the rings (whole rows kept, held, read twice), the split.
    _call(300, 4096, reduction="mean", tags=GPU),
    _call(300, 12288, dtype="float32", reduction="mean", tags=GPU),
    _call(300, 12416, dtype="float32", reduction="mean", label_smoothing=0.1, tags=GPU),
    _call(300, 32000, dtype="float16", reduction="mean", tags=GPU),
    _call(300, 50304, reduction="mean", label_smoothing=0.1, z_loss=1e-4, tags=GPU),
    _call(200, 50257, reduction="mean", label_smoothing=0.1, tags=(*GPU, "ragged")),
    _call(200, 4097, dtype="float32", reduction="mean", tags=(*GPU, "ragged")),
    _call(40, 50257, reduction="mean", label_smoothing=0.1, tags=(*GPU, "ragged")),
    _call(300, 128256, reduction="mean", tags=GPU),
    _call(150, 128256, dtype="float32", reduction="sum", z_loss=1e-4, tags=GPU),
    _call(150, 262144, fill="extreme", reduction="mean", tags=GPU),
    _call(40, 262144, fill="extreme", tags=GPU),
    _call(8192, 128256, reduction="mean", tags=(*BENCH, "block")),
    _call(8192, 128256, tags=BENCH),
    _call(8192, 32000, reduction="mean", tags=BENCH),
    _call(8192, 50304, reduction="mean", tags=BENCH),
    _call(4096, 128256, dtype="float32", reduction="mean", tags=BENCH),
    _call(64, 128256, reduction="mean", tags=BENCH),
    _call(1, 32000, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    return Traffic(read=(array_bytes(arguments["logits"]),), written=())


def _backward_traffic(arguments: Arguments) -> Traffic:
    size = array_bytes(arguments["logits"])
    return Traffic(read=(size,), written=(size,))


def _is_reduced(arguments: Arguments) -> bool:
    return arguments.get("reduction", "none") != "none"


def _terms(logits, arguments: Arguments) -> Terms:
    options = {key: arguments.get(key, 0.0) for key in ("label_smoothing", "z_loss")}
    return Terms(vocabulary=logits.shape[-1], **options)


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    logits = arguments["logits"]
    itemsize = jnp.dtype(logits.dtype).itemsize
    if phase == "backward" and not _is_reduced(arguments):
        return {f"chunk {chunk}": partial(_gradient_variant, chunk=chunk) for chunk in (4096, 8192, 16384)}
    with_gradient = phase == "backward"
    variant = _loss_and_gradient_variant if with_gradient else _loss_variant
    candidates = forward_candidates(logits.shape[-1], itemsize, with_gradient=with_gradient)
    return {name: partial(variant, config=config) for name, config in candidates.items()}


def _loss_variant(*, logits, labels, config, **arguments):
    losses, _, _ = cross_entropy_forward(
        logits, labels, _weights(labels, arguments), terms=_terms(logits, arguments), with_gradient=False, config=config
    )
    return (jnp.sum(losses) if _is_reduced(arguments) else losses,)


def _loss_and_gradient_variant(*, logits, labels, cotangents, config, **arguments):
    del cotangents
    losses, _, gradient = cross_entropy_forward(
        logits, labels, _weights(labels, arguments), terms=_terms(logits, arguments), with_gradient=True, config=config
    )
    return jnp.sum(losses), gradient


def _weights(labels, arguments):
    return jnp.full(1, labels.size, jnp.int32) if arguments.get("reduction") == "mean" else None


def _gradient_variant(*, logits, labels, cotangents, chunk=8192, **arguments):
    gradient = cross_entropy_backward(
        logits, labels, cotangents[0], _statistics(labels), terms=_terms(logits, arguments), chunk=chunk
    )
    return (gradient,)


def _statistics(labels):
    """Stand-ins for each row's saved maximum and sum: the gradients are of other values, the work is the same."""
    return jnp.full(labels.shape, 12.0, jnp.float32), jnp.full(labels.shape, 64.0, jnp.float32)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """With a reduction: loss and gradient together, as a training step has them. Without: from saved statistics."""
    logits, labels = arguments["logits"], arguments["labels"]
    options = {key: value for key, value in arguments.items() if key not in ("logits", "labels")}
    if _is_reduced(arguments):
        function = lambda z: cross_entropy(z, labels, **options, implementation=implementation)  # noqa: E731
        return jax.value_and_grad(function)(logits)
    if implementation == "mosaic":
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        (gradient,) = _gradient_variant(logits=rows, labels=flat, cotangents=(cotangents[0].reshape(-1),), **options)
        return (gradient.reshape(logits.shape),)
    maximum, total = (value[..., None] for value in _statistics(labels))
    terms = _terms(logits, arguments)
    token = terms.token(labels[..., None], cotangents[0][..., None])
    is_label = jnp.arange(terms.vocabulary) == token.label
    return (terms.slope(maximum, total, token)(logits.astype(jnp.float32), is_label).astype(logits.dtype),)


CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    function=cross_entropy,
    reference=cross_entropy_reference,
    implementations=("mosaic", "xla"),
    differentiable=("logits",),
    batched=("logits", "labels"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
