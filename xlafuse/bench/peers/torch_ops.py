"""The operations in plain PyTorch: run eagerly, or compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch._dynamo  # pyright: ignore[reportMissingImports]
import torch._functorch.config  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers.tensors import backward_candidate, forward_candidate, unchanged
from xlafuse.bench.peers.torch_functions import PREPARE, get_function
from xlafuse.bench.timing import Candidate


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    function, prepare = get_function(operation), PREPARE.get(operation, unchanged)
    if name == "torch_compile":
        # Makes shapes compile-time constants, as in XLA; a second shape of the same function would become dynamic.
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False, fullgraph=True)
    if phase == "forward":
        return forward_candidate(name, function, cases, prepare)
    # The graph of one forward pass runs backward many times, so that its buffers must not be donated.
    with torch._functorch.config.patch(donated_buffer=False):
        return backward_candidate(name, function, cases, prepare)
