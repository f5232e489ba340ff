"""A norm before a product: as a separate launch, as a factor of the product's rows, or in the product's launch.

A scale per feature must be applied before the product's sum. A row kernel multiplies by it, and then divides by the
root mean square for free: 32 µs on an H200 for 8192 rows of 4096, at the speed of a copy. Without a scale, the division
is a factor of each row that the product's epilogue applies. Then only the factor needs a pass over x, and none if the
mean squares are given. Few rows have their norm in the product's launch, because a separate one takes 1.5 to 2 µs, as
long as reading 8 MB of weights. The backward pass needs the normalised x and uses the separate launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Norm
from pallas_kernels.ops.norms import api as norms
from pallas_kernels.ops.norms.norm import StaticNorm
from pallas_kernels.ops.norms.reference import norm_reference as row_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, static_flag
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.norm import PrologueNorm
from pallas_kernels.primitives.gradients import differentiated_as
from pallas_kernels.primitives.settings import usual_promotion


def check_norm(operation: str, norm: Norm | None, x: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises TypeError or ValueError for a norm that does not fit x (..., features)."""
    if norm is None:
        return
    if not isinstance(norm, Norm):
        raise TypeError(f"{operation}: norm must be a pallas_kernels.Norm or None, got {type(norm).__name__}.")
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"{operation}: a norm's kind is 'rms' or 'layer', got {norm.kind!r}.")
    added_number(operation, "the norm's epsilon", norm.epsilon)
    static_flag(operation, "the norm's rounds_before_scale", norm.rounds_before_scale)
    for name, array in (("scale", norm.scale), ("bias", norm.bias), ("mean_square", norm.mean_square)):
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise TypeError(f"{operation}: the norm's {name} must be an array, got {type(array).__name__}.")
        if not jnp.issubdtype(jnp.asarray(array).dtype, jnp.floating):
            raise TypeError(f"{operation}: the norm's {name} must be floating, got {jnp.asarray(array).dtype.name}.")
        if name != "mean_square" and jnp.shape(array) != x.shape[-1:]:
            raise ValueError(
                f"{operation}: the norm's {name} must be ({x.shape[-1]},), one value a feature of x {x.shape}, got "
                f"{jnp.shape(array)}."
            )
    if norm.kind == "rms" and norm.bias is not None:
        raise ValueError(f"{operation}: an 'rms' norm has no bias; add it after the product.")
    if norm.mean_square is None:
        return
    if norm.kind != "rms":
        raise ValueError(f"{operation}: mean squares are of use to an 'rms' norm only; leave them out.")
    if jnp.shape(norm.mean_square) != x.shape[:-1]:
        raise ValueError(
            f"{operation}: the norm's mean_square must be one a row, {x.shape[:-1]}, got {jnp.shape(norm.mean_square)}."
        )


def norm_unsupported(norm: Norm | None, x: jax.Array) -> str | None:
    """Returns why the row kernels cannot take the norm's arrays, or None."""
    if norm is None:
        return None
    return norms.mosaic_unsupported(x, norm.scale, norm.bias)


def normalised(norm: Norm | None, x: jax.Array) -> jax.Array:
    """Returns the rows that the weights multiply, rounded to x's dtype. Differentiable.

    x: (rows, features). The norm has been checked.
    """
    if norm is None:
        return x
    if norm.mean_square is not None:
        # The gradient keeps x, not its float32 values.
        return jax.checkpoint(norm_reference)(replace(norm, mean_square=norm.mean_square.reshape(-1)), x)
    static = StaticNorm(
        name="rms_norm" if norm.kind == "rms" else "layer_norm",
        epsilon=float(norm.epsilon),
        rounds_before_scale=norm.rounds_before_scale,
    )
    scale, bias = (None if each is None else jnp.asarray(each) for each in (norm.scale, norm.bias))
    return norms.apply_norm(static, "mosaic", False, x, scale, bias)[0]  # pyright: ignore[reportIndexIssue]


def norm_reference(norm: Norm | None, x: jax.Array) -> jax.Array:
    """Computes the normalised x in plain `jax.numpy`, rounded to x's dtype, as `"xla"` multiplies it."""
    if norm is None:
        return x
    options: dict[str, Any] = {"epsilon": norm.epsilon, "rounds_before_scale": norm.rounds_before_scale}
    if (squares := norm.mean_square) is not None:
        options["mean"] = lambda value: jnp.asarray(squares).astype(value.dtype)[..., None]
    y = row_reference(x, norm.scale, norm.bias, is_centered=norm.kind == "layer", **options)
    assert isinstance(y, jax.Array)
    return y


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes (..., features) to (rows, features). With more, XLA on CPUs sums products' gradients in bfloat16."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def is_fusable(norm: Norm | None, x: jax.Array) -> bool:
    """Whether the kernel for few rows can compute the norm of x: an RMS norm of bfloat16 without given mean squares."""
    return norm is not None and norm.kind == "rms" and norm.mean_square is None and x.dtype == jnp.bfloat16


def before_product(norm: Norm | None, x: jax.Array, config: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the rows for a product's kernel without gradient, and its `norm=` or `row_scale=`; each may be None.

    The norm is in the launch if it can be and the configuration asks for it.
    """
    if is_fusable(norm, x) and isinstance(config, FewRowsConfig) and config.fuses_norm:
        assert norm is not None
        scale = None if norm.scale is None else jnp.asarray(norm.scale)
        return x, {"norm": PrologueNorm(epsilon=float(norm.epsilon), scale=scale)}
    if norm is not None and norm.mean_square is not None and norm.scale is None:
        return x, {"row_scale": lax.rsqrt(norm.mean_square.reshape(-1).astype(jnp.float32) + norm.epsilon)}
    return normalised(norm, x), {}


def after_norm(
    differentiable: Callable[..., Any], forward: Callable[..., Any], norm: Norm | None, x: jax.Array, *operands: Any
) -> Any:
    """Returns a product of x's normalised rows: in one launch where no gradient is taken, if that is possible.

    differentiable: computes the product from normalised rows and the operands. forward: computes it from rows, the norm
    and the operands by `product`.
    """

    def apart(x, norm, *operands):
        return differentiable(normalised(norm, x), *operands)

    return differentiated_as(apart, forward)(x, norm, *operands)


@usual_promotion()
def fold_scale(norm: Norm, *weights: jax.Array) -> tuple[Norm, tuple[jax.Array, ...]]:
    """Folds a norm's scale into the rows of the weights after it.

    Use this for weights that do not change from call to call, as in decoding. Done once, it saves every call the pass
    over x that multiplies by the scale. In a training step it would cost a pass over the weights, which is longer.

    Args:
        norm: a norm with a scale (features,) and no bias.
        weights: (features, outputs) each.

    Returns:
        `norm` with `scale=None`, and the scaled weights, rounded to their dtypes.

    Raises:
        TypeError: norm is no `Norm`, or a weight is no floating array.
        ValueError: the norm has no scale or has a bias, the scale is not floating and (features,), or a weight has
            another number of rows.
    """
    if not isinstance(norm, Norm):
        raise TypeError(f"fold_scale: norm must be a pallas_kernels.Norm, got {type(norm).__name__}.")
    if norm.scale is None or norm.bias is not None:
        raise ValueError(f"fold_scale: the norm must have a scale and no bias, got {norm}.")
    (scale,) = as_arrays("fold_scale", **{"the norm's scale": norm.scale})
    if scale.ndim != 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"fold_scale: the norm's scale must be floating, (features,), got {scale.dtype.name}{list(scale.shape)}."
        )
    folded = []
    for weight in as_arrays("fold_scale", **{f"weight {i}": weight for i, weight in enumerate(weights)}):
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            raise TypeError(f"fold_scale: weights must be floating, got {weight.dtype.name}; fold before quantizing.")
        if weight.ndim != 2 or weight.shape[0] != scale.shape[0]:
            raise ValueError(f"fold_scale: a weight must be ({scale.shape[0]}, outputs), got {weight.shape}.")
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        folded.append((weight.astype(wide) * scale.astype(wide)[:, None]).astype(weight.dtype))
    return replace(norm, scale=None), tuple(folded)
