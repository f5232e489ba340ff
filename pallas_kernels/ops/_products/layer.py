"""A linear layer and its arrays, as its operations pass them from the public function to the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.ops._products.checks import check_bias, check_operands, check_weight, optional_activation
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.checks import as_arrays, check_width, optional_arrays


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The static parameters of activation(x @ w + bias) + residual. out_dtype: the result's.

    A new parameter of the layer is a field here. The wrappers between the public functions and the launch do not name
    it.
    """

    activation: Activation | None = None
    out_dtype: jnp.dtype


class LayerArrays(NamedTuple):
    """The arrays of a linear layer.

    x: (..., features). w: (features, outputs), or a `QuantizedWeight`. bias: (outputs,). residual: (..., outputs).
    """

    x: jax.Array
    w: Any
    bias: jax.Array | None = None
    residual: jax.Array | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to multiply."""
        return self.x.size > 0 and self.w.shape[1] > 0

    def by_rows(self) -> LayerArrays:
        """Returns the arrays with the leading dimensions as rows."""
        return self._replace(x=as_rows(self.x), residual=None if self.residual is None else as_rows(self.residual))


def checked_layer(
    operation: str,
    x: jax.Array,
    w: Any,
    *,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    is_quantized: bool = False,
) -> tuple[Layer, LayerArrays]:
    """Returns the layer of an operation's arguments, and its arrays. is_quantized: whether w has been checked.

    Raises:
        TypeError, ValueError: the arguments do not make a linear layer.
    """
    operands = as_arrays(operation, x=x) if is_quantized else as_arrays(operation, x=x, w=w)
    x, w = (*operands, w)[:2]
    bias, residual = optional_arrays(operation, bias=bias, residual=residual)
    try:  # in 32 bits where JAX has no 64-bit types
        dtype = x.dtype if out_dtype is None else jax.dtypes.canonicalize_dtype(out_dtype)
    except TypeError as error:
        raise TypeError(f"{operation}: out_dtype must be a floating dtype or None, got {out_dtype!r}.") from error
    check_operands(operation, **dict(zip("xw", operands, strict=False)))
    check_weight(operation, "w", w.shape, x)
    check_bias(operation, bias, w.shape[1])
    layer = Layer(activation=optional_activation(operation, activation), out_dtype=dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{operation}: out_dtype must be floating, got {dtype.name}; cast the result instead.")
    check_width(operation, "out_dtype", dtype)
    shape = (*x.shape[:-1], w.shape[1])
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"{operation}: residual must be like the result, {dtype.name}{list(shape)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )
    return layer, LayerArrays(x, w, bias, residual)
