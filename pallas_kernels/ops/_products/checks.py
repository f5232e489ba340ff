"""Argument checks that all linear layers share; errors begin with the operation's name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation, get_activation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported


def optional_activation(operation: str, name: str | None) -> Activation | None:
    """Looks up an activation by name; None gives None. Raises ValueError for an unknown name."""
    return None if name is None else get_activation(operation, name)


def check_operands(operation: str, **operands: jax.Array) -> None:
    """Raises TypeError unless the operands, by their names, are floating and have the first one's dtype."""
    (first, x), *_ = operands.items()
    for name, array in operands.items():
        _check_floating(operation, name, array)
        if array.dtype != x.dtype:
            raise TypeError(
                f"{operation}: {name} must have {first}'s dtype {x.dtype.name}, got {array.dtype.name}; cast one of "
                "them."
            )


def check_weight(
    operation: str, name: str, shape: tuple[int, ...], x: jax.Array, *, of: str = "x", columns: str = "outputs"
) -> None:
    """Raises ValueError unless a weight's shape is (features, columns) with the features of x (..., features).

    of: x's name.
    """
    if x.ndim == 0:
        raise ValueError(f"{operation}: {of} must have a features axis, got a scalar; reshape it to (1,).")
    if len(shape) != 2 or shape[0] != x.shape[-1]:
        raise ValueError(
            f"{operation}: {name} must be (features, {columns}) with the features of {of} {x.shape}, got {shape}."
        )


def check_bias(operation: str, bias: jax.Array | None, outputs: int, *, name: str = "bias") -> None:
    """Raises TypeError or ValueError unless the bias is floating, with one value per output."""
    if bias is None:
        return
    _check_floating(operation, name, bias)
    if bias.shape != (outputs,):
        raise ValueError(f"{operation}: {name} must be one value an output, shape {(outputs,)}, got {bias.shape}.")


def vector_unsupported(name: str, vector: jax.Array | None) -> str | None:
    """Returns why the kernels cannot read a bias or scale vector, or None if they can."""
    if vector is None or vector.dtype.itemsize <= 4:
        return None
    return f"{name} is {vector.dtype.name}, the kernels take at most float32"


def linear_unsupported(x: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> str | None:
    """Returns why the kernels cannot compute a linear layer's epilogue here, or None if they can."""
    if out_dtype not in (x.dtype, jnp.float32):
        return f"the result is {out_dtype.name}, the kernels give {x.dtype.name} or float32"
    return vector_unsupported("bias", bias) or mosaic_gpu_unsupported()


def _check_floating(operation: str, name: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{operation}: {name} must be floating, got {array.dtype.name}; cast it first.")
