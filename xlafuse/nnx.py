"""`flax.nnx` modules that call fused operations.

Each is a subclass with Flax's constructor, parameters and initializers, so that checkpoints load. Flax computes what an
operation cannot. Each has an attribute `implementation`: None takes the best that runs; other values are those of
`xlafuse.kernels`. If it names only kernels, a call that the operation cannot compute raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from pallas_kernels.primitives.activations import get_activation
from xlafuse.attention import dot_product_attention
from xlafuse.errors import check_left_to_xla
from xlafuse.kernels import attention, batch_norm, layer_norm, linear, rms_norm

__all__ = ["BatchNorm", "LayerNorm", "Linear", "RMSNorm", "attention_fn"]

Implementation = str | Sequence[str] | None


def _norm_call(flax: Callable[..., Any], operation: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Makes the method of a norm over the last axis. flax: Flax's own; names: the norm's parameters."""

    def __call__(self: Any, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """Normalizes x (..., features), or x + residual if a residual is given.

        Returns:
            y, like Flax; with a residual the pair (y, x + residual).

        Raises:
            NotImplementedError: `implementation` cannot compute this call, with the reason.
        """
        arrays = (x, *(_value(getattr(self, name)) for name in names))
        promoted, scale, *bias = self.promote_dtype(arrays, dtype=self.dtype)
        reason = _norm_unsupported(self, promoted, mask, axes=(self.reduction_axes, self.feature_axes))
        if residual is not None and (reason is not None or not residual.dtype == x.dtype == promoted.dtype):
            total = x + residual
            return self(total, mask=mask), total
        if reason is not None:
            _check_left_to_flax(self, reason)
            return flax(self, x, mask=mask)
        given: dict[str, Any] = {} if residual is None else {"residual": residual}
        scale = jnp.ones(x.shape[-1:], promoted.dtype) if scale is None and not bias else scale
        return operation(promoted, scale, *bias, epsilon=self.epsilon, implementation=self.implementation, **given)

    return __call__


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` on `xlafuse.kernels.rms_norm`.

    Flax computes masked statistics, means over devices (`axis_name`), and axes other than the last one.
    """

    implementation: Implementation = None
    __call__ = _norm_call(nnx.RMSNorm.__call__, rms_norm, ("scale",))


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` on `xlafuse.kernels.layer_norm`.

    The variance is that of `use_fast_variance=False`, which loses no digits if the mean is large. Flax computes masked
    statistics, means over devices (`axis_name`), and axes other than the last one.
    """

    implementation: Implementation = None
    __call__ = _norm_call(nnx.LayerNorm.__call__, layer_norm, ("scale", "bias"))


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with its training step on `xlafuse.kernels.batch_norm`.

    The variance is that of `use_fast_variance=False`. Flax computes calls that use the running averages, masked
    statistics, means over devices (`axis_name`), and axes other than the last one.
    """

    implementation: Implementation = None

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalizes x (..., features) and updates the running averages.

        Raises:
            NotImplementedError: `implementation` cannot compute this call, with the reason.
        """
        uses_average = self.use_running_average if use_running_average is None else use_running_average
        if uses_average or uses_average is None:
            return super().__call__(x, use_running_average, mask=mask)
        arrays = (x, self.mean[...], self.var[...], _value(self.scale), _value(self.bias))
        promoted, _, _, scale, bias = self.promote_dtype(arrays, dtype=self.dtype)
        reason = _norm_unsupported(self, promoted, mask, axes=(self.axis,))
        if reason is None and x.ndim < 2:
            reason = "the operation computes statistics over leading axes, and x has none"
        if reason is not None:
            _check_left_to_flax(self, reason)
            return super().__call__(x, use_running_average, mask=mask)
        scale = jnp.ones(x.shape[-1:], promoted.dtype) if scale is None else scale
        bias = jnp.zeros(x.shape[-1:], promoted.dtype) if bias is None else bias
        y, mean, variance = batch_norm(promoted, scale, bias, epsilon=self.epsilon, implementation=self.implementation)
        for average, new in ((self.mean, mean), (self.var, variance)):
            average[...] = jax.lax.stop_gradient(self.momentum * average[...] + (1 - self.momentum) * new)
        return y


class Linear(nnx.Linear):
    """`flax.nnx.Linear` on `xlafuse.kernels.linear`, with an activation and a residual in the same launch.

    Flax computes layers that have a `precision`, a `dot_general`, a `preferred_element_type` or a sharding of their
    own.
    """

    implementation: Implementation = None

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        activation: str | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Computes activation(inputs @ kernel + bias) + residual.

        Args:
            inputs: (..., in_features).
            out_sharding: Flax's argument.
            activation: "gelu", "gelu_tanh", "quick_gelu", "silu", "relu" or "relu_squared"; None: none.
            residual: (..., out_features), shaped like the result; None: none.

        Raises:
            ValueError: an unknown activation.
            NotImplementedError: `implementation` cannot compute this call, with the reason.
        """
        reason = self._unsupported(out_sharding)
        if reason is None:
            x, w, bias = self.promote_dtype((inputs, self.kernel[...], _value(self.bias)), dtype=self.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating):
                return linear(
                    x, w, bias=bias, activation=activation, residual=residual, implementation=self.implementation
                )
            reason = f"the product is of {x.dtype.name}"
        _check_left_to_flax(self, reason)
        y = super().__call__(inputs, out_sharding)
        if activation is not None:
            wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
            y = get_activation("Linear", activation).reference(wide).astype(y.dtype)
        return y if residual is None else y + residual

    def _unsupported(self, out_sharding: Any) -> str | None:
        own = {
            "precision": self.precision is not None,
            "dot_general": self.dot_general is not jax.lax.dot_general,
            "preferred_element_type": self.preferred_element_type is not None,
            "out_sharding": out_sharding is not None,
        }
        return next((f"the operation has no {name}" for name, is_given in own.items() if is_given), None)


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Any = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes `flax.nnx.dot_product_attention` with `xlafuse.kernels.attention`.

        nnx.MultiHeadAttention(8, 512, attention_fn=xlafuse.nnx.attention_fn, rngs=rngs)

    Dropout draws the masks that Flax draws. Flax computes calls that keep the attention weights (`module`), dropout
    that comes with a `precision`, and values whose head size differs from the keys'.

    Args:
        query, key, value: (batch..., length, heads, head size); key and value may have fewer heads.
        bias, mask: broadcastable to (batch..., heads, queries, keys); True or 1 keeps a score.
        broadcast_dropout, dropout_rng, dropout_rate, deterministic: Flax's arguments.
        dtype, precision, module, promote_dtype, is_causal: Flax's arguments.
        implementation: that of `xlafuse.dot_product_attention`.

    Raises:
        ValueError: dropout without a key, or arrays that do not belong together.
        NotImplementedError: the requested implementation cannot run, with the reason.
    """
    has_dropout = dropout_rate > 0 and not deterministic
    reasons = {
        "the attention weights are kept": module is not None,
        "the operation has no precision": precision is not None and has_dropout,
        "values have another head size": query.shape[-1] != value.shape[-1],
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if has_dropout and dropout_rng is None:
        raise ValueError(f"attention_fn: dropout_rate is {dropout_rate}; pass dropout_rng=jax.random.key(...) with it.")
    if reason is not None:
        check_left_to_xla("attention_fn", implementation, reason)
        return nnx.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic,
            dtype, precision, module, promote_dtype, is_causal,
        )  # fmt: skip
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    mask = None if mask is None else mask.astype(bool)
    shape = query.shape
    query, key, value, bias, mask = (_with_one_batch(each, shape[:-3]) for each in (query, key, value, bias, mask))
    if has_dropout and dropout_rng is not None:
        queries, heads = shape[-3:-1]
        leading = (1,) * (len(shape) - 2) if broadcast_dropout else (*shape[:-3], heads)
        keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, (*leading, queries, key.shape[1]))
        lowest = None if mask is None else float(jnp.finfo(jnp.float32).min)
        out: Any = attention(
            query, key, value, bias=bias, mask=mask, mask_value=lowest, is_causal=is_causal,
            dropout_mask=_with_one_batch(keep, shape[:-3]), dropout_rate=dropout_rate, implementation=implementation,
        )  # fmt: skip
    else:
        out = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, implementation=implementation)
    return out.reshape(shape)


def _with_one_batch(array: jax.Array | None, batch: tuple[int, ...]) -> Any:
    """Reshapes (batch..., a, b, c) to (batch, a, b, c), or to (1, a, b, c) where no batch axis is longer than 1."""
    if array is None:
        return None
    array = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    if any(size > 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _norm_unsupported(norm: Any, x: jax.Array, mask: Any, *, axes: Sequence[Any]) -> str | None:
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        return f"x is {x.dtype.name}{list(x.shape)}, and the operation takes floating rows"
    if mask is not None:
        return "the operation has no mask"
    if norm.axis_name is not None:
        return f"the operation takes no means over devices, axis_name is {norm.axis_name!r}"
    for each in axes:
        if tuple(each if isinstance(each, Sequence) else (each,)) not in ((-1,), (x.ndim - 1,)):
            return f"the operation normalizes along the last axis, not along {each}"
    return None


def _value(variable: Any) -> jax.Array | None:
    return None if variable is None else variable[...]


def _check_left_to_flax(module: Any, reason: str) -> None:
    check_left_to_xla(type(module).__name__, module.implementation, reason)


def __dir__() -> list[str]:
    return sorted(__all__)
