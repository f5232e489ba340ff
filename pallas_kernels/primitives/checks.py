"""Checks of operations' arguments. Messages begin with the operation's name."""

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
    """The values as JAX arrays. TypeError, with the argument's name, for anything else, and for floats of 8 bits, which
    JAX promotes to nothing."""
    return tuple(_as_array(operation, name, value) for name, value in values.items())


def optional_arrays(operation: str, **values: Any) -> tuple[jax.Array | None, ...]:
    """The values as JAX arrays, where None stays None."""
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
    # Kernels' results are never weakly typed: those of "xla" shall not be, either.
    return array.astype(array.dtype) if array.weak_type else array


def check_width(operation: str, name: str, dtype: jnp.dtype) -> None:
    """TypeError for floats of 8 bits."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
        raise TypeError(f"{operation}: {name} is {dtype.name}; cast it to a float of 16 bits or more first.")


def static_number(operation: str, name: str, value: Any) -> float:
    """The value as a float. TypeError unless it is a number that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "number"))
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{operation}: {name} must be a number, got {value!r}.")


def finite_number(operation: str, name: str, value: Any) -> float:
    """The value as a finite float. TypeError as `static_number`; ValueError for infinity and NaN."""
    number = static_number(operation, name, value)
    if not math.isfinite(number):
        raise ValueError(f"{operation}: {name} must be finite, got {value!r}.")
    return number


def added_number(operation: str, name: str, value: Any) -> float:
    """The value as a finite float that is not negative. TypeError as `static_number`; ValueError for others."""
    number = static_number(operation, name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{operation}: {name} must be finite and not negative, got {value!r}.")
    return number


def positive_number(operation: str, name: str, value: Any) -> float:
    """The value as a finite float above zero. TypeError as `static_number`; ValueError for others."""
    number = static_number(operation, name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{operation}: {name} must be positive and finite, got {value!r}.")
    return number


def static_integer(operation: str, name: str, value: Any) -> int:
    """The value as an int. TypeError unless it is an integer that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "integer"))
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}.") from error


def static_flag(operation: str, name: str, value: Any) -> bool:
    """The value as a bool. TypeError unless it is one truth value or integer that is not traced."""
    if isinstance(value, Tracer):
        raise TypeError(_static(operation, name, "boolean"))
    try:
        return bool(operator.index(value))  # also of bool; not of strings, numbers with a fraction and None
    except TypeError:
        pass
    if isinstance(value, np.bool_ | np.ndarray | jax.Array) and value.dtype == np.bool_ and not value.shape:
        return bool(value)
    raise TypeError(f"{operation}: {name} must be True or False, got {_description(value)}.")


def dropout_words(
    operation: str, rate: Any, key: jax.Array | None, *, rate_name: str = "dropout_rate", key_name: str = "dropout_key"
) -> jax.Array | None:
    """The key's words, None without dropout. TypeError or ValueError where rate or key is neither."""
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
    """The type of an array; the `repr` of anything else."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{value.dtype.name}{list(value.shape)}" if is_array else repr(value)


def _static(operation: str, name: str, kind: str) -> str:
    return (
        f"{operation}: {name} must be a Python {kind}, got a traced array. Kernels are compiled for one value: close "
        "over it, or name it in jax.jit's static_argnames."
    )
