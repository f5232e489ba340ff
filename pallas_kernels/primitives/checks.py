"""Checks the arguments of operations. Messages begin with the operation's name."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.primitives.random import check_rate, key_words


def as_arrays(operation: str, **values: Any) -> tuple[jax.Array, ...]:
    """Returns the values as JAX arrays.

    Raises TypeError, with the argument's name, for anything else and for 8-bit floats, which JAX does not promote.
    """
    return tuple(_as_array(operation, name, value) for name, value in values.items())


def optional_arrays(operation: str, **values: Any) -> tuple[jax.Array | None, ...]:
    """Returns the values as JAX arrays, and None for None."""
    return tuple(None if value is None else _as_array(operation, name, value) for name, value in values.items())


def _as_array(operation: str, name: str, value: Any) -> jax.Array:
    if value is None:
        raise TypeError(f"{operation}: {name} must be an array, got None.")
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{operation}: {name} must be an array, got {type(value).__name__}: {error}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{operation}: {name} must be an array of numbers, got a key {array.dtype.name}.")
    check_width(operation, name, array.dtype)
    # Kernels' results are never weakly typed, so those of "xla" must not be, either.
    return array.astype(array.dtype) if array.weak_type else array


def as_int32(indices: jax.Array) -> jax.Array:
    """Casts the indices; those that int32 cannot hold stay out of range."""
    own, wanted = jnp.iinfo(indices.dtype), jnp.iinfo(jnp.int32)
    if own.min < wanted.min or own.max > wanted.max:
        indices = jnp.clip(indices, max(own.min, wanted.min), min(own.max, wanted.max))
    return indices.astype(jnp.int32)


def check_width(operation: str, name: str, dtype: jnp.dtype) -> None:
    """Raises TypeError for 8-bit floats."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
        raise TypeError(f"{operation}: {name} is {dtype.name}; cast it to a float of 16 bits or more first.")


def static_number(operation: str, name: str, value: Any) -> float:
    """Returns the value as a float. Raises TypeError unless it is a number that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "number"))
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{operation}: {name} must be a number, got {value!r}.")


def finite_number(operation: str, name: str, value: Any) -> float:
    """Returns the value as a finite float. Raises TypeError like `static_number`, ValueError for infinity and NaN."""
    number = static_number(operation, name, value)
    if not math.isfinite(number):
        raise ValueError(f"{operation}: {name} must be finite, got {value!r}.")
    return number


def added_number(operation: str, name: str, value: Any) -> float:
    """Returns the value as a finite, non-negative float. Raises TypeError like `static_number`, else ValueError."""
    number = static_number(operation, name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{operation}: {name} must be finite and not negative, got {value!r}.")
    return number


def positive_number(operation: str, name: str, value: Any) -> float:
    """Returns the value as a finite float above zero. Raises TypeError like `static_number`, else ValueError."""
    number = static_number(operation, name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{operation}: {name} must be positive and finite, got {value!r}.")
    return number


def static_integer(operation: str, name: str, value: Any) -> int:
    """Returns the value as an int. Raises TypeError unless it is an integer that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "integer"))
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}.") from error


def static_flag(operation: str, name: str, value: Any) -> bool:
    """Returns the value as a bool. Raises TypeError unless it is one boolean or integer that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "boolean"))
    try:
        return bool(operator.index(value))  # accepts bool; rejects strings, floats and None
    except TypeError:
        pass
    if isinstance(value, np.bool_ | np.ndarray | jax.Array) and value.dtype == np.bool_ and not value.shape:
        return bool(value)
    raise TypeError(f"{operation}: {name} must be True or False, got {_description(value)}.")


def dropout_words(
    operation: str, rate: Any, key: jax.Array | None, *, rate_name: str = "dropout_rate", key_name: str = "dropout_key"
) -> jax.Array | None:
    """Returns the key's words, or None without dropout. Raises TypeError or ValueError for an invalid rate or key."""
    number = static_number(operation, rate_name, rate)
    try:
        check_rate(number)
    except ValueError as error:
        raise ValueError(f"{operation}: {rate_name} is {rate}; {error}") from error
    if not number:
        return None
    if key is None:
        raise ValueError(f"{operation}: {rate_name} is {rate}; pass {key_name}=jax.random.key(...) with it.")
    try:
        return key_words(key)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: {key_name}: {error}") from error
    except OverflowError as error:
        raise ValueError(f"{operation}: {key_name}: {error}") from error


def _description(value: Any) -> str:
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{value.dtype.name}{list(value.shape)}" if is_array else repr(value)


def _static(operation: str, name: str, kind: str) -> str:
    return (
        f"{operation}: {name} must be a Python {kind}, got a traced array. Kernels are compiled for one value: close "
        "over it, or name it in jax.jit's static_argnames."
    )


def check_floating(operation: str, **arrays: jax.Array | None) -> None:
    """Raises TypeError unless the arrays, those that are not None, are floating."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} must be floating, got {array.dtype.name}; cast it first.")


def check_like(operation: str, name: str, array: jax.Array | None, of: str, other: jax.Array) -> None:
    """Raises ValueError unless the array, if it is not None, has the other one's shape and dtype. of: its name."""
    if array is not None and (array.shape, array.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"{operation}: {name} must be like {of}, {_description(other)}, got {_description(array)}; broadcast or "
            "cast it first."
        )


def check_features(operation: str, x: jax.Array, **parameters: jax.Array | None) -> None:
    """Raises TypeError unless x and the parameters are floating, ValueError unless they have one value a feature of x.

    A parameter may be None.
    """
    check_floating(operation, x=x, **parameters)
    for name, array in parameters.items():
        if array is not None and array.shape != x.shape[-1:]:
            raise ValueError(
                f"{operation}: {name} must be {x.shape[-1:]}, one value a feature of x {x.shape}, got {array.shape}."
            )


def check_lookup(operation: str, modes: tuple[str, ...], mode: str, table: jax.Array, **indices: jax.Array) -> None:
    """Raises a TypeError or ValueError, in the operation's name, for a mode, table or indices that it does not take."""
    if mode not in modes:
        raise ValueError(f"{operation}: mode must be one of {', '.join(map(repr, modes))}, got {mode!r}.")
    check_floating(operation, table=table)
    if table.ndim != 2 or not table.shape[0]:
        raise ValueError(f"{operation}: table must be (rows, features) with a row, got {table.shape}.")
    for name, array in indices.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} must be integers, got {array.dtype.name}.")
