"""Row-wise operations and elementwise ones: norms, softmax, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.bias_activation.reference import bias_activation_reference
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.norms.reference import layer_norm_reference, rms_norm_reference
from pallas_kernels.primitives.activations import ACTIVATIONS
from xlafuse.fusion.graph import Value, before
from xlafuse.fusion.spelling import ACTIVATION_NEEDS, Proposal, Spelling, is_narrow, is_rows, same_order, wide
from xlafuse.fusion.terms import BY_ELEMENT

_REACH = 40
_EPSILON = {"epsilon": 0.0123454321}
_SCALE = {"scale": 0.3217654321}
_ENDS = frozenset(("mul", "div", "convert_element_type", "add", "sub"))


def _rows(value: Value, *columns: str, narrow: bool = False) -> Iterator[Proposal]:
    """Proposes x like the value, and arrays of one number a column."""
    if is_rows(value):
        dtype = value.dtype if narrow else wide(value.dtype)
        own = {name: jax.ShapeDtypeStruct(value.shape[-1:], dtype) for name in columns}
        x = jax.ShapeDtypeStruct(value.shape, value.dtype)
        yield Proposal(arrays={"x": x, **own}, order=same_order(value))


def _scaled(*columns: str) -> list[Callable[[Value], Iterator[Proposal]]]:
    """Returns what proposes the arguments of norms: in float32, and if there are any columns, after rounding, too."""
    rounded = [partial(_scaled_after_rounding, columns=columns, narrow=narrow) for narrow in (True, False)]
    return [lambda value: _rows(value, *columns), *(rounded if columns else ())]


def _scaled_after_rounding(value: Value, *, columns: Sequence[str], narrow: bool) -> Iterator[Proposal]:
    """Proposes what `_rows` does for a value of 16 bits that is computed from rounded ones."""
    if is_narrow(value) and any(_is_rounded(each) for each in before(value, BY_ELEMENT, _REACH) if each is not value):
        for each in _rows(value, *columns, narrow=narrow):
            yield replace(each, static={"rounds_before_scale": True})


def _is_rounded(value: Value) -> bool:
    if value.equation is None or value.primitive != "convert_element_type":
        return False
    return is_narrow(value) and value.equation.inputs[0].dtype == wide(value.dtype)


def _without_scale(x: jax.Array, *, epsilon: float) -> jax.Array:
    value = x.astype(wide(x.dtype))
    mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
    return (value * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)


def _ones(arrays: dict[str, Any]) -> dict[str, Any]:
    x = arrays["x"]
    return {**arrays, "scale": jnp.ones(x.shape[-1:], wide(x.dtype))}


def _fast_variance(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float,
    clipped: bool,
    rounds_before_scale: bool = False,
) -> jax.Array:
    """Computes LayerNorm with the variance as E[x²] - E[x]², as Flax does by default."""
    value = x.astype(wide(x.dtype))
    mean = jnp.mean(value, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(value), axis=-1, keepdims=True) - jnp.square(mean)
    variance = jnp.maximum(0.0, variance) if clipped else variance
    y = (value - mean) * jax.lax.rsqrt(variance + epsilon)
    y = y.astype(x.dtype) if rounds_before_scale else y
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def _norms() -> Iterator[Spelling]:
    common: dict[str, Any] = {"roots": _ENDS, "needs": frozenset(("sqrt", "reduce_sum")), "unknowns": _EPSILON}
    rms = {**common, "operation": "rms_norm", "floating": frozenset(("scale",))}
    for propose in _scaled("scale"):
        yield Spelling(function=rms_norm_reference, propose=propose, **rms)
    yield Spelling(function=_without_scale, propose=_rows, prepare=_ones, **rms)
    for columns in (("scale", "bias"), ("scale",), ("bias",), ()):
        layer: dict[str, Any] = {**common, "operation": "layer_norm", "needs": common["needs"] | {"sub"}}
        first, *others = _scaled(*columns)
        for clipped in (None, True, False):
            function = layer_norm_reference if clipped is None else partial(_fast_variance, clipped=clipped)
            yield Spelling(function=function, propose=first, floating=frozenset(columns), **layer)
            for propose in others:  # the scale's dtype is that of its sum with the bias
                floating = frozenset(columns[-1:])
                yield Spelling(function=function, propose=propose, floating=floating, **layer)


def _softmax(x: jax.Array, *, scale: float) -> jax.Array:
    value = x.astype(wide(x.dtype)) * scale
    weight = jnp.exp(value - jnp.max(value, axis=-1, keepdims=True))
    return (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(x.dtype)


def _masked_softmax(x: jax.Array, mask: jax.Array, *, scale: float, hidden: float) -> jax.Array:
    value = x.astype(wide(x.dtype)) * scale
    value = jnp.where(mask, value, hidden) if mask.dtype == jnp.bool_ else value + mask
    weight = jnp.exp(value - jnp.max(value, axis=-1, keepdims=True))
    return (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(x.dtype)


def _causal_softmax(x: jax.Array, *, scale: float, hidden: float) -> jax.Array:
    queries, keys = x.shape[-2:]
    mask = jnp.arange(keys)[None, :] <= jnp.arange(queries)[:, None]
    return _masked_softmax(x, mask, scale=scale, hidden=hidden)


HIDDEN = {"hidden": -54321.0}  # finite in float16, too
LOWEST = float(jnp.finfo(jnp.float16).min)
"""A hidden score that is not higher has no weight beside one that is not hidden."""


def hidden_objection(numbers: Mapping[str, float]) -> str:
    """Returns why scores that a mask hides may have weights; "" where they are as low as float16's lowest number."""
    hidden = numbers.get("hidden", -jnp.inf)
    return "" if hidden <= LOWEST else f"hidden scores are {hidden:g}, and only {LOWEST:g} or less has no weight"


def _finite_objection(numbers: Mapping[str, float]) -> str:
    hidden = numbers.get("hidden", -jnp.inf)
    return "" if hidden == -jnp.inf else f"hidden scores are {hidden:g}, and those that softmax masks are -inf"


def given_options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that differ from their defaults."""
    return {name: value for name, value in given.items() if name != "hidden" and (name, value) != ("scale", 1.0)}


def _masks(value: Value, *dtypes: Any) -> Iterator[Proposal]:
    for proposal in _rows(value):
        for dtype in dtypes:
            mask = jax.ShapeDtypeStruct(value.shape, dtype)
            yield Proposal(arrays={**proposal.arrays, "mask": mask}, order=proposal.order)


def _causal(value: Value) -> Iterator[Proposal]:
    if len(value.shape) >= 2:
        for proposal in _rows(value):
            yield Proposal(arrays=proposal.arrays, order=proposal.order, static={"is_causal": True})


def _softmaxes() -> Iterator[Spelling]:
    common: dict[str, Any] = {
        "operation": "softmax",
        "roots": frozenset(("div", "mul", "convert_element_type")),
        "needs": frozenset(("exp", "reduce_sum")),
    }
    masked = {**common, "unknowns": {**_SCALE, **HIDDEN}, "objection": hidden_objection, "arguments": given_options}
    yield Spelling(function=lambda x, *, is_causal, **numbers: _causal_softmax(x, **numbers), propose=_causal, **masked)
    yield Spelling(
        function=_masked_softmax,
        propose=lambda value: _masks(value, jnp.bool_),
        broadcasting=frozenset(("mask",)),
        **{**masked, "objection": _finite_objection},
    )
    added = {**masked, "unknowns": _SCALE, "broadcasting": frozenset(("mask",))}
    yield Spelling(
        function=partial(_masked_softmax, hidden=0.0), propose=lambda value: _masks(value, wide(value.dtype)), **added
    )
    yield Spelling(function=_softmax, propose=_rows, unknowns=_SCALE, arguments=given_options, **common)
    plain = {"function": lambda x: jax.nn.softmax(x, axis=-1), **common}
    yield Spelling(propose=lambda value: _rows(value) if is_narrow(value) else iter(()), **plain)


def _elementwise(value: Value, names: tuple[str, ...], bias: Any, activation: str) -> Iterator[Proposal]:
    if is_rows(value):
        own = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name in names}
        own |= {} if bias is None else {"bias": jax.ShapeDtypeStruct(value.shape[-1:], bias)}
        yield Proposal(arrays=own, order=same_order(value), static={"activation": activation})


def _narrow_gate(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    return ACTIVATIONS[activation].reference(gate) * up


def _narrow_bias(x: jax.Array, bias: jax.Array, *, activation: str) -> jax.Array:
    return ACTIVATIONS[activation].reference(x + bias)


def _activations() -> Iterator[Spelling]:
    for name in ACTIVATIONS:
        for function, is_own in ((gated_activation_reference, False), (_narrow_gate, True)):

            def gated(value: Value, name: str = name, is_own: bool = is_own) -> Iterator[Proposal]:
                if is_narrow(value) or not is_own:
                    yield from _elementwise(value, ("gate", "up"), None, name)

            yield Spelling(
                operation="gated_activation",
                function=function,
                propose=gated,
                roots=frozenset(("mul", "convert_element_type")),
                needs=ACTIVATION_NEEDS[name],
            )
        for function, is_own in ((bias_activation_reference, False), (_narrow_bias, True)):

            def biased(value: Value, name: str = name, is_own: bool = is_own) -> Iterator[Proposal]:
                if is_narrow(value) or not is_own:
                    yield from _elementwise(value, ("x",), value.dtype if is_own else wide(value.dtype), name)

            yield Spelling(
                operation="bias_activation",
                function=function,
                propose=biased,
                roots=frozenset(("mul", "convert_element_type", "custom_jvp_call", "square", "integer_pow")),
                needs=ACTIVATION_NEEDS[name],
                floating=frozenset(("bias",)),
            )


SPELLINGS: tuple[Spelling, ...] = (*_norms(), *_softmaxes(), *_activations())
