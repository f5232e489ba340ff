"""A product of few rows, computed transposed: out^T = w^T x^T. The rows of the tensor cores' tiles are columns of w.

The bytes in flight decide how fast memory is read. So a warpgroup starts to load as many steps of weights as its shared
memory holds before it multiplies the first one, and another step whenever it is done with one. The warpgroups of a
block take steps in turn. If there are too few tiles for all multiprocessors, the blocks of a cluster split a tile's
depth. All partial sums are added in the shared memory of the warpgroup that finishes the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.epilogue import Finish, epilogue_types
from pallas_kernels.primitives.few_rows.heads import head_operands
from pallas_kernels.primitives.few_rows.norm import PrologueNorm, no_squares, scaled
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.few_rows.weights import load_weights, multiply_groups, multiply_whole, ring_types
from pallas_kernels.primitives.flop_metadata import product
from pallas_kernels.primitives.gemm.epilogue import Epilogue, Rotation
from pallas_kernels.primitives.gemm.operands import padded_vector, whole_groups
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.sharing import without_values
from pallas_kernels.primitives.transposed import GROUP


def few_rows_product(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    scales: Sequence[jax.Array] = (),
    epilogue: Epilogue | None = None,
    bias: jax.Array | Sequence[jax.Array | None] | None = None,
    row_scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    norm: PrologueNorm | None = None,
    rotation: Rotation | None = None,
    is_concatenated: bool = False,
    out_dtype: jnp.dtype | None = None,
    config: FewRowsConfig,
    name: str = "few_rows_product",
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results, each (rows, N); the first in `out_dtype`, kept products in x's dtype.

    Weights that lie side by side have a result each, (rows, own N).

    Args:
        x: (rows, K), at most 64 rows, bfloat16 or float16; K a multiple of 64.
        weights: each (K, N), of x's dtype; N a multiple of 64. With `scales`, each (N, K) of dtype int8 or int4, or
            uint8 packed (`primitives/integers.py`).
        scales: for each of the weights, float32 factors (groups, N). There is one group for the whole depth, or a group
            for every 64 or 128 values along K.
        epilogue: the operations after the product; None: none.
        bias: (N,), any floating dtype of at most 32 bits; of several products one each. Of weights side by side each
            may be None.
        row_scale: (rows,) float32; multiplies the rows of every product.
        residual: (rows, N) of out_dtype; added to the first result.
        norm: a norm of x's rows, or None. x and weights must be bfloat16, and there must be no row_scale.
        rotation: the rotation of the heads of all weights side by side but the last, or None. All weights have whole
            heads.
        is_concatenated: whether the weights lie side by side. They have x's dtype and any numbers of columns; residual
            and epilogue must be None.
        out_dtype: the first result's dtype; None: x's.
        config: the tiling; its stages are reduced to those that fit.
        name: the kernel's name, for traces.

    Raises:
        ValueError: arguments are combined that exclude each other.
    """
    epilogue = epilogue or Epilogue()
    if is_concatenated and (scales or residual is not None or epilogue != Epilogue()):
        raise ValueError("few_rows_product: weights beside each other take no scales, residual or other epilogue.")
    if norm is not None and (x.dtype != jnp.bfloat16 or scales or row_scale is not None):
        raise ValueError(
            "few_rows_product: a norm is of bfloat16 rows, before weights of that dtype, without row_scale."
        )
    if rotation is not None and not is_concatenated:
        raise ValueError("few_rows_product: only weights beside each other are rotated.")
    rows = x.shape[0]
    widths = tuple(w.shape[0 if scales else 1] for w in weights)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if out_dtype.itemsize > 2:  # a panel of 64 columns would be wider than TMA's swizzle
        x = whole_groups(x)
        residual = None if residual is None else whole_groups(residual)
    products = 1 if is_concatenated else len(weights)
    problem = Problem.of(
        rows=x.shape[0],
        widths=widths if is_concatenated else widths[:1],
        k=x.shape[1],
        dtype=x.dtype,
        weight_dtype=weights[0].dtype,
        scale_groups=scales[0].shape[0] if scales else 0,
        products=products,
        out_dtypes=tuple(epilogue.dtypes(products, out_dtype, x.dtype)),
        residual_dtype=None if residual is None else out_dtype,
        config=config,
        head_size=0 if rotation is None else rotation.size,
        is_normed=norm is not None,
        norm_itemsize=0 if norm is None or norm.scale is None else norm.scale.dtype.itemsize,
    )
    if is_concatenated and isinstance(bias, Sequence):
        bias = _joined(bias, widths, problem.config.columns)
    has_output_scales = problem.is_quantized and not problem.is_grouped
    operands = {
        "scales": [padded_vector(scale[0], problem.config.columns) for scale in scales] if has_output_scales else None,
        "bias": jax.tree.map(lambda each: padded_vector(each, problem.config.columns), bias),
        "scale": padded_vector(row_scale, problem.tokens),
        "residual": residual,
    }
    if norm is not None:
        operands |= norm.operands(problem)
    if rotation is not None:
        operands |= head_operands(rotation, problem.tokens)
    extras = {key: value for key, value in operands.items() if value is not None}
    tiled = {"w": list(weights), "scales": list(scales) if problem.is_grouped else []}
    outputs = _launch(problem, epilogue, without_values(norm), without_values(rotation), x, tiled, extras, name)
    return tuple(varying_like(output[:rows], *jax.tree.leaves((x, tiled, extras))) for output in outputs)


def _joined(biases: Sequence[jax.Array | None], widths: Sequence[int], columns: int) -> jax.Array | None:
    """Joins the biases in the order of the weights' columns, each padded to whole tiles; zeros for an absent bias."""
    if all(bias is None for bias in biases):
        return None
    filled = [
        jnp.zeros(width, jnp.float32) if bias is None else bias.astype(jnp.float32)
        for bias, width in zip(biases, widths, strict=True)
    ]
    return jnp.concatenate([jnp.pad(bias, (0, -bias.shape[0] % columns)) for bias in filled])


def _launch(
    problem: Problem,
    epilogue: Epilogue,
    norm: PrologueNorm | None,
    rotation: Rotation | None,
    x: jax.Array,
    weights,
    extras,
    name: str,
) -> Sequence[jax.Array]:
    config = problem.config
    out_type = [
        jax.ShapeDtypeStruct((problem.rows, width), dtype) for width in problem.widths for dtype in problem.out_dtypes
    ]
    clusters = problem.tiles
    if config.splits == 1:
        # A persistent block loads the next tile's weights while it still computes.
        clusters = min(clusters, target_device().core_count)

    def body(x_ref, w_refs, extra_refs, *refs):
        outputs, (ring, epilogue_refs, norm_refs) = refs[: len(out_type)], refs[len(out_type) :]
        ring = {**ring, "x": problem.x_form.tiles(ring["x"])}
        first_tile = lax.axis_index("block")
        rank = lax.axis_index("cluster") if config.splits > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup") if config.warpgroups > 1 else jnp.int32(0)
        first_stage = warpgroup * config.stages
        in_flight = 0 if problem.is_quantized else config.in_flight
        tiles = (problem.tiles - first_tile + clusters - 1) // clusters
        own_steps = lax.div(problem.steps + config.warpgroups - 1 - warpgroup, config.warpgroups)
        if problem.steps % config.warpgroups == 0:
            own_steps = jnp.int32(problem.steps // config.warpgroups)
        total = tiles * own_steps

        def step_of(number):
            return rank * problem.steps + warpgroup + config.warpgroups * lax.rem(number, own_steps)

        def load_step(number):
            stage = first_stage + lax.rem(number, config.stages)
            step = step_of(number)
            column = (first_tile + lax.div(number, own_steps) * clusters) * config.columns

            def load_x():
                place = (pl.ds(0 * column, problem.tokens), pl.ds(step * config.depth, config.depth))
                arrived = ring["full" if norm is None else "x_full"].at[stage]
                ring["x"].at(stage).load_async(x_ref.at[place], arrived)

            # With a norm, x is loaded before the weights: the norm scales x while the weights are still on their way.
            if norm is not None:
                load_x()
            load_weights(problem, w_refs, ring, stage, step, column)
            if norm is None:
                load_x()

        if norm is not None:  # before the first weights, or the scale would arrive after all of them
            norm.load(extra_refs, norm_refs, rank, warpgroup)
        lax.fori_loop(0, jnp.minimum(total, config.stages), lambda number, _: load_step(number), None)
        finish = Finish(
            problem=problem,
            epilogue=epilogue,
            extras=extra_refs,
            outputs=outputs,
            rank=rank,
            warpgroup=warpgroup,
            rotation=rotation,
            norm=norm,
            **_tiles(problem, epilogue_refs),
        )

        def steps(before, work, carry):
            """Calls `work(stage, carry)` for each step of a tile, loads later steps, and sums x's squares."""

            def step(i, both):
                carry, squares = both
                number = before + i
                stage = first_stage + lax.rem(number, config.stages)
                scales = None if norm is None else norm.scales(problem, norm_refs, step_of(i) - rank * problem.steps)
                if norm is not None:
                    plgpu.barrier_wait(ring["x_full"].at[stage])
                    squares = scaled(problem, ring["x"].at(stage), scales, squares)
                plgpu.barrier_wait(ring["full"].at[stage])
                carry = work(stage, carry)
                plgpu.wgmma_wait(in_flight * problem.products * problem.groups * problem.x_form.panels)
                done = number - in_flight

                is_wanted = done + config.stages < total

                @pl.when(is_wanted & (done >= 0) if in_flight else is_wanted)
                def _():
                    if problem.is_quantized or (norm is not None and scales is None):
                        plgpu.commit_smem()  # orders the reads before TMA overwrites the stage
                    load_step(done + config.stages)

                return carry, squares

            return lax.fori_loop(0, own_steps, step, (carry, None if norm is None else no_squares(problem)))

        def tile(number, _):
            column = (first_tile + number * clusters) * config.columns
            before = number * own_steps
            ready = finish.begin(column)
            if norm is not None:
                pl.when(number == 0)(partial(norm.wait, norm_refs))
            end = partial(finish.end, column=column, ready=ready, is_first=number == 0, is_last=number == tiles - 1)
            shape, count = (GROUP, problem.tokens), problem.products * problem.groups

            def multiply(*accumulators):
                _, squares = steps(before, lambda stage, _: multiply_whole(problem, ring, stage, accumulators), None)
                end([accumulator[...] for accumulator in accumulators], squares)

            if problem.is_grouped:
                zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
                work = partial(multiply_groups, problem, ring)
                sums, squares = steps(before, work, [zero] * count)
                end(sums, squares)
            else:
                pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(count)))

        lax.fori_loop(0, tiles, tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = name
    kernel = settings.kernel(
        body,
        out_type=out_type,
        grid=(clusters,),
        grid_names=("block",),
        **({"cluster": (config.splits,), "cluster_names": ("cluster",)} if config.splits > 1 else {}),
        **({"num_threads": config.warpgroups, "thread_name": "warpgroup"} if config.warpgroups > 1 else {}),
        scratch_types=(
            ring_types(problem),
            epilogue_types(problem),
            {} if norm is None else norm.scratch_types(problem),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        products=product(x.shape[0], sum(problem.widths), x.shape[1], x.dtype).times(problem.products),
    )
    return kernel(x, weights, extras)


def _tiles(problem: Problem, epilogue_refs: dict[str, Any]) -> dict[str, Any]:
    """Returns `epilogue_refs`, of `epilogue_types`, with the tiles of its references to results and to a residual."""
    pairs = zip(problem.out_dtypes, epilogue_refs["results"], strict=True)
    tiles: dict[str, Any] = {"results": [problem.result_form(dtype).tiles(ref) for dtype, ref in pairs]}
    if problem.residual_dtype is not None:
        tiles["residual"] = problem.result_form(problem.residual_dtype).tiles(epilogue_refs["residual"])
    return {**epilogue_refs, **tiles}
