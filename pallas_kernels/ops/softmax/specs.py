"""Softmax's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.softmax.api import masking_of, softmax
from pallas_kernels.ops.softmax.config import backward_candidates, forward_candidates
from pallas_kernels.ops.softmax.forms import FORMS, FUSED
from pallas_kernels.ops.softmax.mosaic_gpu import softmax_forward
from pallas_kernels.ops.softmax.mosaic_gpu_vjp import softmax_backward
from pallas_kernels.ops.softmax.reference import softmax_reference
from pallas_kernels.specs import (
    BENCH,
    GPU,
    ArgSpec,
    Arguments,
    ArraySpec,
    Fill,
    OpSpec,
    Traffic,
    array_bytes,
    call_name,
)


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    deviation: float = 2.0,
    mask: tuple[int, ...] | None = None,
    mask_dtype: str = "bool",
    tags: tuple[str, ...] = ("test",),
    **static: Any,
) -> ArgSpec:
    arguments: dict[str, Any] = {"x": ArraySpec(shape=shape, dtype=dtype, fill=fill, deviation=deviation), **static}
    which_mask = None
    if mask is not None:
        mask_fill = "integers" if mask_dtype == "bool" else "normal"
        arguments["mask"] = ArraySpec(shape=mask, dtype=mask_dtype, fill=mask_fill, maximum=2)
        which_mask = f"{mask_dtype}_mask_" + "x".join(map(str, mask))
    which_deviation = deviation > 100 and f"deviation_{deviation:g}"
    others = (f"{key}_{value}" for key, value in static.items())
    name = call_name(shape, dtype, fill != "normal" and fill, which_deviation, which_mask, *others)
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(3, 1024),
    _call(2, 1, 2, 256, scale=0.125),
    _call(2, 512, dtype="float32"),
    _call(2, 256, dtype="float16"),
    _call(256),
    _call(2, 2, 2, 256, mask=(2, 1, 2, 256)),
    _call(2, 2, 2, 256, mask=(2, 1, 256), mask_dtype="float32", scale=0.5),
    _call(4, 256, mask=(4, 1)),
    _call(1, 2, 256, mask=(256,), mask_dtype="bfloat16"),
    _call(2, 3, 256, is_causal=True),
    _call(2, 1000, dtype="float32", is_causal=True, mask=(1000,)),
    _call(2, 1152, tags=("test", "ragged")),
    _call(2, 1000, tags=("test", "ragged")),
    _call(2, 4097, tags=("test", "ragged")),
    _call(4, 127, tags=("test", "ragged")),
    _call(4, 1, dtype="float32", tags=("test", "ragged")),
    _call(2, 20004, tags=("test", "ragged", "long")),
    _call(2, 16384 + 4096, is_causal=True, tags=("test", "long")),
    _call(130, 4, axis=0, tags=("test", "ragged")),
    _call(2, 512, fill="extreme", tags=("test", "extreme")),
    _call(2, 512, fill="extreme", dtype="float32", tags=("test", "extreme")),
    _call(2, 512, fill="zeros", tags=("test", "extreme")),
    _call(2, 512, deviation=1e3, dtype="float32", tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(4, 0, tags=("test", "empty")),
    _call(1000, 4096, tags=GPU),
    _call(333, 8192, tags=GPU),
    _call(300, 16384, tags=GPU),
    _call(517, 4096, dtype="float32", tags=GPU),
    _call(300, 8192, dtype="float32", tags=GPU),
    _call(100, 16384, dtype="float32", tags=GPU),
    _call(1000, 4096, dtype="float16", scale=0.3, tags=GPU),
    _call(2, 4, 1024, 1024, is_causal=True, tags=GPU),
    _call(2, 2, 333, 1000, is_causal=True, dtype="float32", tags=GPU),
    _call(2, 4, 512, 1024, mask=(2, 1, 512, 1024), scale=0.125, tags=GPU),
    _call(2, 4, 512, 1027, mask=(2, 1, 512, 1027), tags=GPU),
    _call(2, 4, 512, 1024, mask=(4, 512, 1024), mask_dtype="bfloat16", tags=GPU),
    _call(2, 300, 4096, mask=(2, 1, 4096), mask_dtype="float32", is_causal=True, tags=GPU),
    _call(2000, 1152, tags=(*GPU, "ragged")),
    _call(1000, 4097, tags=(*GPU, "ragged")),
    _call(64, 65536, tags=(*GPU, "long")),
    _call(40, 65537, dtype="float32", tags=(*GPU, "ragged", "long")),
    _call(2, 20, 20000, mask=(20000,), is_causal=True, tags=(*GPU, "long")),
    _call(8, 262144, tags=(*GPU, "long")),
    _call(32768, 4096, tags=(*BENCH, "block")),
    _call(8192, 8192, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(16384, 16384, tags=BENCH),
    _call(64, 4096, tags=BENCH),
    _call(1, 4096, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    """x and the mask read, the weights written; of a causal x only what is kept, rounded to whole elements."""
    x, mask = arguments["x"], arguments.get("mask")
    size = array_bytes(x)
    read = (_kept_bytes(arguments),) if mask is None else (_kept_bytes(arguments), array_bytes(mask))
    return Traffic(read=read, written=(size,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    kept = _kept_bytes(arguments)
    return Traffic(read=(kept, kept), written=(array_bytes(arguments["x"]),))


def _kept_bytes(arguments: Arguments) -> int:
    x = arguments["x"]
    size = array_bytes(x)
    if not arguments.get("is_causal") or not size:
        return size
    queries, keys = x.shape[-2:]
    kept = sum(min(query + 1, keys) for query in range(queries))
    return size // (queries * keys) * kept


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    x = arguments["x"]
    features, itemsize = x.shape[-1], jnp.dtype(x.dtype).itemsize
    if phase == "backward":
        candidates = backward_candidates(features, itemsize)
        return {name: partial(_backward_variant, config=config) for name, config in candidates.items()}
    candidates = forward_candidates(features)
    variants = {name: partial(_forward_variant, config=config) for name, config in candidates.items()}
    if set(arguments) == {"x"}:
        forms = {name: form for name, form in FORMS.items() if features <= 16384 or name not in FORMS}
        variants |= {f"form: {name}": partial(_form, form=form) for name, form in forms.items() if name != FUSED}
    return variants


def _form(*, x, form):
    return (form(x.reshape(-1, x.shape[-1])).reshape(x.shape),)


def _forward_variant(*, x, config, **arguments):
    masking, mask = masking_of(x, **arguments)
    return (softmax_forward(x.reshape(-1, x.shape[-1]), mask, masking=masking, config=config).reshape(x.shape),)


def _backward_variant(*, x, cotangents, config, **arguments):
    masking, _ = masking_of(x, **arguments)
    # x stands for the saved weights.
    rows = (array.reshape(-1, x.shape[-1]) for array in (x, *cotangents))
    return (softmax_backward(*rows, masking=masking, config=config).reshape(x.shape),)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # x stands for the saved weights: the sums are of other values, the work is the same.
    weights, (dy,) = arguments["x"], cotangents
    static = {key: value for key, value in arguments.items() if key not in ("x", "axis")}
    masking, _ = masking_of(weights, **static)
    if implementation == "mosaic":
        rows = (array.reshape(-1, weights.shape[-1]) for array in (weights, dy))
        return (softmax_backward(*rows, masking=masking).reshape(weights.shape),)
    if implementation == "triton":
        from pallas_kernels.ops.softmax.triton import backward  # imports Triton

        rows = (array.reshape(-1, weights.shape[-1]) for array in (weights, dy))
        return (backward(*rows, scale=1.0 if masking.scale is None else masking.scale).reshape(weights.shape),)
    p, wide = weights.astype(jnp.float32), dy.astype(jnp.float32)
    if masking.queries is not None:
        p = jnp.tril(p)
    # Divided like the kernel's, since x does not sum to one; the sum costs XLA no further read.
    mean = jnp.sum(p * wide, axis=-1, keepdims=True) / jnp.sum(p, axis=-1, keepdims=True)
    dx = p * (wide - mean) * (1.0 if masking.scale is None else masking.scale)
    return (dx.astype(weights.dtype),)


SOFTMAX = OpSpec(
    name="softmax",
    function=softmax,
    reference=softmax_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x",),
    batched=("x",),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
