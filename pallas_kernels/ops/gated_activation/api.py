"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_mosaic
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, check_floating, check_like, optional_arrays
from pallas_kernels.primitives.elementwise import elementwise_unsupported
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike


def _dimensions(arguments: Mapping[str, Any]) -> str:
    """One array holds the gate and up in halves, of which parts would have one alone."""
    return "gate: ... !e -> ... !d" if arguments["up"] is None else "gate: ... d, up: ... d -> ... d"


@operation(_dimensions)
def gated_activation(
    gate: jax.Array,
    up: jax.Array | None = None,
    *,
    activation: str = "silu",
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies an activated gate by a linear branch: SwiGLU ("silu"), GEGLU ("gelu", "gelu_tanh"), ReGLU ("relu").

    Equivalent to this, in float32 between the casts:

        y = activation(gate) * up

    Args:
        gate: (..., features), bfloat16, float16 or float32 (float64 with "xla"). If `up` is None, gate is (..., 2 *
            features) and holds both: the gate is the first half of the last axis, `up` the second.
        up: an array of gate's shape and dtype, or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; at least 128 values,
            or 128 features if gate holds both.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        y, (..., features), of gate's dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    (gate,) = as_arrays("gated_activation", gate=gate)
    (up,) = optional_arrays("gated_activation", up=up)
    function = get_activation("gated_activation", activation)
    check_floating("gated_activation", gate=gate)
    check_like("gated_activation", "up", up, "gate", gate)
    if up is None and (gate.ndim == 0 or gate.shape[-1] % 2):
        raise ValueError(
            f"gated_activation: without up, gate's last axis must hold gate and up, an even length, got {gate.shape}."
        )
    support = {"mosaic": partial(mosaic_unsupported, gate, up), "xla": lambda: None}
    chosen = choose("gated_activation", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or gate.size == 0:
        return gated_activation_reference(gate, up, activation=activation)
    if up is None:
        features = gate.shape[-1] // 2
        gate_rows, up_rows, shape = gate.reshape(-1, 2, features), None, (*gate.shape[:-1], features)
    else:  # the row length does not matter, and one long row has the fewest unaligned accesses
        gate_rows, up_rows, shape = gate.reshape(1, -1), up.reshape(1, -1), gate.shape
        gate_rows, up_rows = varying_alike((gate_rows, up_rows))
    y: jax.Array = gated_activation_mosaic(function, gate_rows, up_rows)  # pyright: ignore
    return y.reshape(shape)


def mosaic_unsupported(gate: jax.Array, up: jax.Array | None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if reason := dtypes_unsupported(gate=gate):
        return reason
    features = gate.shape[-1] // 2 if up is None else gate.size
    rows = gate.size // max(1, 2 * features) if up is None else 1
    return elementwise_unsupported(rows, features) or mosaic_gpu_unsupported()
