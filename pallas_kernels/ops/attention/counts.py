"""What a call of attention must read, write and multiply."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.ops.attention.arguments import masking_of, segments_of
from pallas_kernels.ops.attention.calls import DOCUMENTS
from pallas_kernels.specs import Arguments, Traffic, array_bytes


def forward_traffic(arguments: Arguments) -> Traffic:
    """Queries, keys and values read, masks and biases too; the output written."""
    return Traffic(read=_read(arguments), written=(array_bytes(arguments["query"]),))


def backward_traffic(arguments: Arguments) -> Traffic:
    """Queries, keys, values, output and its cotangent read; three gradients written."""
    query, key = array_bytes(arguments["query"]), array_bytes(arguments["key"])
    return Traffic(read=(*_read(arguments), query, query), written=(query, key, key))


def _read(arguments: Arguments) -> tuple[int, ...]:
    names = ("query", "key", "value", "mask", "bias")
    return tuple(array_bytes(arguments[name]) for name in names if arguments.get(name) is not None)


def flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of a phase's products, counting only pairs of query and key that are seen.

    Of segments, where they are described by their shape alone, as the benchmark packs them: `DOCUMENTS` of one length.
    """
    query, keys = arguments["query"], arguments["key"].shape[1]
    batch, queries, heads, size = query.shape
    segments = arguments.get("segment_ids")
    documents = 1
    if segments is not None and not isinstance(segments, jax.Array | np.ndarray | tuple):
        documents = DOCUMENTS
    lengths = (queries // documents, keys // documents)
    masking = masking_of(*lengths, bool(arguments.get("is_causal")), arguments.get("window"), has_segments=False)
    if segments is not None and documents == 1:
        pairs = _segment_pairs(segments, masking)
    else:
        assert masking.pairs is not None  # it has no segments
        pairs = batch * documents * masking.pairs
    return (4 if phase == "forward" else 10) * heads * size * pairs


def _segment_pairs(segments: Any, masking: Any) -> int:
    own, other = (np.asarray(array) for array in segments_of(segments))
    column = np.arange(masking.keys)
    pairs = 0
    for mine, theirs in zip(own, other, strict=True):
        for row, segment in enumerate(mine):
            pairs += int((np.asarray(masking.visible(row, column)) & (theirs == segment)).sum())
    return pairs
