"""The low-rank corrected linear layer with x @ a made in the same launch by a few blocks, for all others.

x @ a of a tile of rows is worth a fraction of a tile of x @ w. The blocks that the last wave of tiles would leave idle
make it first, put it into device memory and say so by a semaphore. Every tile of the result takes it from there as
more depth, after the depth of x and w: no block multiplies by a that need not, and no launch comes before.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.ops.lora_linear.ahead_loop import AheadLoop
from pallas_kernels.ops.lora_linear.config import DEPTH, LoraConfig
from pallas_kernels.ops.lora_linear.sharing import Sharing
from pallas_kernels.primitives.gemm.launch import launcher
from pallas_kernels.primitives.gemm.mainloop import Ring, ring_types
from pallas_kernels.primitives.gemm.operands import padded_vector, whole_groups
from pallas_kernels.primitives.gemm.problem import ONE, Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.stated import product


def lora_linear_ahead(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    alpha: float,
    config: LoraConfig,
) -> jax.Array:
    """Returns x @ w + alpha (x @ a) @ b + bias.

    Copies under `jax.vmap` are more rows of one launch where only x differs, and come one after the other where more
    does: copies that JAX would make of the kernel share its semaphores.

    a: (features, rank), the rank a multiple of 8 and at most `product.store_columns`. Otherwise as
    `mosaic_gpu.lora_linear_forward`.
    """

    @jax.custom_batching.custom_vmap
    def compute(x, w, a, b, bias):
        return _launch(x, w, a, b, bias, alpha=alpha, config=config)

    @compute.def_vmap
    def _mapped(count, is_mapped, *operands):
        again = partial(lora_linear_ahead, alpha=alpha, config=config)
        flags = tuple(map(any, map(jax.tree.leaves, is_mapped)))
        if flags[0] and not any(flags[1:]):
            x, *others = operands
            y = again(x.reshape(-1, x.shape[-1]), *others)
            return y.reshape(count, -1, y.shape[-1]), True
        mapped = tuple(value if flag else None for value, flag in zip(operands, flags, strict=True))

        def one(values):
            given = (own if flag else same for own, same, flag in zip(values, operands, flags, strict=True))
            return again(*given)

        return lax.map(one, mapped), True

    return compute(x, w, a, b, bias)


def _launch(x, w, a, b, bias, *, alpha, config):
    asked = x.shape[0]
    x = whole_groups(x)
    (rows, features), outputs, dtype = x.shape, w.shape[1], x.dtype
    cut = config.fitted(rank=DEPTH, itemsize=dtype.itemsize)
    problem = Problem(
        m=rows,
        widths=(outputs,),
        k=features,
        dtype=dtype,
        products=ONE,
        transpose_a=False,
        transpose_b=False,
        config=cut,
    )
    strip = sum(problem.strip)
    sharing = Sharing.of(
        rows=pl.cdiv(rows, cut.tile_m), columns=pl.cdiv(outputs, strip), most=target_device().core_count
    )
    pieces = Pieces.of(problem)
    loop = AheadLoop(problem=problem, sharing=sharing, pieces=pieces, alpha=float(alpha))

    def roles(x_ref, w_ref, a_ref, b_ref, extra_refs, y_ref, low_ref, ring_refs, buffers, emptied, met, arrived):
        ring = Ring(problem=problem, **ring_refs)
        given = pl.get_global(plgpu.SemaphoreType.REGULAR((sharing.rows,)))

        def multiply(warpgroup):
            store = Store.of_one_result(
                pieces,
                extras=extra_refs,
                output=y_ref,
                buffer=buffers.at[warpgroup],
                arrived=arrived,
                warpgroup=warpgroup,
            )
            loop.compute(low_ref, given, ring, buffers, emptied, met, store, warpgroup)

        return partial(loop.produce, x_ref, w_ref, a_ref, b_ref, low_ref, given, ring, buffers, emptied), multiply

    slots, rank = cut.warpgroups * pieces.slots, b.shape[0]
    kernel = launcher(
        problem,
        roles,
        name="lora_linear_ahead",
        out_type=[jax.ShapeDtypeStruct((rows, outputs), dtype), jax.ShapeDtypeStruct((rows, pieces.columns), dtype)],
        blocks=sharing.blocks,
        scratch_types=(
            ring_types(problem, 1, 1),
            shared((cut.warpgroups, pieces.slots, pieces.rows, pieces.columns), dtype),
            plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=slots),
            plgpu.Barrier(num_arrivals=cut.warpgroups),
            plgpu.Barrier(num_barriers=slots),
        ),
        products=product(rows, outputs, features + rank, dtype) + product(rows, rank, features, dtype),
    )
    extras = {} if bias is None else {"bias": padded_vector(bias, strip)}
    return kernel(x, w, a, b, extras)[0][:asked]
