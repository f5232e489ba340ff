"""The projections' registry entry: how they are called in tests and benchmarks, their traffic, and the variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.ops._products.norm import as_rows, prologue, row_norm
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    Part,
    gradients_of,
    norm_arguments,
    product_bytes,
    product_call,
    product_flops,
    rows_of,
    weight,
    with_norm,
)
from pallas_kernels.ops.qkv_projection.api import qkv_projection
from pallas_kernels.ops.qkv_projection.config import candidates, problem
from pallas_kernels.ops.qkv_projection.mosaic_gpu import HeadForm, can_fuse_norm_of, qkv_projection_forward
from pallas_kernels.ops.qkv_projection.reference import qkv_projection_reference
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic

_WEIGHTS = ("w_q", "w_k", "w_v")
_VECTORS = (*NORM_ARRAYS, "b_q", "b_k", "b_v", "q_scale", "k_scale")


def _call(
    *leading: int,
    features: int,
    heads: tuple[int, int],
    head_size: int,
    dtype: str = "bfloat16",
    norm: str | None = "rms",
    scaled: bool = True,
    mean_square: bool = False,
    rope: bool = True,
    head_norms: bool = False,
    biases: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    q, k = (count * head_size for count in heads)
    x = ArraySpec(shape=(*leading, features), dtype=dtype)
    vector = partial(ArraySpec, dtype=dtype)
    columns = dict(zip(_WEIGHTS, (q, k, k), strict=True))
    weights = {name: weight(features, outputs, dtype) for name, outputs in columns.items()}
    bias = {f"b_{name[-1]}": vector(shape=(outputs,)) for name, outputs in columns.items()}
    head_scale = vector(shape=(head_size,), mean=1.0, deviation=0.2)
    positions = ArraySpec(shape=leading, dtype="int32", fill="integers", maximum=1000)
    nothing: Part = ({}, "")
    return product_call(
        f"{features}-{heads[0]}+{heads[1]}x{head_size}",
        {"x": x, **weights},
        norm_arguments(norm, x, scaled=scaled, mean_square=mean_square),
        (bias, "bias") if biases else nothing,
        ({"q_scale": head_scale, "k_scale": head_scale}, "head_norms") if head_norms else nothing,
        ({"positions": positions}, "rope") if rope else nothing,
        ({"head_size": head_size}, ""),
        tags=tags,
    )


_LLAMA = partial(_call, features=4096, heads=(32, 8), head_size=128)

_ARG_SPECS = (
    _call(2, 3, features=128, heads=(2, 1), head_size=128),
    _call(2, features=128, heads=(2, 2), head_size=64, dtype="float16", head_norms=True, biases=True),
    _call(2, features=128, heads=(2, 2), head_size=64, norm="layer", rope=False, biases=True),
    _call(40, features=128, heads=(2, 2), head_size=64, scaled=False, mean_square=True, rope=False),
    _call(2, features=128, heads=(3, 1), head_size=80, dtype="float32", tags=("test", "ragged")),
    _call(0, features=128, heads=(2, 2), head_size=64, tags=("test", "empty")),
    _call(1000, features=2048, heads=(16, 4), head_size=128, tags=GPU),
    _call(777, features=1024, heads=(16, 16), head_size=64, norm="layer", rope=False, biases=True, tags=GPU),
    _call(2, 300, features=1024, heads=(6, 2), head_size=256, dtype="float16", tags=GPU),
    _call(520, features=1024, heads=(8, 2), head_size=128, head_norms=True, biases=True, tags=GPU),
    _call(600, features=1024, heads=(12, 4), head_size=64, scaled=False, mean_square=True, tags=GPU),
    _call(17, features=1024, heads=(16, 4), head_size=128, tags=GPU),
    _call(3, features=256, heads=(3, 1), head_size=128, tags=GPU),
    _call(13, features=512, heads=(3, 1), head_size=128, biases=True, tags=GPU),
    *(_LLAMA(rows, tags=(*BENCH, "block")) for rows in (8192, 512, 16, 1)),
    *(_LLAMA(rows, scaled=False, mean_square=True, tags=BENCH) for rows in (8192, 512)),
)


def as_called(
    *,
    positions=None,
    theta=500_000.0,
    q_scale=None,
    k_scale=None,
    b_q=None,
    b_k=None,
    b_v=None,
    **arguments,
) -> dict[str, Any]:
    """The arguments of an `ArgSpec`, each an array or static, as `qkv_projection` takes them."""
    arguments = with_norm(arguments)
    if positions is not None:
        arguments["rope"] = Rope(positions, theta)
    if q_scale is not None:
        arguments |= {"q_norm": Norm(q_scale), "k_norm": Norm(k_scale)}
    if b_q is not None:
        arguments["bias"] = (b_q, b_k, b_v)
    return arguments


def _function(*, implementation=None, **arguments):
    return qkv_projection(**as_called(**arguments), implementation=implementation)


def _reference(**arguments):
    return qkv_projection_reference(**as_called(**arguments))


def _forward_traffic(arguments: Arguments) -> Traffic:
    read, written = product_bytes(arguments, *_WEIGHTS)
    return Traffic(read=tuple(read), written=tuple(written))


def _backward_traffic(arguments: Arguments) -> Traffic:
    read, written = product_bytes(arguments, *_WEIGHTS)
    return Traffic(read=(*read, *written), written=tuple(read))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":
        return {}
    called = as_called(**arguments)
    found = candidates(rows_of(arguments), head_size=called["head_size"])
    return {
        name: partial(_forward_variant, config=config)
        for name, config in found.items()
        if can_fuse_norm_of(config, called.get("norm"), called["x"], _form(called))
        == getattr(config, "fuses_norm", False)
    }


def _form(called: Mapping[str, Any]) -> HeadForm:
    rope = called.get("rope")
    return HeadForm(
        size=called["head_size"],
        theta=None if rope is None else rope.theta,
        epsilons=tuple(None if norm is None else norm.epsilon for norm in (called.get("q_norm"), called.get("k_norm"))),
    )


def _forward_variant(*, config, **arguments):
    called = as_called(**arguments)
    x, norm, rope, form = called["x"], called.get("norm"), called.get("rope"), _form(called)
    normed, row_scale = as_rows(x), None
    inside = None
    if norm is not None and can_fuse_norm_of(config, norm, normed, form):
        inside = row_norm(norm)
    else:
        normed, row_scale = prologue(norm, normed)
    results = qkv_projection_forward(
        normed,
        [called[name] for name in _WEIGHTS],
        form=form,
        row_scale=row_scale,
        norm=inside,
        biases=called.get("bias", (None,) * 3),
        head_scales=tuple(None if n is None else n.scale for n in (called.get("q_norm"), called.get("k_norm"))),
        positions=None if rope is None else rope.positions.reshape(-1),
        config=config,
    )
    return tuple(y.reshape(*x.shape[:-1], -1, called["head_size"]) for y in results)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return gradients_of(QKV_PROJECTION, implementation, arguments, cotangents)


def _problem(arguments: Arguments) -> Mapping[str, int | str]:
    called = as_called(**arguments)
    weights, is_rotated = [called[name] for name in _WEIGHTS], called.get("rope") is not None
    return problem(called["x"], weights, head_size=called["head_size"], is_rotated=is_rotated)


QKV_PROJECTION = OpSpec(
    name="qkv_projection",
    function=_function,
    reference=_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", *_WEIGHTS, *_VECTORS),
    batched=("x", "mean_square"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    problem=_problem,
    flops=partial(product_flops, weights=_WEIGHTS),
)
