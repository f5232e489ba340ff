"""The transformer block in JAX, operation by operation, without `jax.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from hlo_analysis.capture.lowering import gradient
from xlafuse.bench.timing import Candidate
from xlafuse.models import BlockConfig, block_function


def candidate(
    name: str, config: BlockConfig, mode: str, cases: Sequence[tuple[Any, ...]]
) -> tuple[Candidate, list[jax.Array]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers.torch_block.candidate`."""
    x = cases[0][1]
    function, abstract = block_function(config, (x.shape[0], x.shape[1]))
    if mode == "grad":
        function, _ = gradient(function, abstract)

    def call(*case):
        with jax.disable_jit():
            return function(*case)

    results = jax.block_until_ready(jax.tree.leaves(call(*cases[0])))
    return Candidate(name=name, kind="peer", call=call, inputs=cases), results
