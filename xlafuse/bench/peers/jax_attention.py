"""Attention by other JAX libraries: what their peers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.timing import Candidate

_OPERANDS = ("query", "key", "value")


def attention_candidate(
    name: str, function: Callable[..., jax.Array], operation: str, phase: str, cases: Sequence[Case]
) -> tuple[Candidate, Mapping[str, Any]]:
    """Something to time, and its first results. The backward pass starts from what one forward pass left.

    function: from (query, key, value) and the other arguments of `pallas_kernels.attention` to the output; raises
        NotImplementedError where the library cannot.
    """
    if operation != "attention":
        raise NotImplementedError(f"{name} has no {operation}, only attention")

    def forward(arguments):
        return (function(**plain(arguments)),)

    if phase == "forward":
        call, inputs = jax.jit(forward), [(case.arguments,) for case in cases]
        (result,) = call(*inputs[0])
        return Candidate(name=name, kind="peer", call=call, inputs=inputs), {"output 0": result}

    def pulled(case: Case):
        others = {key: value for key, value in case.arguments.items() if key not in _OPERANDS}

        @jax.jit
        def run(*operands):
            return jax.vjp(lambda *own: forward({**dict(zip(_OPERANDS, own, strict=True)), **others})[0], *operands)[1]

        return run(*(case.arguments[key] for key in _OPERANDS))

    call = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    inputs = [(pulled(case), case.cotangents[0]) for case in cases]
    results = call(*inputs[0])
    named = {f"gradient of {key}": result for key, result in zip(_OPERANDS, results, strict=True)}
    return Candidate(name=name, kind="peer", call=call, inputs=inputs), named
