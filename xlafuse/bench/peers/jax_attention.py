"""Attention from JAX: cuDNN's flash attention, and Mosaic GPU kernels of JAX and of `jla`.

JAX's Mosaic kernel (`jax.experimental.pallas.ops.gpu.attention_mgpu`, for Hopper GPUs) takes float16 and has no scale,
so that operands are cast and scaled outside the timing. Its backward pass has no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig
from jax.experimental.pallas.ops.gpu.attention_mgpu import attention as mosaic_attention

from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.cudnn import cudnn_attention
from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers import call_with, jitted
from xlafuse.bench.timing import Candidate

_OPERANDS = ("query", "key", "value")


def attention_candidate(
    name: str, function: Callable[..., jax.Array], operation: str, phase: str, cases: Sequence[Case]
) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results. The backward pass uses the residuals of one forward pass.

    function: maps (query, key, value) and arguments of `pallas_kernels.attention` that the library has to the output.
    """
    if operation != "attention":
        raise NotImplementedError(f"{name} has no {operation}, only attention")

    if phase == "forward":
        return jitted(name, function, [case.arguments for case in cases])

    def pulled(case: Case):
        others = {key: value for key, value in case.arguments.items() if key not in _OPERANDS}

        def forward(*operands):
            return call_with(name, function, {**dict(zip(_OPERANDS, operands, strict=True)), **others})

        run = jax.jit(lambda *operands: jax.vjp(forward, *operands)[1])
        return run(*(case.arguments[key] for key in _OPERANDS))

    call = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    inputs = [(pulled(case), case.cotangents[0]) for case in cases]
    results = call(*inputs[0])
    named = {f"gradient of {key}": result for key, result in zip(_OPERANDS, results, strict=True)}
    return Candidate(name=name, kind="peer", call=call, inputs=inputs), named


def cudnn(query, key, value, *, is_causal=False, window=None, segment_ids=None, bias=None):
    """Runs `pallas_kernels.attention` by cuDNN, with segments as a dense mask."""
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, implementation="cudnn")
    return cudnn_attention(query, key, value, Options(bias=bias, is_causal=is_causal, window=window))


def decode_attention(query, key_cache, value_cache, lengths, *, scale=None):
    """Runs `pallas_kernels.decode_attention` by cuDNN, for one token a sequence."""
    if query.shape[1] != 1:
        raise NotImplementedError("cuDNN's decoding through JAX has one token a sequence")
    return jax.nn.dot_product_attention(
        query,
        key_cache,
        value_cache,
        scale=scale,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def jla(query, key, value, *, is_causal=False, window=None, segment_ids=None):
    """Runs `pallas_kernels.attention` by the Mosaic GPU kernel of jax-linear-attention."""
    from jla.ops.mosaic_gpu.attention import flash_attention  # pyright: ignore[reportMissingImports]

    if not is_causal or query.shape[3] not in (64, 128):
        raise NotImplementedError("jla's attention is causal, for head sizes 64 and 128")
    size = None if window is None or window[0] is None else window[0] + 1
    return flash_attention(query, key, value, segment_ids=segment_ids, sliding_window=size)


_ROWS = 128
"""Queries of a block over both warpgroups; the kernel takes multiples of it."""
_KEYS = {64: 256, 128: 128, 256: 64}
"""Keys of a step by head size: the most that fit in shared memory, as the kernel's own benchmark has them."""


def jax_mosaic(query, key, value, *, is_causal=False, scale=None) -> jax.Array:
    """Runs `pallas_kernels.attention` by JAX's Mosaic kernel, for float16 and queries that are already scaled."""
    del scale  # queries have it
    size, keys = query.shape[3], key.shape[1]
    if size not in _KEYS or query.shape[1] % _ROWS or keys % _KEYS[size]:
        raise NotImplementedError("JAX's attention has head sizes 64, 128 and 256, and whole blocks of tokens")
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    forward = {"block_q": _ROWS // 2, "block_kv": _KEYS[size], "max_concurrent_steps": 2, "causal": is_causal}
    config = TuningConfig(**forward, **blocks, compute_wgs_bwd=2 if size <= 128 else 1)
    return mosaic_attention(query, key, value, config)  # pyright: ignore[reportReturnType]: custom_vjp hides it


def _as_float16(case: Case, scale: float) -> Case:
    cast = {name: case.arguments[name].astype(jnp.float16) for name in ("query", "key", "value")}
    cast["query"] *= scale
    return replace(
        case,
        arguments={**case.arguments, **cast},
        cotangents=jax.tree.map(lambda array: array.astype(jnp.float16), case.cotangents),
    )


_FUNCTIONS = {"cudnn": cudnn, "jax_mosaic": jax_mosaic, "jla": jla}


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if name == "cudnn" and operation == "decode_attention" and phase == "forward":
        return jitted(name, decode_attention, [case.arguments for case in cases])
    if name != "jax_mosaic" or operation != "attention":
        return attention_candidate(name, _FUNCTIONS[name], operation, phase, cases)
    first = plain(cases[0].arguments)
    scale = first.get("scale")
    scale = first["query"].shape[3] ** -0.5 if scale is None else scale
    half = [_as_float16(case, scale) for case in cases]
    found, results = attention_candidate(name, jax_mosaic, operation, phase, half)
    of_query = "gradient of query"
    return found, {key: value * scale if key == of_query else value for key, value in results.items()}
