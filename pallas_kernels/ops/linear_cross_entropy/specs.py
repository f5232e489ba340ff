"""The operation's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.specs import product_call, weight
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.linear_cross_entropy.api import Call, linear_cross_entropy, loss_and_gradients
from pallas_kernels.ops.linear_cross_entropy.config import LossConfig, candidates, default_config
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import logits_statistics
from pallas_kernels.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic, array_bytes


def _call(
    *leading: int,
    features: int,
    vocabulary: int,
    dtype: str = "bfloat16",
    tags: tuple[str, ...] = ("test",),
    **static: Any,
) -> ArgSpec:
    """Logits of deviation 2: as spread as a trained model's are."""
    operands = {
        "hidden": ArraySpec(shape=(*leading, features), dtype=dtype),
        "w": weight(features, vocabulary, dtype, deviation=2),
        "labels": ArraySpec(shape=leading, dtype="int32", fill="integers", minimum=0, maximum=vocabulary),
    }
    told = "-".join(f"{key}_{value}" for key, value in static.items())
    return product_call(f"{features}-{vocabulary}", operands, (static, told), tags=tags)


_BENCH_ONLY = ("bench",)

_ARG_SPECS = (
    _call(8, features=64, vocabulary=128, reduction="mean"),
    _call(2, 6, features=64, vocabulary=320, label_smoothing=0.1, z_loss=1e-2),
    _call(8, features=64, vocabulary=512, reduction="sum", label_smoothing=0.1, z_loss=1e-3),
    _call(72, features=64, vocabulary=128, reduction="mean"),
    _call(8, features=64, vocabulary=128, dtype="float16", reduction="mean", ignore_index=3),
    _call(0, features=64, vocabulary=128, reduction="mean", tags=("test", "empty")),
    _call(300, features=1024, vocabulary=8192, reduction="mean", tags=GPU),
    _call(520, features=256, vocabulary=5056, reduction="sum", label_smoothing=0.1, z_loss=1e-4, tags=GPU),
    _call(2, 150, features=512, vocabulary=4992, label_smoothing=0.1, tags=GPU),
    _call(40, features=512, vocabulary=8000, dtype="float16", reduction="mean", tags=GPU),
    _call(4096, features=4096, vocabulary=128256, reduction="mean", tags=(*BENCH, "block")),
    _call(4096, features=4096, vocabulary=128256, tags=_BENCH_ONLY),
    _call(8192, features=4096, vocabulary=32000, reduction="mean", tags=_BENCH_ONLY),
    _call(16384, features=2048, vocabulary=50304, reduction="mean", tags=_BENCH_ONLY),
    _call(512, features=4096, vocabulary=128256, reduction="mean", tags=_BENCH_ONLY),
)


def _is_reduced(arguments: Arguments) -> bool:
    return arguments.get("reduction", "none") != "none"


def _forward_traffic(arguments: Arguments) -> Traffic:
    return Traffic(read=(array_bytes(arguments["hidden"]), array_bytes(arguments["w"])), written=())


def _backward_traffic(arguments: Arguments) -> Traffic:
    sizes = (array_bytes(arguments["hidden"]), array_bytes(arguments["w"]))
    return Traffic(read=sizes, written=sizes)


def flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of a phase's products, none counted twice; backward is both passes."""
    hidden, w = arguments["hidden"], arguments["w"]
    product = 2 * math.prod(hidden.shape) * w.shape[1]
    return product * (1 if phase == "forward" else 3)


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    hidden, w = arguments["hidden"], arguments["w"]
    found = candidates(math.prod(hidden.shape[:-1]), w.shape[1], w.shape[0])
    if phase == "forward":
        return {name: partial(_loss_variant, config=config) for name, config in found.items() if "forward" in name}
    if not _is_reduced(arguments):
        return {}
    return {name: partial(_gradient_variant, config=config) for name, config in found.items()}


def _prepared(hidden, w, labels, arguments: Arguments, config: LossConfig | None = None):
    options = {key: arguments.get(key, 0.0) for key in ("label_smoothing", "z_loss")}
    rows = hidden.reshape(-1, hidden.shape[-1])
    call = Call(
        terms=Terms(vocabulary=w.shape[1], **options),
        reduction=arguments.get("reduction", "none"),
        config=config or default_config(rows.shape[0], w.shape[1], w.shape[0]),
    )
    return call, rows, labels.reshape(-1)


def _loss_variant(*, hidden, w, labels, config, **arguments):
    call, rows, labels = _prepared(hidden, w, labels, arguments, config)
    statistics, _ = logits_statistics(
        rows, w, call.labels_in_range(labels), terms=call.terms, kept_rows=0, config=config.statistics
    )
    return (call.result(statistics, labels),)


def _gradient_variant(*, hidden, w, labels, cotangents, config, **arguments):
    del cotangents
    call, rows, labels = _prepared(hidden, w, labels, arguments, config)
    loss, dhidden, dw = loss_and_gradients(call, rows, w, labels)
    return loss, dhidden, dw


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """With a reduction: loss and gradients together, as a training step has them. Without: both passes.

    Both implementations then run their forward pass, too: XLA's, which could begin at kept logits, as well as ours,
    which needs its losses' statistics.
    """
    hidden, w, labels = arguments["hidden"], arguments["w"], arguments["labels"]
    options = {key: value for key, value in arguments.items() if key not in ("hidden", "w", "labels")}
    function = partial(linear_cross_entropy, **options, implementation=implementation)
    if _is_reduced(arguments):
        loss, found = jax.value_and_grad(lambda h, w: function(h, w, labels), argnums=(0, 1))(hidden, w)
        return loss, *found
    return jax.vjp(lambda h, w: function(h, w, labels), hidden, w)[1](cotangents[0])


LINEAR_CROSS_ENTROPY = OpSpec(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    implementations=("mosaic", "xla"),
    differentiable=("hidden", "w"),
    batched=("hidden", "labels"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=flops,
)
