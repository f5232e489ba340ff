"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_bias, check_operands, check_weight, vector_unsupported
from pallas_kernels.ops._products.norm import after_norm, as_rows, check_norm, norm_unsupported, normalised
from pallas_kernels.ops._products.rings import choose_in_place
from pallas_kernels.ops.qkv_projection.config import HeadForm, chosen_config
from pallas_kernels.ops.qkv_projection.mosaic_gpu import qkv_projection_forward, qkv_projection_mosaic
from pallas_kernels.ops.qkv_projection.mosaic_gpu_vjp import Operands
from pallas_kernels.ops.qkv_projection.reference import qkv_projection_reference
from pallas_kernels.ops.rope.heads_kernel import HeadNorm
from pallas_kernels.ops.rope.tables import check_tables, row_tables
from pallas_kernels.primitives.checks import as_arrays, positive_number, static_integer
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.gemm.row_blocks import RowBlock
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.row_tiles import HEAD_SIZES

_BIASES = ("the bias of w_q", "the bias of w_k", "the bias of w_v")


def _dimensions(arguments: Mapping[str, Any]) -> str:
    """With heads, devices have whole ones, those of keys with their queries'."""
    is_apart = arguments["head_size"] is not None
    query, key = ("(g r c)", "(g c)") if is_apart else ("(g r)", "g")
    results = "... (g r) !c, ... g c, ... g c" if is_apart else "... (g r), ... g, ... g"
    weights = f"w_q: k {query}, w_k: k {key}, w_v: k {key}, bias.0: {query}, bias.1: {key}, bias.2: {key}"
    tables = ", ".join(f"rope.{name}: {_table_dimensions(arguments, name)}" for name in ("cos", "sin"))
    norms = "norm.scale: !e, norm.bias: e, norm.mean_square: ..., q_norm.scale: c, k_norm.scale: c"
    return f"x: ... k, {weights}, {norms}, rope.positions: ..., {tables} -> {results}"


def _table_dimensions(arguments: Mapping[str, Any], name: str) -> str:
    table = None if arguments["rope"] is None else getattr(arguments["rope"], name)
    has_heads = table is not None and table.ndim == arguments["x"].ndim + 1
    return "... u !t" if has_heads else "... !t"


def _in_place(arguments: Mapping[str, Any], written: RowBlock) -> tuple[jax.Array, ...]:
    """Computes the projections of one block of rows."""
    x, w_q, w_k, w_v, norm, rope, head_size = (
        arguments[name] for name in ("x", "w_q", "w_k", "w_v", "norm", "rope", "head_size")
    )
    head_norms, biases = (arguments["q_norm"], arguments["k_norm"]), _biases(arguments["bias"])
    support = partial(mosaic_unsupported, x, (w_q, w_k, w_v), biases, head_size, norm, rope, head_norms)
    choose_in_place("qkv_projection", arguments["implementation"], x, written, support)
    if head_norms != (None, None):
        raise NotImplementedError("qkv_projection normalises heads in a launch of its own, which writes matrices.")
    given = Operands(
        x=normalised(norm, as_rows(x)), weights=(w_q, w_k, w_v), biases=biases or (None,) * 3, head_scales=(None, None)
    )
    tables = None if rope is None else _tables(rope, x, head_size)
    form = HeadForm(size=head_size, is_rotated=rope is not None)
    return qkv_projection_forward(form, given, tables, written=written)[0]


@operation(_dimensions, in_place=_in_place)
def qkv_projection(
    x: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    *,
    bias: Sequence[jax.Array] | None = None,
    head_size: int | None = None,
    norm: Norm | None = None,
    rope: Rope | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects a normalised input to query, key and value, with optional norms and rotary embedding of the heads.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        n = norm(x)
        q, k, v = n @ w_q + b_q, n @ w_k + b_k, n @ w_v + b_v
        q, k = q_norm(q), k_norm(k)         # over each head
        q, k = rope(q, k, positions)

    One launch computes the products, adds the biases and rotates heads, and reads n once. If heads are normalised, a
    second launch normalises and rotates them, from products rounded to x's dtype. The norm of x is a launch before,
    with two exceptions: a norm without a scale whose mean squares are given (see `Norm`) needs no launch, and with few
    bfloat16 rows the configuration may fuse the norm into the product's launch, which then rounds x times the norm's
    scale to x's dtype instead of n. "xla" rounds n, the products with their biases and the normalised heads to x's
    dtype.

    The backward pass needs x, the weights and, if heads are normalised, the products of query and key. It is one launch
    for the heads, XLA's products for the weights, and one launch for x where it is estimated to be faster.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w_q: (features, query heads * head size), of x's dtype.
        w_k, w_v: (features, key heads * head size), of x's dtype.
        bias: the three biases of query, key and value, (outputs,) each, any floating dtype (at most float32 with
            "mosaic"); or None.
        head_size: columns of a head; needed for rope, q_norm and k_norm. With it, results have a heads axis.
        norm: the norm of x, or None.
        rope: the rotary embedding of query and key heads, or None. Its positions must fit into int32. XLA computes the
            gradients of a call whose tables are differentiated.
        q_norm, k_norm: the norm of each query and key head, of kind "rms", with a scale (head_size,) or None; or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, at least 128 each. With rope or head norms, heads must have 64, 128 or 256 columns, and
            rope must not be interleaved.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        (q, k, v), of x's dtype: (..., outputs) each, or (..., heads, head_size) with `head_size`.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: rotation as in Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864; norms of heads as in Dehghani
    et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023, https://arxiv.org/abs/2302.05442; division
    after the product as in Graef et al., "FlashNorm", 2024, https://arxiv.org/abs/2407.09577
    """
    x, *weights = as_arrays("qkv_projection", x=x, w_q=w_q, w_k=w_k, w_v=w_v)
    weights = tuple(weights)
    biases = _biases(bias)
    head_size = None if head_size is None else static_integer("qkv_projection", "head_size", head_size)
    _check(x, weights, biases, head_size, norm, rope, {"q_norm": q_norm, "k_norm": k_norm})
    support = {
        "mosaic": partial(mosaic_unsupported, x, weights, biases, head_size, norm, rope, (q_norm, k_norm)),
        "xla": lambda: None,
    }
    # On an H200, 4096 features, 32 and 8 heads of 128, with norm and rotation: 1.22 times as fast as XLA at 8192 rows,
    # 1.60 at 512, 1.54 at 16. 1024 features, 8 and 2 heads of 128: 1.59 times at 64.
    chosen = choose("qkv_projection", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0 or any(w.size == 0 for w in weights):
        return qkv_projection_reference(
            x, *weights, bias=biases, head_size=head_size, norm=norm, rope=rope, q_norm=q_norm, k_norm=k_norm
        )
    tables = None if rope is None or head_size is None else _tables(rope, x, head_size)
    head_scales = tuple(None if n is None or n.scale is None else jnp.asarray(n.scale) for n in (q_norm, k_norm))
    given = Operands(x=as_rows(x), weights=weights, biases=biases or (None,) * 3, head_scales=head_scales)
    given, norm, tables = varying_alike((given, norm, tables))
    form = HeadForm(
        size=head_size,
        is_rotated=rope is not None,
        norms=(_head_norm(q_norm), _head_norm(k_norm)),
    )
    config = chosen_config(given.x, weights, form)

    def differentiable(x, given, tables):
        return qkv_projection_mosaic(form, replace(given, x=x), tables)

    def forward(x, norm, given, tables):
        return qkv_projection_forward(form, replace(given, x=x), tables, norm=norm, config=config)[0]

    results = after_norm(differentiable, forward, norm, given.x, replace(given, x=None), tables)
    shapes = [(y.shape[1],) if head_size is None else (y.shape[1] // head_size, head_size) for y in results]
    q, k, v = (y.reshape(*x.shape[:-1], *shape) for y, shape in zip(results, shapes, strict=True))
    return q, k, v


def mosaic_unsupported(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...] | None,
    head_size: int | None,
    norm: Norm | None,
    rope: Rope | None,
    head_norms: tuple[Norm | None, Norm | None],
) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    reason = operands_unsupported(x, *weights) or norm_unsupported(norm, x)
    if reason:
        return reason
    scales = [norm.scale for norm in head_norms if norm is not None and norm.scale is not None]
    for name, arrays in (("bias", biases or ()), ("a head norm's scale", scales)):
        for array in arrays:
            if reason := vector_unsupported(name, array):
                return reason
    if rope is not None and rope.interleaved:
        return "pairs of neighbours are in the same place of different registers; the kernel rotates halves"
    has_heads = rope is not None or any(norm is not None for norm in head_norms)
    if has_heads and head_size not in HEAD_SIZES:
        return f"heads are {head_size} wide; the kernel norms and rotates heads of {', '.join(map(str, HEAD_SIZES))}"
    return mosaic_gpu_unsupported()


def _head_norm(norm: Norm | None) -> HeadNorm | None:
    if norm is None:
        return None
    return HeadNorm(epsilon=float(norm.epsilon), rounds_before_scale=norm.rounds_before_scale)


def _tables(rope: Rope, x: jax.Array, head_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of x's rows, (rows, head_size or half of that) float32 each."""
    positions, cos, sin = (None if each is None else jnp.asarray(each) for each in (rope.positions, rope.cos, rope.sin))
    tables = row_tables(positions, cos, sin, x.shape[:-1], size=head_size, theta=float(rope.theta))
    return tables[0].astype(jnp.float32), tables[1].astype(jnp.float32)


def _check(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...] | None,
    head_size: int | None,
    norm: Norm | None,
    rope: Rope | None,
    head_norms: Mapping[str, Norm | None],
) -> None:
    _check_arrays(x, weights, biases)
    check_norm("qkv_projection", norm, x)
    if head_size is None:
        given = [name for name, value in {"rope": rope, **head_norms}.items() if value is not None]
        if given:
            raise ValueError(f"qkv_projection: {' and '.join(given)} need head_size=, the columns of a head.")
        return
    for name, w in zip(("w_q", "w_k", "w_v"), weights, strict=True):
        if head_size < 1 or w.shape[1] % head_size:
            raise ValueError(f"qkv_projection: {name} {w.shape} must have whole heads of {head_size} columns.")
    for name, head_norm in head_norms.items():
        if head_norm is None:
            continue
        check_norm(f"qkv_projection: {name}", head_norm, jax.ShapeDtypeStruct((head_size,), x.dtype))
        if head_norm.kind != "rms" or head_norm.mean_square is not None:
            raise ValueError(f"qkv_projection: {name} must be of kind 'rms', without mean squares, got {head_norm}.")
    if rope is None:
        return
    if not isinstance(rope, Rope):
        raise TypeError(f"qkv_projection: rope must be a pallas_kernels.Rope or None, got {type(rope).__name__}.")
    if head_size % 2:
        raise ValueError(f"qkv_projection: pairs need an even head_size, got {head_size}.")
    positive_number("qkv_projection", "the rope's theta", rope.theta)
    if (rope.cos is None) != (rope.sin is None) or (rope.positions is None) != (rope.cos is not None):
        raise TypeError(f"qkv_projection: rope must have positions, or both cos and sin, got {rope}.")
    if rope.positions is None:
        cos, sin = as_arrays("qkv_projection", cos=rope.cos, sin=rope.sin)
        check_tables("qkv_projection", cos, sin, x.shape[:-1], head_size)
        return
    (positions,) = as_arrays("qkv_projection", positions=rope.positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"qkv_projection: positions must be integers, got {positions.dtype.name}.")
    tail = x.shape[:-1][len(x.shape[:-1]) - positions.ndim :] if positions.ndim < x.ndim else None
    if tail is None or any(have not in (1, want) for have, want in zip(positions.shape, tail, strict=True)):
        raise ValueError(
            f"qkv_projection: positions must be one a row of x, {x.shape[:-1]}, or broadcast to that, got "
            f"{positions.shape}."
        )


def _biases(bias: Sequence[jax.Array] | None) -> tuple[jax.Array, ...] | None:
    if bias is None:
        return None
    try:
        count = len(bias)
    except TypeError as error:
        name = type(bias).__name__
        raise TypeError(f"qkv_projection: bias must be three arrays, of query, key and value; got {name}.") from error
    if count != 3:
        raise ValueError(f"qkv_projection: bias must be three arrays, of query, key and value; got {count}.")
    return as_arrays("qkv_projection", **dict(zip(_BIASES, bias, strict=True)))


def _check_arrays(x: jax.Array, weights: tuple[jax.Array, ...], biases: tuple[jax.Array, ...] | None) -> None:
    named = dict(zip(("w_q", "w_k", "w_v"), weights, strict=True))
    check_operands("qkv_projection", x=x, **named)
    for name, w in named.items():
        check_weight("qkv_projection", name, w.shape, x)
    if biases is None:
        return
    for name, w, bias in zip(_BIASES, weights, biases, strict=True):
        check_bias("qkv_projection", bias, w.shape[1], name=name)
