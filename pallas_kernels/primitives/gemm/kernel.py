"""The matrix product: persistent blocks, one warpgroup that brings operands by TMA, others that compute.

A block takes tiles of the result in an order that keeps operands in the L2 cache. Its producer runs ahead of the
computing warpgroups by as many steps as there are stages, across tiles too, so that the next tile's operands come while
the last one's results leave. Edges need no care: TMA brings zeros from outside an array and stores nothing there.

Several products can be made at once: each step brings a tile of every operand, and `products` says which two are
multiplied into which accumulator: ((0, 0, 0),) is a @ b; ((0, 0, 0), (0, 1, 1)) is a @ b and a @ c with a read once;
((0, 0, 0), (1, 1, 0)) is a @ c + b @ d. Or right operands of any widths lie beside each other along n, and each tile
of the results' common row belongs to one of them: a @ b, a @ c and a @ d with a read once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.choice import FEW_ROWS
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.heads import Beside
from pallas_kernels.primitives.gemm.launch import launcher, sharing_of
from pallas_kernels.primitives.gemm.mainloop import Ring, compute, produce, ring_types
from pallas_kernels.primitives.gemm.operands import padded_rows, padded_vector, whole_groups
from pallas_kernels.primitives.gemm.problem import ONE, Problem, Product
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.gemm.sharing import Sums, apart
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import varying_like

_MOST_ADDED = 64
"""Lines of sums of squares that are added one by one: one launch less, 1.2 µs of 83 on an H200 with 32 lines."""


def gemm(
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    *,
    products: tuple[Product, ...] = ONE,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogue | None = None,
    beside: Sequence[Beside] = (),
    angles: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    row_squares: bool = False,
    out_dtype: jnp.dtype | None = None,
    config: GemmConfig | None = None,
    name: str = "gemm",
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results, each (M, N); the first in `out_dtype`, kept products in the operands' dtype.

    Args:
        a: left operands, each (M, K), or (K, M) with `transpose_a`; bfloat16 or float16. Rows as they lie in memory
            must be multiples of 16 bytes.
        b: right operands, each (K, N), or (N, K) with `transpose_b`, of the same dtype.
        products: what is multiplied into which accumulator.
        beside: one for each of `b`, which then lie beside each other and each have a result; with one left operand, and
            without epilogue, bias and residual.
        angles: cosines and sines, (M, half of a head's columns) float32 each, where heads are rotated.
        bias: (N,), any floating dtype.
        row_scale: (M,) float32; multiplies the rows of every product.
        residual: (M, N) of out_dtype; added to the first result.
        row_squares: whether the sums over each row of the first result's squares, (M,) float32, are a result too, the
            last one. Of the result as it is rounded.
        config: the cut; stages are reduced to those that fit.
        name: of the kernel, for traces.
    """
    epilogue = epilogue or Epilogue()
    if beside and (len(a) > 1 or len(beside) != len(b) or bias is not None or residual is not None):
        raise ValueError("gemm: right operands beside each other take one left one, no common bias and no residual.")
    rows = a[0].shape[1 if transpose_a else 0]
    a = [whole_groups(array) for array in a]
    b = [array if transpose_b else whole_groups(array) for array in b]
    residual = None if residual is None else whole_groups(residual)
    dtype = a[0].dtype
    out_dtype = jnp.dtype(out_dtype or dtype)
    m, k = a[0].shape[::-1] if transpose_a else a[0].shape
    widths = tuple(array.shape[0 if transpose_b else 1] for array in b)
    accumulators = 1 + max(product[2] for product in products)
    count = epilogue.outputs(accumulators)
    kept = accumulators if epilogue.keeps_products else 0
    dtypes = [out_dtype] * (count - kept) + [dtype] * kept
    config = (config or GemmConfig()).fitted(
        itemsize=dtype.itemsize,
        operands=(len(a), 1 if beside else len(b)),
        products=accumulators,
        stored_bytes=sum(d.itemsize for d in dtypes),
    )
    problem = Problem(
        m=m,
        widths=widths if beside else widths[:1],
        k=k,
        dtype=dtype,
        products=products,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        config=config,
    )
    cosine, sine = (None, None) if angles is None else (padded_rows(table, config.tile_m) for table in angles)
    common = {"scale": padded_vector(row_scale, config.tile_m), "cosine": cosine, "sine": sine, "residual": residual}
    columns = problem.clusters[1] * sum(problem.strip)
    own = [part.operands(columns) for part in beside] or [{"bias": padded_vector(bias, columns)}]
    extras = [_given({**common, **part}) for part in own]
    heads = [part.heads for part in beside] or [None]

    def launch(a, b, extras, problem=problem):
        return _launch(problem, epilogue, heads, a, b, extras, dtypes, name, row_squares)

    if config.shares_last_wave:
        launch = apart(launch, partial(launch, problem=replace(problem, config=problem.config.unshared)))
    outputs, squares = launch(a, b, extras)
    results = [output[:rows] for output in outputs]
    if squares is not None:
        results.append(_over_lines(squares[:, :rows]))
    return tuple(varying_like(result, *a, *b, *jax.tree.leaves(extras)) for result in results)


def _given(operands):
    return {name: value for name, value in operands.items() if value is not None}


def _over_lines(squares):
    """The sum over the lines. XLA fuses additions with what follows; a reduction it makes a launch of its own."""
    if squares.shape[0] > _MOST_ADDED:
        return jnp.sum(squares, axis=0)
    return functools.reduce(operator.add, list(squares))


def _launch(problem, epilogue, heads, a, b, extras, dtypes, name, row_squares):
    config = problem.config
    pieces = Pieces.of(problem, most_columns=min((part.widest_piece for part in heads if part), default=None))
    count = len(dtypes)
    out_type = [jax.ShapeDtypeStruct((problem.m, width), dtype) for width in problem.widths for dtype in dtypes]
    results = len(out_type)
    if row_squares:
        out_type.append(jax.ShapeDtypeStruct(problem.squares_shape, jnp.float32))
    sharing = sharing_of(problem)
    if sharing is not None:
        out_type.append(Sums.type_of(problem, sharing))

    def roles(a_refs, b_refs, extra_refs, *refs):
        outputs, squares, scratch = refs[:results], refs[results : len(out_type)], refs[len(out_type) :]
        ring_refs, buffers, arrived = scratch
        ring = Ring(problem=problem, **ring_refs)

        def multiply(warpgroup):
            stores = [
                Store(
                    pieces=pieces,
                    epilogue=epilogue,
                    extras=part_refs,
                    outputs=outputs[i * count : (i + 1) * count],
                    buffers=[buffer.at[warpgroup] for buffer in buffers],
                    arrived=arrived,
                    first_barrier=warpgroup * pieces.slots,
                    heads=part,
                    squares=squares[0] if row_squares else None,
                    line=problem.line,
                )
                for i, (part, part_refs) in enumerate(zip(heads, extra_refs, strict=True))
            ]
            sums = None if sharing is None else Sums.of(problem, refs[len(out_type) - 1], warpgroup)
            compute(problem, ring, stores, warpgroup, sharing=sharing, sums=sums)

        bring = partial(produce, problem, a_refs, b_refs, ring, sharing=sharing)
        whole = (getattr(ref, "ref", ref) for ref in (*a_refs, *b_refs))  # under `jax.vmap` they are parts of arrays
        varies = any(not jax.typeof(ref).manual_axis_type.empty for ref in whole)
        if config.tile_m > FEW_ROWS and not varies:
            # One warp is enough, and power sets the clock. Of few rows it has not been measured; JAX's warps take no
            # array that varies over the devices of `jax.shard_map`.
            return partial(plgpu.warp_map, lambda warp: pl.when(warp == 0)(bring)), multiply
        return bring, multiply

    kernel = launcher(
        problem,
        roles,
        name=name,
        out_type=out_type,
        scratch_types=(
            ring_types(problem, len(a), len(b) if len(problem.widths) == 1 else 1),
            [shared((config.warpgroups, pieces.slots, pieces.rows, pieces.columns), dtype) for dtype in dtypes],
            plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
        ),
    )
    outputs = kernel(list(a), list(b), extras)
    return outputs[:results], outputs[results] if row_squares else None
