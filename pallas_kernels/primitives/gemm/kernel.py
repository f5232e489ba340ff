"""The matrix product kernel: in persistent blocks, one warpgroup loads operands by TMA and the others multiply.

A block takes tiles of the result in an order that keeps operands in the L2 cache. Its producer runs ahead of the
consumers by as many steps as there are stages, also across tiles. So the next tile's operands arrive while the last
tile's results are stored. Edges need no special case: TMA loads zeros from outside an array and stores nothing there.

One launch can compute several products, with a read once. Right operands of the same width have an accumulator each in
every tile. Right operands of any widths lie side by side along n, and each tile belongs to one of them. Or pairs of a
left and a right operand follow one another along the depth, which adds up their products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.config import FEW_ROWS, GemmConfig
from pallas_kernels.primitives.gemm.consumer import consume
from pallas_kernels.primitives.gemm.epilogue import Epilogue, HeadRotation, Rotation
from pallas_kernels.primitives.gemm.launch import Roles, in_one_warp, launcher
from pallas_kernels.primitives.gemm.operands import padded_rows, padded_vector, whole_groups
from pallas_kernels.primitives.gemm.pipeline import Ring, produce, ring_types
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.row_blocks import BlockReference, RowBlock
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.references import changed_in_place


def gemm(
    a: Sequence[jax.Array],
    b: Sequence[jax.Array],
    *,
    transpose_b: bool = False,
    epilogue: Epilogue | None = None,
    rotation: Rotation | None = None,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    row_scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    row_squares: bool = False,
    is_concatenated: bool = False,
    is_along_depth: bool = False,
    out_dtype: jnp.dtype | None = None,
    read: RowBlock | None = None,
    written: RowBlock | None = None,
    config: GemmConfig | None = None,
    name: str = "gemm",
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results, each (M, N); the first in `out_dtype`, kept products in the operands' dtype.

    Args:
        a: the left operand (M, K), or several with `is_along_depth`; bfloat16 or float16. Rows must be multiples of 16
            bytes.
        b: right operands, each (K, N), or (N, K) with `transpose_b`, of the same dtype.
        rotation: the rotation of the heads of all right operands side by side but the last, or None.
        bias: (N,), any floating dtype; of several products one each. Of operands side by side each may be None.
        row_scale: (M,) float32; multiplies the rows of every product.
        residual: (M, N) of out_dtype; added to the first result.
        row_squares: whether to return the row sums of the first rounded result's squares, too: (M,) float32, last.
        is_concatenated: whether the right operands lie side by side and have a result each. Needs one left operand, and
            no epilogue or residual.
        is_along_depth: whether the operands follow one another along the depth: a[0] @ b[0] + a[1] @ b[1]. A step then
            takes the shared memory of one pair.
        out_dtype: the first result's dtype; None: the operands'.
        read: the block of the left operand, (batch, blocks, rows, K), that is multiplied; None: a matrix. M is batch *
            rows, and with a batch the rows must be a multiple of a tile's.
        written: the block of the results, (batch, blocks, rows, N), that is written, as for `read`; other blocks are
            those of `into`, or undefined. None: matrices.
        config: the tiling; its stages are reduced to those that fit.
        name: the kernel's name, for traces.

    Raises:
        ValueError: `is_concatenated` is combined with arguments that it does not allow.
    """
    epilogue = epilogue or Epilogue()
    if is_concatenated and (len(a) > 1 or epilogue != Epilogue() or residual is not None):
        raise ValueError("gemm: right operands beside each other take one left one, no epilogue and no residual.")
    b = [array if transpose_b else whole_groups(array) for array in b]
    dtype = a[0].dtype
    accumulators = 1 if is_concatenated or is_along_depth else len(b)
    dtypes = epilogue.dtypes(accumulators, jnp.dtype(out_dtype or dtype), dtype)
    *_, rows, k = a[0].shape
    m = rows if read is None else read.shape[0] * rows
    widths = tuple(array.shape[0 if transpose_b else 1] for array in b)
    config = (config or GemmConfig()).fitted(
        itemsize=dtype.itemsize, stored_bytes=sum(d.itemsize for d in dtypes), products=accumulators
    )
    depths = tuple(array.shape[1] for array in a) if is_along_depth else ()
    problem = Problem(
        m=m,
        widths=widths if is_concatenated else widths[:1],
        k=sum(depths) or k,
        dtype=dtype,
        config=config,
        accumulators=accumulators,
        transpose_b=transpose_b,
        depths=depths,
    )
    common = {"scale": padded_vector(row_scale, config.tile_m), "residual": residual}
    if rotation is not None:
        common |= {"cosine": padded_rows(rotation.cos, config.tile_m), "sine": padded_rows(rotation.sin, config.tile_m)}
    columns = sum(problem.strip)
    biases = jax.tree.map(lambda vector: padded_vector(vector, columns), bias)
    own = (biases or [None] * len(b)) if is_concatenated else [biases]
    extras = [_given({**common, "bias": each}) for each in own]
    rotations: list[HeadRotation | None] = [None] * len(own)
    if rotation is not None:
        shape = {"size": rotation.size, "angles": rotation.cos.shape[1]}
        rotations[:-1] = (HeadRotation(**shape, has_bias=each is not None) for each in own[:-1])
    most_columns = min((each.widest_piece for each in rotations if each), default=None)
    pieces = Pieces.of(problem, panel_itemsize=max(d.itemsize for d in dtypes), most_columns=most_columns)
    shape = (m,) if written is None else (*written.shape, m // written.shape[0])
    out_type = [jax.ShapeDtypeStruct((*shape, width), dtype) for width in problem.widths for dtype in dtypes]
    if written is not None and written.into:
        out_type = []
    if row_squares:
        out_type.append(jax.ShapeDtypeStruct(problem.squares_shape, jnp.float32))
    kernel = launcher(
        problem,
        _roles(problem, pieces, epilogue, rotations, dtypes, row_squares),
        name=name,
        out_type=out_type,
        scratch_types=(
            ring_types(problem),
            [pieces.scratch(d, config.warpgroups) for d in dtypes],
            plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
        ),
    )
    indices = {name: jnp.reshape(each.index, 1) for name, each in {"read": read, "written": written}.items() if each}
    operands = list(a), list(b), extras, indices
    if written is not None and written.into:
        others, results = changed_in_place(kernel, operands, list(written.into))
        results += others
    else:
        results = list(kernel(*operands, []))
    if row_squares:
        results[-1] = jnp.sum(results[-1][:, :m], axis=0)
    return tuple(varying_like(result, *a, *b, *jax.tree.leaves(extras)) for result in results)


def _given(operands):
    return {name: value for name, value in operands.items() if value is not None}


def _roles(
    problem: Problem,
    pieces: Pieces,
    epilogue: Epilogue,
    rotations: Sequence[HeadRotation | None],
    dtypes: Sequence[jnp.dtype],
    has_squares: bool,
) -> Callable[..., Roles]:
    """Returns the function that `launcher` takes. rotations: for each of `Problem.widths`. dtypes: of its results."""
    count = len(dtypes)

    def roles(a_refs, b_refs, extra_refs, index_refs, into_refs, *refs) -> Roles:
        *outputs, ring_refs, buffers, arrived = refs
        squares = outputs.pop() if has_squares else None
        outputs = [*into_refs, *outputs]
        if "read" in index_refs:
            a_refs = [BlockReference(ref=ref, index=index_refs["read"][0]) for ref in a_refs]
        if "written" in index_refs:
            outputs = [BlockReference(ref=ref, index=index_refs["written"][0]) for ref in outputs]
        ring = Ring.of(problem, ring_refs)

        def multiply(warpgroup):
            stores = [
                Store(
                    pieces=pieces,
                    epilogue=epilogue,
                    extras=part_refs,
                    outputs=outputs[i * count : (i + 1) * count],
                    buffers=[pieces.tiles(buffer, d).at(warpgroup) for buffer, d in zip(buffers, dtypes, strict=True)],
                    arrived=arrived,
                    first_barrier=warpgroup * pieces.slots,
                    rotation=rotation,
                    squares=squares,
                    line=problem.line,
                )
                for i, (rotation, part_refs) in enumerate(zip(rotations, extra_refs, strict=True))
            ]
            consume(problem, ring, stores, warpgroup)

        load = partial(produce, problem, a_refs, b_refs, ring)
        # Not measured for few rows.
        return in_one_warp(load, *a_refs, *b_refs) if problem.config.tile_m > FEW_ROWS else load, multiply

    return roles
