"""The registry entry of the query, key and value projections."""

from __future__ import annotations

from functools import partial
from typing import Any

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    norm_arguments,
    product_call,
    product_flops,
    result_bytes,
    weight,
    with_norm,
)
from pallas_kernels.ops.qkv_projection.api import qkv_projection
from pallas_kernels.ops.qkv_projection.reference import qkv_projection_reference
from pallas_kernels.spec_builders import as_taken, both_passes, traffic
from pallas_kernels.specs import Arguments, ArraySpec, OpSpec

_WEIGHTS = ("w_q", "w_k", "w_v")
_BIASES = ("b_q", "b_k", "b_v")
_SCALES = ("q_scale", "k_scale")
_THETA = 500_000.0


@product_call
def _call(x, *, heads, head_size, norm="rms", rope=True, head_norms=False, biases=False, **which):
    columns = [count * head_size for count in (heads[0], heads[1], heads[1])]
    weights = [weight(x, outputs) for outputs in columns]
    bias = [ArraySpec(shape=(outputs,), dtype=x.dtype) for outputs in columns]
    head_scale = ArraySpec(shape=(head_size,), dtype=x.dtype, mean=1.0, deviation=0.2)
    angles = {"positions": ArraySpec(shape=x.shape[:-1], dtype="int32", fill="integers", maximum=1000)}
    tables = dict.fromkeys(("cos", "sin"), ArraySpec(shape=(*x.shape[:-1], head_size), dtype="float32"))
    nothing = ({}, "")
    return (
        f"{heads[0]}+{heads[1]}x{head_size}",
        {"x": x, **dict(zip(_WEIGHTS, weights, strict=True))},
        norm_arguments(x, norm, **which),
        (dict(zip(_BIASES, bias, strict=True)), "bias") if biases else nothing,
        (dict.fromkeys(_SCALES, head_scale), "head_norms") if head_norms else nothing,
        (tables, "tables") if rope == "tables" else (angles, "rope") if rope else nothing,
        ({"head_size": head_size}, ""),
    )


_LLAMA = partial(_call, features=4096, heads=(32, 8), head_size=128)


def _as_called(arguments: Arguments) -> dict[str, Any]:
    """Converts the arguments of an `ArgSpec`, each an array or static, to those of `qkv_projection`."""
    called = with_norm(arguments)
    theta, positions = called.pop("theta", _THETA), called.pop("positions", None)
    q_scale, k_scale = (called.pop(name, None) for name in _SCALES)
    bias = tuple(called.pop(name, None) for name in _BIASES)
    cos, sin = (called.pop(name, None) for name in ("cos", "sin"))
    if positions is not None or cos is not None:
        called["rope"] = Rope(positions, theta, cos=cos, sin=sin)
    if q_scale is not None:
        rounds = arguments.get("norm_rounds", False)
        called |= {"q_norm": Norm(q_scale, rounds_before_scale=rounds), "k_norm": Norm(k_scale)}
    return called if bias[0] is None else {**called, "bias": bias}


_DIFFERENTIABLE = ("x", *_WEIGHTS, *NORM_ARRAYS, *_BIASES, *_SCALES)
_FUNCTION = as_taken(qkv_projection, _as_called)
_RESULTS = {name: result_bytes(weight) for name, weight in zip("qkv", _WEIGHTS, strict=True)}

QKV_PROJECTION = OpSpec(
    name="qkv_projection",
    function=_FUNCTION,
    reference=as_taken(qkv_projection_reference, _as_called),
    differentiable=_DIFFERENTIABLE,
    batched=("x", "mean_square"),
    arg_specs=(
        _call(2, 3, features=128, heads=(2, 1), head_size=128),
        _call(2, features=128, heads=(2, 2), head_size=64, dtype="float16", head_norms=True, biases=True),
        _call(2, features=128, heads=(2, 2), head_size=64, norm="layer", rope=False, biases=True),
        _call(3, features=128, heads=(3, 1), head_size=128, head_norms=True),
        _call(2, features=128, heads=(2, 1), head_size=128, head_norms=True, rope=False, rounds=True),
        _call(40, features=128, heads=(2, 2), head_size=64, scaled=False, mean_square=True, rope=False),
        _call(20, features=128, heads=(2, 1), head_size=128, rope="tables", biases=True),
        _call(2, features=128, heads=(3, 1), head_size=80, dtype="float32", tags="test ragged"),
        _call(0, features=128, heads=(2, 2), head_size=64, tags="test empty"),
        _call(1000, features=2048, heads=(16, 4), head_size=128, biases=True, tags="gpu"),
        _call(1000, features=2048, heads=(16, 4), head_size=128, biases=True, rope="tables", tags="gpu"),
        _call(777, features=1024, heads=(16, 16), head_size=64, norm="layer", rope=False, biases=True, tags="gpu"),
        _call(2, 300, features=1024, heads=(6, 2), head_size=256, dtype="float16", tags="gpu"),
        _call(520, features=1024, heads=(8, 2), head_size=128, head_norms=True, biases=True, tags="gpu"),
        _call(519, features=1024, heads=(5, 3), head_size=64, head_norms=True, tags="gpu"),
        _call(519, features=1024, heads=(5, 3), head_size=64, head_norms=True, rounds=True, tags="gpu"),
        _call(1030, features=1024, heads=(16, 8), head_size=128, head_norms=True, tags="gpu"),
        _call(600, features=1024, heads=(12, 4), head_size=64, scaled=False, mean_square=True, tags="gpu"),
        _call(17, features=1024, heads=(16, 4), head_size=128, tags="gpu"),
        _call(3, features=256, heads=(3, 1), head_size=128, tags="gpu"),
        _call(13, features=5120, heads=(3, 1), head_size=128, biases=True, tags="gpu"),
        *(_LLAMA(rows, tags="gpu bench block") for rows in (8192, 512, 16, 1)),
        *(_LLAMA(rows, rope="tables", tags="gpu bench") for rows in (8192, 16)),
        *(_LLAMA(rows, scaled=False, mean_square=True, tags="gpu bench") for rows in (8192, 512)),
    ),
    forward_traffic=traffic(read=("x", *_WEIGHTS), written="qkv", **_RESULTS),
    backward_traffic=traffic(read=("x", *_WEIGHTS, *"qkv"), written=("x", *_WEIGHTS), **_RESULTS),
    backward=both_passes(_FUNCTION, *_DIFFERENTIABLE),
    flops=partial(product_flops, weights=_WEIGHTS),
)
