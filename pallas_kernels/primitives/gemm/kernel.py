"""The matrix product kernel: in persistent blocks, one warpgroup loads operands by TMA and the others multiply.

A block takes tiles of the result in an order that keeps operands in the L2 cache. Its producer runs ahead of the
consumers by as many steps as there are stages, also across tiles. So the next tile's operands arrive while the last
tile's results are stored. Edges need no special case: TMA loads zeros from outside an array and stores nothing there.

One launch can compute several products. Each step loads a tile of every operand, and `products` says which two are
multiplied into which accumulator: ((0, 0, 0),) is a @ b; ((0, 0, 0), (0, 1, 1)) is a @ b and a @ c with a read once;
((0, 0, 0), (1, 1, 0)) is a @ c + b @ d. Alternatively, right operands of any widths lie side by side along n, and each
tile belongs to one of them: a @ b, a @ c and a @ d with a read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.config import FEW_ROWS, GemmConfig
from pallas_kernels.primitives.gemm.consumer import consume
from pallas_kernels.primitives.gemm.epilogue import Beside, Epilogue, HeadRotation
from pallas_kernels.primitives.gemm.launch import Roles, in_one_warp, launcher
from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES, added_lines, padded_rows, padded_vector, whole_groups
from pallas_kernels.primitives.gemm.pipeline import Ring, produce, ring_types
from pallas_kernels.primitives.gemm.problem import ONE, Problem, Product
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import varying_like


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
    is_along_depth: bool = False,
    out_dtype: jnp.dtype | None = None,
    config: GemmConfig | None = None,
    name: str = "gemm",
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results, each (M, N); the first in `out_dtype`, kept products in the operands' dtype.

    Args:
        a: left operands, each (M, K), or (K, M) with `transpose_a`; bfloat16 or float16. Rows as they lie in memory
            must be multiples of 16 bytes.
        b: right operands, each (K, N), or (N, K) with `transpose_b`, of the same dtype.
        products: (left operand, right operand, accumulator) of each product.
        beside: parameters for each of `b`, which then lie side by side and have a result each. Needs one left operand,
            and no epilogue, bias or residual.
        angles: cosines and sines, (M, half of a head's columns) float32 each, if heads are rotated.
        bias: (N,), any floating dtype.
        row_scale: (M,) float32; multiplies the rows of every product.
        residual: (M, N) of out_dtype; added to the first result.
        row_squares: whether to return the row sums of the first rounded result's squares, too: (M,) float32, last.
        is_along_depth: whether the operands follow one another along the depth: a[0] @ b[0] + a[1] @ b[1]. A step then
            takes the shared memory of one pair.
        out_dtype: the first result's dtype; None: the operands'.
        config: the tiling; its stages are reduced to those that fit.
        name: the kernel's name, for traces.

    Raises:
        ValueError: `beside` is combined with arguments that it does not allow.
    """
    epilogue = epilogue or Epilogue()
    if beside and (len(a) > 1 or len(beside) != len(b) or bias is not None or residual is not None):
        raise ValueError("gemm: right operands beside each other take one left one, no common bias and no residual.")
    a = [whole_groups(array) if transpose_a else array for array in a]
    b = [array if transpose_b else whole_groups(array) for array in b]
    dtype = a[0].dtype
    accumulators = 1 + max(product[2] for product in products)
    dtypes = epilogue.dtypes(accumulators, jnp.dtype(out_dtype or dtype), dtype)
    m, k = a[0].shape[::-1] if transpose_a else a[0].shape
    widths = tuple(array.shape[0 if transpose_b else 1] for array in b)
    operands = (1 if is_along_depth else len(a), 1 if beside or is_along_depth else len(b))
    config = (config or GemmConfig()).fitted(
        itemsize=dtype.itemsize,
        operands=operands,
        products=accumulators,
        stored_bytes=sum(d.itemsize for d in dtypes),
    )
    depths = tuple(array.shape[0 if transpose_a else 1] for array in a) if is_along_depth else ()
    problem = Problem(
        m=m,
        widths=widths if beside else widths[:1],
        k=sum(depths) or k,
        dtype=dtype,
        products=products,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        config=config,
        depths=depths,
    )
    cosine, sine = (None, None) if angles is None else (padded_rows(table, config.tile_m) for table in angles)
    common = {"scale": padded_vector(row_scale, config.tile_m), "cosine": cosine, "sine": sine, "residual": residual}
    columns = sum(problem.strip)
    own = [part.operands(columns) for part in beside] or [{"bias": padded_vector(bias, columns)}]
    extras = [_given({**common, **part}) for part in own]
    launch = _Launch(
        problem=problem,
        epilogue=epilogue,
        rotations=[part.rotation for part in beside] or [None],
        dtypes=dtypes,
        name=name,
        has_squares=row_squares,
        operands=operands,
    )
    outputs, squares = launch(a, b, extras)
    results = list(outputs)
    if squares is not None:
        results.append(added_lines(squares[:, :m]))
    return tuple(varying_like(result, *a, *b, *jax.tree.leaves(extras)) for result in results)


def _given(operands):
    return {name: value for name, value in operands.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """The launch of one product.

    rotations: of heads, for each of `Problem.widths`, or None. dtypes: of the results of one width.
    has_squares: `row_squares` of `gemm`. operands: numbers of left and right tiles of a step.
    """

    problem: Problem
    epilogue: Epilogue
    rotations: Sequence[HeadRotation | None]
    dtypes: Sequence[jnp.dtype]
    name: str
    has_squares: bool
    operands: tuple[int, int]

    def __call__(self, a: Sequence[jax.Array], b: Sequence[jax.Array], extras: Sequence[Mapping[str, jax.Array]]):
        """Returns the results, and the lines of sums of squares or None."""
        config, pieces, results = self.problem.config, self._pieces, len(self._results)
        kernel = launcher(
            self.problem,
            self._roles,
            name=self.name,
            out_type=[*self._results, *self._squares],
            scratch_types=(
                ring_types(self.problem, *self.operands),
                [pieces.scratch(d, config.warpgroups) for d in self.dtypes],
                plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
            ),
        )
        outputs = kernel(list(a), list(b), extras)
        return outputs[:results], outputs[results] if self.has_squares else None

    @property
    def _results(self) -> list[jax.ShapeDtypeStruct]:
        m = self.problem.m
        return [jax.ShapeDtypeStruct((m, width), dtype) for width in self.problem.widths for dtype in self.dtypes]

    @property
    def _squares(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.problem.squares_shape, jnp.float32)] if self.has_squares else []

    @property
    def _pieces(self) -> Pieces:
        most = [rotation.widest_piece for rotation in self.rotations if rotation]
        if self.problem.in_panels:  # a piece is one panel
            most.append(SWIZZLE_BYTES // max(dtype.itemsize for dtype in self.dtypes))
        return Pieces.of(self.problem, most_columns=min(most, default=None))

    def _roles(self, a_refs, b_refs, extra_refs, *refs) -> Roles:
        """Returns the producer's and the consumers' roles. refs: outputs, and the scratch of `__call__`."""
        *outputs, ring_refs, buffers, arrived = refs
        ring = Ring.of(self.problem, ring_refs)

        def multiply(warpgroup):
            consume(self.problem, ring, self._stores(warpgroup, extra_refs, outputs, buffers, arrived), warpgroup)

        load = partial(produce, self.problem, a_refs, b_refs, ring)
        if self.problem.config.tile_m > FEW_ROWS:  # not measured for few rows
            load = in_one_warp(load, *a_refs, *b_refs)
        return load, multiply

    def _stores(self, warpgroup, extra_refs, outputs, buffers, arrived) -> list[Store]:
        """Returns a warpgroup's epilogue for each of `Problem.widths`."""
        pieces, count = self._pieces, len(self.dtypes)
        return [
            Store(
                pieces=pieces,
                epilogue=self.epilogue,
                extras=part_refs,
                outputs=outputs[i * count : (i + 1) * count],
                buffers=[pieces.tiles(buffer, d).at(warpgroup) for buffer, d in zip(buffers, self.dtypes, strict=True)],
                arrived=arrived,
                first_barrier=warpgroup * pieces.slots,
                rotation=rotation,
                squares=outputs[len(self._results)] if self.has_squares else None,
                line=self.problem.line,
            )
            for i, (rotation, part_refs) in enumerate(zip(self.rotations, extra_refs, strict=True))
        ]
