"""The public functions: checks and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_operands, optional_activation
from pallas_kernels.ops.grouped_linear.mosaic_gpu import grouped_gated_linear_mosaic, grouped_linear_mosaic
from pallas_kernels.ops.grouped_linear.reference import grouped_gated_linear_reference, grouped_linear_reference
from pallas_kernels.ops.linear.reference import given_product
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.checks import as_arrays, as_int32, optional_arrays, static_flag
from pallas_kernels.primitives.gemm.operands import COLUMNS, DTYPES, FEWEST_OUTPUTS
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike


def _dimensions(arguments: Mapping[str, Any]) -> str:
    weights = "+g n k" if arguments["transpose"] else "+g k n"
    return f"x: m +k, w: {weights}, group_sizes: sizes of m, bias: g n -> m n"


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where features or groups are cut: bias and activation follow the sum over features."""

    def layer(given: Mapping[str, Any]) -> jax.Array:
        if "k" not in sums:
            return grouped_linear(**given)
        product = sums["k"].total(grouped_linear(**{**given, "bias": None, "activation": None}))
        others = {name: given[name] for name in ("w", "group_sizes", "bias", "activation")}
        return grouped_linear_reference(product, **others, multiply=given_product)

    return _of_own_groups(layer, arguments, sums)


def _of_own_groups(
    layer: Callable[[Mapping[str, Any]], jax.Array], arguments: Mapping[str, Any], sums: Mapping[str, Any]
) -> jax.Array:
    """Computes a grouped layer where groups may be cut: rows of other devices' groups are zeros in the sum."""
    if "g" not in sums:
        return layer(arguments)
    rows, sizes = arguments["x"].shape[0], arguments["group_sizes"]
    groups = sizes.size // lax.axis_size(sums["g"].axes)
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes.astype(jnp.int32), 0, rows)), rows)
    first = lax.axis_index(sums["g"].axes) * groups
    start = jnp.where(first > 0, ends[first - 1], 0)
    own = jnp.diff(ends[first + jnp.arange(groups)], prepend=start)
    x = jnp.roll(arguments["x"], -start, axis=0)  # the groups' rows come first
    return sums["g"].total(jnp.roll(layer({**arguments, "x": x, "group_sizes": own}), start, axis=0))


@operation(_dimensions, _from_parts)
def grouped_linear(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    transpose: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows by its own weights, as a layer of experts does with sorted tokens.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        y = activation(jax.lax.ragged_dot(x, w, group_sizes) + bias[group of each row])     # zero in rows of no group

    The sizes are data: calls with other sizes run the same program. XLA multiplies all rows by the weights of every
    group on a GPU, which takes as many times the arithmetic as there are groups. Gradients are kernels, too: one launch
    for x, and one for all groups' weights, zero for groups without rows. An infinite or NaN value of the cotangent may
    make the gradient of the weights of a neighbouring group NaN, too.

    Args:
        x: (rows, features), sorted by group; bfloat16 or float16 (any floating dtype with "xla").
        w: (groups, features, outputs), of x's dtype; with `transpose` (groups, outputs, features).
        group_sizes: (groups,), integers: the rows of each group, one group after the other. Rows behind the last group
            give zeros. Negative sizes count as zero, and groups end at the last row.
        bias: (groups, outputs), any floating dtype, or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        transpose: whether the weights are stored transposed.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, and at least 128.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        y, (rows, outputs), of x's dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022,
    https://arxiv.org/abs/2211.15841
    """
    x, w, group_sizes = as_arrays("grouped_linear", x=x, w=w, group_sizes=group_sizes)
    (bias,) = optional_arrays("grouped_linear", bias=bias)
    transpose = static_flag("grouped_linear", "transpose", transpose)
    function = optional_activation("grouped_linear", activation)
    _check_groups("grouped_linear", x, {"w": w}, group_sizes, transpose=transpose)
    outputs = w.shape[1 if transpose else 2]
    _check_group_bias("grouped_linear", "bias", bias, (w.shape[0], outputs))
    support = {"mosaic": partial(mosaic_unsupported, x, outputs), "xla": lambda: None}
    chosen = choose("grouped_linear", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0 or w.size == 0:
        options = {"bias": bias, "activation": activation, "transpose": transpose}
        return grouped_linear_reference(x, w, group_sizes, **options)
    operands = varying_alike((x, w, bias, as_int32(group_sizes)))
    y: jax.Array = grouped_linear_mosaic(function, transpose, *operands)  # pyright: ignore
    return y


def _gated_from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Computes the layer where groups are cut."""
    return _of_own_groups(lambda given: grouped_gated_linear(**given), arguments, sums)


_GATED_DIMENSIONS = "x: m k, w_gate: +g k n, w_up: g k n, bias_gate: g n, bias_up: g n, group_sizes: sizes of m -> m n"


@operation(_GATED_DIMENSIONS, _gated_from_parts)
def grouped_gated_linear(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows by its own gate and up weights: `gated_linear` of an expert.

    Equivalent to this, with products accumulated in float32 and float32 between the casts:

        gate, up = (jax.lax.ragged_dot(x, w, group_sizes) for w in (w_gate, w_up))
        of = group of each row
        y = activation(gate + bias_gate[of]) * (up + bias_up[of])  # zero in rows of no group

    One launch computes both products and the gating. A call that is differentiated keeps both products, and has a
    launch of its own for the gating, forward and backward; then one for x, and one for each of the weights.

    Args:
        x: (rows, features), sorted by group; bfloat16 or float16 (any floating dtype with "xla").
        w_gate: (groups, features, outputs), of x's dtype.
        w_up: an array of w_gate's shape and dtype.
        group_sizes: (groups,), integers; see `grouped_linear`.
        bias_gate, bias_up: (groups, outputs), any floating dtype, each None for none.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs must
            be multiples of 64, and at least 128.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        y, (rows, outputs), of x's dtype; zero in rows of no group.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: see `grouped_linear` and `gated_linear`.
    """
    x, w_gate, w_up, group_sizes = as_arrays(
        "grouped_gated_linear", x=x, w_gate=w_gate, w_up=w_up, group_sizes=group_sizes
    )
    biases = optional_arrays("grouped_gated_linear", bias_gate=bias_gate, bias_up=bias_up)
    function = get_activation("grouped_gated_linear", activation)
    _check_groups("grouped_gated_linear", x, {"w_gate": w_gate, "w_up": w_up}, group_sizes)
    for name, bias in zip(("bias_gate", "bias_up"), biases, strict=True):
        _check_group_bias("grouped_gated_linear", name, bias, (w_gate.shape[0], w_gate.shape[2]))
    support = {"mosaic": partial(mosaic_unsupported, x, w_gate.shape[2]), "xla": lambda: None}
    chosen = choose("grouped_gated_linear", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0 or w_gate.size == 0:
        given = {"bias_gate": biases[0], "bias_up": biases[1]}
        return grouped_gated_linear_reference(x, w_gate, w_up, group_sizes, activation=activation, **given)
    operands = varying_alike((x, w_gate, w_up, tuple(biases), as_int32(group_sizes)))
    y: jax.Array = grouped_gated_linear_mosaic(function, *operands)  # pyright: ignore
    return y


def mosaic_unsupported(x: jax.Array, outputs: int) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if x.dtype.name not in DTYPES:
        return f"x is {x.dtype.name}, the kernels take {', '.join(DTYPES)}"
    for name, size in (("features", x.shape[1]), ("outputs", outputs)):
        if size % COLUMNS or size < FEWEST_OUTPUTS:
            return f"there are {size} {name}; the kernels take multiples of {COLUMNS}, and at least {FEWEST_OUTPUTS}"
    return mosaic_gpu_unsupported()


def _check_group_bias(operation: str, name: str, bias: jax.Array | None, shape: tuple[int, int]) -> None:
    """Raises ValueError unless the bias, if there is one, is floating and of the shape (groups, outputs)."""
    if bias is not None and (bias.shape != shape or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{operation}: {name} must be floating, {shape} as the weights' groups and outputs, got "
            f"{bias.dtype.name}{list(bias.shape)}."
        )


def _check_groups(
    operation: str, x: jax.Array, weights: dict[str, jax.Array], group_sizes: jax.Array, *, transpose: bool = False
) -> None:
    """Raises TypeError or ValueError unless weights, by name, and sizes fit x and one another."""
    check_operands(operation, x=x, **weights)
    if x.ndim != 2:
        raise ValueError(f"{operation}: x must be (rows, features), rows sorted by group, got {x.shape}.")
    shape = "(groups, outputs, features)" if transpose else "(groups, features, outputs)"
    for name, w in weights.items():
        if w.ndim != 3 or w.shape[2 if transpose else 1] != x.shape[1]:
            raise ValueError(f"{operation}: {name} must be {shape} with the features of x {x.shape}, got {w.shape}.")
        if w.shape != (first := next(iter(weights.values()))).shape:
            raise ValueError(f"{operation}: {name} must be like {next(iter(weights))} {first.shape}, got {w.shape}.")
        if group_sizes.shape != w.shape[:1]:
            raise ValueError(
                f"{operation}: group_sizes must be one size a group, {w.shape[:1]}, got {group_sizes.shape}."
            )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"{operation}: group_sizes must be integers, got {group_sizes.dtype.name}.")
