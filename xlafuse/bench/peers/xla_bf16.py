"""XLA's product with 16-bit weights, the baseline for integer weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight
from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers import jitted
from xlafuse.bench.timing import Candidate

_INTEGERS = ("values", "scales", "group_size")


def with_wide_weights(case: Case) -> dict[str, Any]:
    """Returns `quantized_linear`'s arguments with weights in x's dtype instead of integers, made outside the timing."""
    arguments = plain(case.arguments)
    values, bits = arguments["values"], 4 if arguments["values"].dtype.name == "int4" else 8
    weight = QuantizedWeight(values=values, scales=arguments["scales"], bits=bits, group_size=arguments["group_size"])
    kept = {name: value for name, value in case.arguments.items() if name not in _INTEGERS}
    return {**kept, "w": jax.jit(lambda weight: weight.dequantized(arguments["x"].dtype))(weight)}


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation != "quantized_linear" or phase != "forward":
        raise NotImplementedError("only quantized_linear forward is compared with 16-bit weights")
    return jitted(name, linear_reference, [with_wide_weights(case) for case in cases])
