"""cuDNN's flash attention, as JAX calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.cudnn import cudnn_attention
from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate


def attention(query, key, value, *, is_causal=False, window=None, segment_ids=None, bias=None, **others):
    """See `pallas_kernels.attention`. Segments become a dense mask."""
    unknown = [name for name, wanted in others.items() if name != "dropout_key" and wanted]
    if unknown:
        raise NotImplementedError(f"cuDNN's attention through JAX has no {', '.join(unknown)}")
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, implementation="cudnn")
    return cudnn_attention(query, key, value, bias=bias, is_causal=is_causal, window=window)


def decode_attention(query, key_cache, value_cache, lengths, *, scale=None, **others):
    """See `pallas_kernels.decode_attention`; of one token a sequence."""
    unknown = [name for name, wanted in others.items() if wanted is not None]
    if unknown or query.shape[1] != 1:
        raise NotImplementedError("cuDNN's decoding through JAX has one token a sequence, no window, softcap or pages")
    return jax.nn.dot_product_attention(
        query,
        key_cache,
        value_cache,
        scale=scale,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    if operation == "decode_attention" and phase == "forward":
        call = jax.jit(lambda arguments: (decode_attention(**plain(arguments)),))
        inputs = [(case.arguments,) for case in cases]
        return Candidate(name="cudnn", kind="peer", call=call, inputs=inputs), {"output 0": call(*inputs[0])[0]}
    return attention_candidate("cudnn", attention, operation, phase, cases)
