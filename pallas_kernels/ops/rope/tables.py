"""Tables of cosines and sines: their checks, their rows for kernels, and gradients of what is rotated by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.rope.angles import angle_tables
from pallas_kernels.primitives.gradients import instantiated


def check_tables(operation: str, cos: jax.Array, sin: jax.Array, leading: Sequence[int], size: int) -> None:
    """Raises TypeError or ValueError unless tables fit heads of (*leading, heads, at least `size` columns).

    leading: the shape of the tokens. size: the number of columns that are rotated.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(table.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} must be floating, got {table.dtype.name}.")
        shape = table.shape[:-2] + table.shape[-1:] if table.ndim == len(leading) + 2 else table.shape
        has_heads = table.ndim == len(leading) + 2 and table.shape[-2] != 1
        is_fitting = 1 <= len(shape) <= len(leading) + 1 and not has_heads and shape[-1] in (size // 2, size)
        tail = leading[len(leading) - len(shape) + 1 :]
        if not is_fitting or any(have not in (1, want) for have, want in zip(shape[:-1], tail, strict=True)):
            raise ValueError(
                f"{operation}: {name} must be ({', '.join(map(str, leading))}, columns) or broadcast to that, or with "
                f"an axis of one head before the columns, which are {size // 2}, one a pair, or {size}; got "
                f"{table.shape}."
            )
    if cos.shape[-1] != sin.shape[-1]:
        raise ValueError(f"{operation}: cos and sin must have as many columns, got {cos.shape} and {sin.shape}.")


def row_tables(
    positions: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    leading: Sequence[int],
    *,
    size: int,
    theta: float,
    repeats: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines as (rows, columns), of positions or of tables; they have been checked.

    repeats: whether to return the rows of one batch's tokens if all batches share them.
    """
    given = [array for array in (cos, sin) if array is not None] if positions is None else [positions[..., None]]
    given = [array[..., 0, :] if array.ndim == len(leading) + 2 else array for array in given]
    is_shared = repeats and all(length == 1 for array in given for length in array.shape[:-2])
    shape = tuple(leading[-1:] if is_shared else leading)

    def rows(array: jax.Array) -> jax.Array:
        own = array.reshape(array.shape[-len(shape) - 1 :])
        return jnp.broadcast_to(own, (*shape, own.shape[-1])).reshape(-1, own.shape[-1])

    if positions is not None:
        return angle_tables(rows(given[0]).reshape(-1).astype(jnp.int32), size, theta)
    return rows(given[0]), rows(given[1])


def rotating(
    forward: Callable[[Any, Any], tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    reference: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """Returns a differentiable function of operands and tables; where tables are differentiated, by XLA.

    forward: returns the result and what `backward` needs, which returns the operands' gradients of that and of the
    result's cotangents. reference: returns the result.
    """

    def first(operands: Any, tables: Any) -> tuple[Any, Any]:
        is_wanted = any(each.perturbed for each in jax.tree.leaves(tables))
        operands, tables = jax.tree.map(lambda each: each.value, (operands, tables))
        return jax.vjp(reference, operands, tables) if is_wanted else forward(operands, tables)

    def second(saved: Any, cotangents: Any) -> tuple[Any, Any]:
        cotangents = instantiated(cotangents)
        if callable(saved):
            return saved(cotangents)  # pyright: ignore[reportReturnType]
        return backward(saved, cotangents), None

    run = jax.custom_vjp(lambda operands, tables: forward(operands, tables)[0])
    run.defvjp(first, second, symbolic_zeros=True)
    return run
