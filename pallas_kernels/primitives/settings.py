"""Runs this package's code under JAX's default settings of types and shapes, whatever a program has set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.primitives.derivatives import first_order
from pallas_kernels.primitives.flop_metadata import Products, references
from pallas_kernels.primitives.platform import is_interpreted


def usual_promotion[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """`function`, in which arrays are promoted and broadcast as they are by default.

    `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` are for the caller's own expressions.
    Of an operation, which has an `implementation`, all but "xla" refuse what its kernels cannot differentiate.
    """
    is_operation = "implementation" in inspect.signature(function).parameters

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_operation and kwargs.get("implementation") not in ("xla", ("xla",), ["xla"]):
            args, kwargs = first_order(function.__name__, (args, kwargs))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return promoting


def kernel(body: Callable[..., Any], *, products: Products | None = None, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, whose body is traced in 32 bits, also where `jax_enable_x64` makes Python's integers int64, and
    with its loops, also where `jax_disable_jit` unrolls them.

    The machine code is then the same. It is the body that says so, as `jax.vmap` traces it again, later.

    products: what it multiplies, stated in the program; None where that is next to nothing, or not known.
    """

    @functools.wraps(body)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(False), jax.disable_jit(False):
            return usual_promotion(body)(*args, **kwargs)

    launch = plgpu.kernel(narrow, **options)

    def called(*args: Any, **kwargs: Any) -> Any:
        if products is None or is_interpreted():
            return launch(*args, **kwargs)
        with products.beside([*jax.tree.leaves(options["out_type"]), *references((args, kwargs))]):
            return launch(*args, **kwargs)

    return called
