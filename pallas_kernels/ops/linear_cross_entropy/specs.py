"""The registry entry of a linear layer's cross-entropy."""

from __future__ import annotations

import math
from functools import partial

import jax

from pallas_kernels.ops._products.specs import product_call, weight
from pallas_kernels.ops.cross_entropy.specs import is_reduced, label_spec
from pallas_kernels.ops.linear_cross_entropy.api import linear_cross_entropy
from pallas_kernels.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from pallas_kernels.spec_builders import both_passes, traffic
from pallas_kernels.specs import Arguments, OpSpec


@product_call
def _call(hidden, *, vocabulary, **static):
    """Makes a call whose logits have a standard deviation of 2, like a trained model's."""
    labels = label_spec(hidden.shape[:-1], vocabulary, static)
    operands = {"hidden": hidden, "w": weight(hidden, vocabulary, deviation=2), "labels": labels}
    return vocabulary, operands, (static, "-".join(f"{key}_{value}" for key, value in static.items()))


def _flops(arguments: Arguments, phase: str) -> int:
    """Counts each product once; backward is both passes."""
    return 2 * math.prod(arguments["hidden"].shape) * arguments["w"].shape[1] * (1 if phase == "forward" else 3)


def _backward(implementation, arguments, cotangents):
    """Computes loss and gradients together with a reduction, as in a training step, and both passes without one.

    Both implementations also run their forward pass: XLA's could start from kept logits, but ours needs the statistics
    of its losses.
    """
    if not is_reduced(arguments):
        return both_passes(linear_cross_entropy, "hidden", "w")(implementation, arguments, cotangents)
    others = {key: value for key, value in arguments.items() if key not in ("hidden", "w")}
    function = partial(linear_cross_entropy, **others, implementation=implementation)
    loss, gradients = jax.value_and_grad(function, argnums=(0, 1))(arguments["hidden"], arguments["w"])
    return loss, *gradients


LINEAR_CROSS_ENTROPY = OpSpec(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    differentiable=("hidden", "w"),
    batched=("hidden", "labels"),
    arg_specs=(
        _call(8, features=64, vocabulary=128, reduction="mean"),
        _call(2, 6, features=64, vocabulary=320, label_smoothing=0.1, z_loss=1e-2),
        _call(8, features=64, vocabulary=512, reduction="sum", label_smoothing=0.1, z_loss=1e-3),
        _call(72, features=64, vocabulary=128, reduction="mean"),
        _call(13, features=64, vocabulary=136, reduction="mean", label_smoothing=0.1, z_loss=1e-3, ignore_index=None),
        _call(72, features=64, vocabulary=133, reduction="mean", label_smoothing=0.1),
        _call(8, features=64, vocabulary=128, dtype="float16", reduction="mean", ignore_index=3),
        _call(0, features=64, vocabulary=128, reduction="mean", tags="test empty"),
        _call(300, features=1024, vocabulary=8192, reduction="mean", tags="gpu"),
        _call(520, features=256, vocabulary=5056, reduction="sum", label_smoothing=0.1, z_loss=1e-4, tags="gpu"),
        _call(2, 150, features=512, vocabulary=4992, label_smoothing=0.1, tags="gpu"),
        _call(301, features=512, vocabulary=5000, reduction="mean", label_smoothing=0.1, ignore_index=None, tags="gpu"),
        _call(40, features=512, vocabulary=8000, dtype="float16", reduction="mean", tags="gpu"),
        _call(4096, features=4096, vocabulary=128256, reduction="mean", tags="gpu bench block"),
        _call(4096, features=4096, vocabulary=128256, tags="bench"),
        _call(8192, features=4096, vocabulary=32000, reduction="mean", tags="bench"),
        _call(16384, features=2048, vocabulary=50304, reduction="mean", tags="bench"),
        _call(512, features=4096, vocabulary=128256, reduction="mean", tags="bench"),
        _call(1024, features=1024, vocabulary=50257, reduction="mean", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("hidden", "w")),
    backward_traffic=traffic(read=("hidden", "w"), written=("hidden", "w")),
    backward=_backward,
    flops=_flops,
)
