"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.grouped_gated_linear.mosaic_gpu import grouped_gated_linear_mosaic
from pallas_kernels.ops.grouped_gated_linear.reference import grouped_gated_linear_reference
from pallas_kernels.ops.grouped_linear.api import check_group_bias, check_groups, mosaic_unsupported, of_own_groups
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, as_int32, optional_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import operation


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where groups are cut."""
    return of_own_groups(lambda given: grouped_gated_linear(**given), arguments, sums)


_DIMENSIONS = "x: m k, w_gate: +g k n, w_up: g k n, bias_gate: g n, bias_up: g n, group_sizes: sizes of m -> m n"


@shares(_DIMENSIONS, _from_parts)
@operation
def grouped_gated_linear(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows by its own gate and up weights: `gated_linear` of an expert.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        gate, up = (jax.lax.ragged_dot(x, w, group_sizes) for w in (w_gate, w_up))
        of = group of each row
        y = activation(gate + bias_gate[of]) * (up + bias_up[of])  # zero in rows of no group

    One launch computes both products and the gating. A call that is differentiated keeps both products, and has a
    launch of its own for the gating, forward and backward; then one for x, and one for each of the weights.

    Args:
        x: (rows, features), sorted by group; bfloat16 or float16 (any floating dtype with "xla").
        w_gate: (groups, features, outputs), of x's dtype.
        w_up: an array of w_gate's shape and dtype.
        group_sizes: (groups,), integers; see `grouped_linear`.
        bias_gate, bias_up: (groups, outputs), any floating dtype, each None for none.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, and at least 128.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        y, (rows, outputs), of x's dtype; zero in rows of no group.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: see `grouped_linear` and `gated_linear`.
    """
    x, w_gate, w_up, group_sizes = as_arrays(
        "grouped_gated_linear", x=x, w_gate=w_gate, w_up=w_up, group_sizes=group_sizes
    )
    biases = optional_arrays("grouped_gated_linear", bias_gate=bias_gate, bias_up=bias_up)
    function = get_activation("grouped_gated_linear", activation)
    check_groups("grouped_gated_linear", x, {"w_gate": w_gate, "w_up": w_up}, group_sizes)
    for name, bias in zip(("bias_gate", "bias_up"), biases, strict=True):
        check_group_bias("grouped_gated_linear", name, bias, (w_gate.shape[0], w_gate.shape[2]))
    support = {"mosaic": partial(mosaic_unsupported, x, w_gate.shape[2]), "xla": lambda: None}
    chosen = choose("grouped_gated_linear", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0 or w_gate.size == 0:
        given = {"bias_gate": biases[0], "bias_up": biases[1]}
        return grouped_gated_linear_reference(x, w_gate, w_up, group_sizes, activation=activation, **given)
    operands = varying_alike((x, w_gate, w_up, tuple(biases), as_int32(group_sizes)))
    y: jax.Array = grouped_gated_linear_mosaic(function, *operands)  # pyright: ignore
    return y
