"""The Mosaic GPU attention kernels of jax-linear-attention (`jla`): causal, with windows and segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jla.ops.mosaic_gpu.attention import flash_attention  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate


def attention(query, key, value, *, is_causal=False, window=None, segment_ids=None, **others):
    """See `pallas_kernels.attention`."""
    unknown = [name for name, wanted in others.items() if name != "dropout_key" and wanted]
    if unknown or not is_causal or query.shape[3] not in (64, 128):
        raise NotImplementedError("jla's attention is causal, for head sizes 64 and 128, without bias or dropout")
    left = None if window is None else window[0]
    size = None if left is None else left + 1
    return flash_attention(query, key, value, segment_ids=segment_ids, sliding_window=size)


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    return attention_candidate("jla", attention, operation, phase, cases)
