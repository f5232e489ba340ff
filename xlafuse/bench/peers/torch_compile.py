"""torch.compile of the operation in plain PyTorch, with Inductor's default options."""

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


def candidate(
    operation: str, phase: str, cases: Sequence[Case], *, name: str = "torch_compile", mode: str = "default"
) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`. mode: one of torch.compile's."""
    function = get_function(operation)
    # Shapes are constants, as in XLA: a second shape of the same function would otherwise become a dynamic one.
    torch._dynamo.reset()
    compiled = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
    prepare = PREPARE.get(operation, unchanged)
    if phase == "forward":
        return forward_candidate(name, compiled, cases, prepare)
    # The graph of one forward pass is run backward again and again, so that its buffers must not be given away.
    with torch._functorch.config.patch(donated_buffer=False):
        return backward_candidate(name, compiled, cases, prepare)
