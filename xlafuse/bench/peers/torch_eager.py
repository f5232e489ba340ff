"""The operation in plain PyTorch, a kernel for each of its functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_kernels.testing import Case
from xlafuse.bench.peers.tensors import backward_candidate, forward_candidate
from xlafuse.bench.peers.torch_functions import get_operation
from xlafuse.bench.timing import Candidate


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, tuple[Any, ...], tuple[str, ...]]:
    """See `xlafuse.bench.peers`."""
    written = get_operation(operation)
    if phase == "forward":
        return *forward_candidate("torch_eager", written.function, cases), ()
    made = backward_candidate("torch_eager", written.function, cases, written.gradients, written.prepare_backward)
    return *made, ()
