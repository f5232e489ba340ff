"""cuDNN's attention with a window as a dense mask, which is how a library without windows has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.testing import Case
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate


def attention(query, key, value, *, is_causal=False, window=None, **others):
    """See `pallas_kernels.attention`. The mask is made in the call, once for all heads."""
    unknown = [name for name, wanted in others.items() if name != "dropout_key" and wanted is not None]
    if unknown or window is None:
        raise NotImplementedError("only windows are compared with a dense mask here; for segments the peer cudnn is")
    left, right = (window, window) if isinstance(window, int) else window
    ahead = jnp.arange(key.shape[1])[None] - jnp.arange(query.shape[1])[:, None]
    mask = jnp.ones(ahead.shape, bool)
    if left is not None:
        mask &= ahead >= -left
    right = 0 if is_causal else right
    if right is not None:
        mask &= ahead <= right
    return jax.nn.dot_product_attention(query, key, value, mask=mask[None, None], implementation="cudnn")


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    if phase != "forward":
        raise NotImplementedError("the bar on dense masks is on the forward pass")
    return attention_candidate("cudnn_dense_mask", attention, operation, phase, cases)
