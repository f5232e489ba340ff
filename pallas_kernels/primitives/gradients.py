"""Products of one input with several others, gradients, and the gradient of a launch that does what others do apart."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.primitives.derivatives import with_pullback
from pallas_kernels.primitives.gemm.config import choose_config, estimated_us
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.gemm.operands import FEWEST_OUTPUTS, padded_rows
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.row_tiles import has_whole_groups
from pallas_kernels.primitives.settings import usual_promotion
from pallas_kernels.specs import Static

_MOST_MERGED_BYTES = 1 << 20
"""The most bytes of weight gradients whose products XLA may merge: 0.1 MB was faster merged, 6 MB slower."""
_MOST_JOINED_BYTES = 32 << 20
"""The most bytes of cotangents and weights to concatenate for one product: 21 and 32 MB were faster."""
_MOST_JOINED_WEIGHTS = 16 << 20
"""The most bytes of weights among them: 13 MB were faster; more were not measured."""
_SPLIT_ROWS = 64
"""XLA's split-K over rows needs no padding at multiples of this."""
_SPLIT_TILE = 128
"""XLA is assumed to use split-K if a result has fewer square tiles of this size than the GPU has multiprocessors."""
FEWEST_SUMMED_ROWS = 512
"""The fewest rows for which one launch for several products' sum was measured."""


def products_apart(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Computes `x @ w` of each weight w as a separate matrix product. x: (rows, features); w: (features, outputs).

    XLA's dot merger makes one product of several that share an operand if one of them is small. It would copy the
    weights to one array, and its own results from the product's. A barrier hides from it that x is shared, and costs no
    launch.
    """
    return tuple(own @ w for own, w in _with_own(x, weights))


def weight_gradients(x: jax.Array, cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Computes the weight gradient `x.T @ d` of each cotangent d, large ones as separate products, as `products_apart`.

    x: (rows, features); d: (rows, outputs). The copies would be 0.3 GB for query, key and value of llama3-8b at 8192
    rows. Small gradients XLA may merge: 13716 rows, 128 features and three times 128 outputs take 20 µs less.

    For gradients with few tiles XLA splits the sum over the rows, and then pads x for each product. So x is padded once
    before separate ones: 6790 rows, 1024 features and 1024, 256 and 256 outputs take 73 µs instead of 93 (H200).
    """
    outputs = sum(d.shape[1] for d in cotangents)
    if x.dtype.itemsize * x.shape[1] * outputs <= _MOST_MERGED_BYTES:
        return tuple(x.T @ d for d in cotangents)
    tiles = min(pl.cdiv(x.shape[1], _SPLIT_TILE) * pl.cdiv(d.shape[1], _SPLIT_TILE) for d in cotangents)
    if len(cotangents) > 1 and not has_whole_groups(x.shape[0]) and tiles < target_device().core_count:
        x, *cotangents = (padded_rows(array, _SPLIT_ROWS) for array in (x, *cotangents))
    return tuple(own.T @ d for own, d in _with_own(x, cotangents))


def _with_own(x: jax.Array, others: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [lax.optimization_barrier((x, other)) for other in others]


def input_gradient(cotangents: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
    """Computes the sum of `d @ w.T` over pairs of a cotangent and a weight: the gradient of the input that they share.

    d: (rows, outputs); w: (features, outputs) with the outputs of its cotangent; all of one 16-bit dtype. The layer's
    own kernel has run, so that Mosaic GPU's kernels take these sizes.

    Many rows have one launch where that is faster: XLA has one for each product and one for the sum. Small
    operands are joined for one product of XLA: 4353 rows, 128 features and 512 outputs take 7 µs less, 128 rows, 1024
    features and 3072 outputs 2 µs.
    """
    rows, features = cotangents[0].shape[0], weights[0].shape[0]
    if is_faster_summed(rows, features, sum(d.shape[1] for d in cotangents)):
        config = choose_config(rows, features, is_even=True)
        arguments = {"transpose_b": True, "is_along_depth": True, "name": "input_gradient"}
        return gemm(cotangents, weights, config=config, **arguments)[0]
    bytes_of = [cotangents[0].dtype.itemsize * sum(array.size for array in arrays) for arrays in (cotangents, weights)]
    if sum(bytes_of) <= _MOST_JOINED_BYTES and bytes_of[1] <= _MOST_JOINED_WEIGHTS:
        d, w = (jnp.concatenate(arrays, axis=1) for arrays in (cotangents, weights))
        return d @ w.T
    return functools.reduce(operator.add, [d @ w.T for d, w in zip(cotangents, weights, strict=True)])


def is_faster_summed(rows: int, features: int, depth: int) -> bool:
    """Returns whether `estimated_us` expects one launch for all products to beat XLA; times are in gemm/TUNING.md.

    depth: outputs of all cotangents together.
    """
    ours, xla = estimated_us(rows, features, depth, is_mixed=False)
    return rows >= FEWEST_SUMMED_ROWS and features >= FEWEST_OUTPUTS and ours < xla


def differentiated_as(apart: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `together` with the gradient of `apart`, which computes the same. Both take arrays, in trees.

    `apart` is differentiated by what the caller differentiates alone, under `usual_promotion`, as this may be later.
    """

    def forward(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        wanted = tuple(leaf.perturbed for leaf in leaves)
        values = (leaf.value for leaf in leaves)
        with usual_promotion():
            result, pullback = with_pullback(lambda *own: apart(*structure.unflatten(own)), wanted, *values)
        return result, (pullback, Static((structure, wanted)))

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback, (structure, wanted) = saved[0], saved[1].value
        gradients = iter(pullback(instantiated(cotangents)))
        return structure.unflatten([next(gradients) if each else None for each in wanted])

    function = jax.custom_vjp(together)
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def instantiated(cotangents: Any) -> Any:
    """Returns a tree of cotangents with arrays in place of symbolic zeros."""

    def instantiate(leaf: Any) -> Any:
        if not isinstance(leaf, SymbolicZero):
            return leaf
        return jnp.zeros(leaf.shape, leaf.dtype)  # pyright: ignore[reportArgumentType]

    return jax.tree.map(instantiate, cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))


def with_backward(
    function: Callable[..., Any],
    backward: Callable[..., Any],
    saves: Callable[..., tuple[Any, ...]] = lambda *arrays: arrays,
) -> Callable[..., Any]:
    """Gives a function of arrays its own backward pass, `backward(*saved, cotangents)`.

    saves: returns what is saved of the arrays: some of them, or structures without any; by default all.
    """
    differentiable = jax.custom_vjp(function)
    run = usual_promotion()(function)  # the forward pass of a gradient may be traced later
    differentiable.defvjp(lambda *arrays: (run(*arrays), saves(*arrays)), lambda saved, dy: backward(*saved, dy))
    return differentiable
