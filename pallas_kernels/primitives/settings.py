"""Runs this package's code under JAX's default settings for types and shapes, whatever the program has set."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.primitives import interpreter
from pallas_kernels.primitives.flop_metadata import Products, references
from pallas_kernels.primitives.platform import is_interpreted, varying_like
from pallas_kernels.primitives.sharing import traced_once


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Promotes and broadcasts arrays under JAX's defaults, in a `with` statement or in a function that it decorates.

    `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` are for the caller's own expressions.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def kernel(body: Callable[..., Any], *, products: Products | None = None, **options: Any) -> Callable[..., Any]:
    """Calls `plgpu.kernel` with a body that is traced in 32 bits even under `jax_enable_x64`, and keeps its loops even
    under `jax_disable_jit`.

    The machine code is then the same. It is the body that says so, as `jax.vmap` traces it again, later. Bodies that
    are alike are traced once, see `sharing.py`: they close over shapes and dtypes, not over arrays.

    products: its matrix products, stated in the program; None where they are negligible or not known.
    """

    @functools.wraps(body)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(False), jax.disable_jit(False), usual_promotion():
            return body(*args, **kwargs)

    launch = plgpu.kernel(narrow, **options)

    def launched(*args: Any, **kwargs: Any) -> Any:
        if is_interpreted():
            interpreter.check(launch, *args, **kwargs)
        if products is None or is_interpreted():
            return launch(*args, **kwargs)
        with products.beside([*jax.tree.leaves(options["out_type"]), *references((args, kwargs))]):
            return launch(*args, **kwargs)

    return traced_once(launched, body, options, products)


def named_kernel(
    body: Callable[[dict[str, Any]], None],
    operands: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any] | None = None,
    *,
    name: str,
    grid: Mapping[str, int],
    warpgroups: int | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Launches a `kernel` whose body takes its references by name; returns the outputs by name.

    operands: arrays, or trees of them; there are no references for None. scratch: types of scratch memory.
    name: the kernel's in traces and HLO. grid: the number of blocks along each of its axes.
    warpgroups: of a block, along the axis "warpgroup"; None: one, without that axis. options: those of `plgpu.kernel`.
    """
    given = {key: operand for key, operand in operands.items() if operand is not None}
    names = (*given, *outputs, *(scratch or {}))

    def named(*references: Any) -> None:
        body(dict(zip(names, references, strict=True)))

    if warpgroups is not None:
        options |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    launch = kernel(
        named,
        out_type=tuple(outputs.values()),
        scratch_types=tuple((scratch or {}).values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        **options,
    )
    results, arrays = launch(*given.values()), jax.tree.leaves(given)
    return {key: varying_like(result, *arrays) for key, result in zip(outputs, results, strict=True)}
