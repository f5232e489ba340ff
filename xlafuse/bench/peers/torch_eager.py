"""The operation in plain PyTorch, a kernel for each of its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.testing import Case
from xlafuse.bench.peers.tensors import backward_candidate, forward_candidate, unchanged
from xlafuse.bench.peers.torch_functions import PREPARE, get_function
from xlafuse.bench.timing import Candidate


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    make = forward_candidate if phase == "forward" else backward_candidate
    return make("torch_eager", get_function(operation), cases, PREPARE.get(operation, unchanged))
