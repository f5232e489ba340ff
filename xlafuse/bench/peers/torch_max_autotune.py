"""torch.compile with autotuning: Inductor's best, at many seconds a shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.testing import Case
from xlafuse.bench.peers import torch_compile
from xlafuse.bench.timing import Candidate


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    mode = "max-autotune-no-cudagraphs"
    return torch_compile.candidate(operation, phase, cases, name="torch_max_autotune", mode=mode)
