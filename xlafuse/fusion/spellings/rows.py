"""Row-wise operations and elementwise ones: norms, softmax, activations."""

from __future__ import annotations

import itertools
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
from xlafuse.fusion.spelling import (
    ACTIVATION_NEEDS,
    Proposal,
    Spelling,
    fast_normed,
    is_narrow,
    is_rows,
    same_order,
    struct,
    wide,
)
from xlafuse.fusion.terms import BY_ELEMENT

_REACH = 40
_EPSILON = {"epsilon": 0.0123454321}
_SCALE = {"scale": 0.3217654321}
_ENDS = frozenset(("mul", "div", "convert_element_type", "add", "sub"))


def _rows(value: Value, *columns: str, narrow: bool = False) -> Iterator[Proposal]:
    """Proposes x like the value, and arrays of one number a column."""
    if is_rows(value):
        dtype = value.dtype if narrow else wide(value.dtype)
        own = dict.fromkeys(columns, struct(value, value.shape[-1], dtype=dtype))
        yield Proposal(arrays={"x": struct(value, *value.shape), **own}, order=same_order(value))


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
    """Computes LayerNorm; see `fast_normed`."""
    y, *_ = fast_normed(x.astype(wide(x.dtype)), -1, epsilon=epsilon, clipped=clipped, keepdims=True)
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


def _softmax(x: jax.Array, mask: jax.Array | None = None, *, scale: float, hidden: float = 0.0) -> jax.Array:
    value = x.astype(wide(x.dtype)) * scale
    if mask is not None:
        value = jnp.where(mask, value, hidden) if mask.dtype == jnp.bool_ else value + mask
    weight = jnp.exp(value - jnp.max(value, axis=-1, keepdims=True))
    return (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(x.dtype)


def _causal_softmax(x: jax.Array, *, is_causal: bool, **numbers: float) -> jax.Array:
    queries, keys = x.shape[-2:]
    return _softmax(x, jnp.arange(keys)[None, :] <= jnp.arange(queries)[:, None], **numbers)


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
            mask = struct(value, *value.shape, dtype=dtype)
            yield replace(proposal, arrays={**proposal.arrays, "mask": mask})


def _causal(value: Value) -> Iterator[Proposal]:
    if len(value.shape) >= 2:
        for proposal in _rows(value):
            yield replace(proposal, static={"is_causal": True})


def _softmaxes() -> Iterator[Spelling]:
    common: dict[str, Any] = {
        "operation": "softmax",
        "roots": frozenset(("div", "mul", "convert_element_type")),
        "needs": frozenset(("exp", "reduce_sum")),
    }
    masked = {**common, "unknowns": {**_SCALE, **HIDDEN}, "objection": hidden_objection, "arguments": given_options}
    yield Spelling(function=_causal_softmax, propose=_causal, **masked)
    yield Spelling(
        function=_softmax,
        propose=lambda value: _masks(value, jnp.bool_),
        broadcasting=frozenset(("mask",)),
        **{**masked, "objection": _finite_objection},
    )
    added = {**masked, "unknowns": _SCALE, "broadcasting": frozenset(("mask",))}
    yield Spelling(function=_softmax, propose=lambda value: _masks(value, wide(value.dtype)), **added)
    yield Spelling(function=_softmax, propose=_rows, unknowns=_SCALE, arguments=given_options, **common)
    plain = {"function": lambda x: jax.nn.softmax(x, axis=-1), **common}
    yield Spelling(propose=lambda value: _rows(value) if is_narrow(value) else iter(()), **plain)


def _elementwise(
    value: Value, arrays: Sequence[str], *, activation: str, narrow: bool, bias: bool
) -> Iterator[Proposal]:
    """Proposes arrays like the value, and a bias. narrow: of 16 bits alone, and the bias like the value."""
    if is_rows(value) and (is_narrow(value) or not narrow):
        own = dict.fromkeys(arrays, struct(value, *value.shape))
        more = value.dtype if narrow else wide(value.dtype)
        own |= {"bias": struct(value, value.shape[-1], dtype=more)} if bias else {}
        yield Proposal(arrays=own, order=same_order(value), static={"activation": activation})


def _narrow_gate(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    return ACTIVATIONS[activation].reference(gate) * up


def _narrow_bias(x: jax.Array, bias: jax.Array, *, activation: str) -> jax.Array:
    return ACTIVATIONS[activation].reference(x + bias)


_GATED, _BIASED = frozenset(("mul", "convert_element_type")), frozenset(("custom_jvp_call", "square", "integer_pow"))
"""What a gated activation ends with, and what an activation may end with besides."""


def _activations() -> Iterator[Spelling]:
    for name, bias, narrow in itertools.product(ACTIVATIONS, (False, True), (False, True)):
        functions = (gated_activation_reference, bias_activation_reference), (_narrow_gate, _narrow_bias)
        arrays = ("x",) if bias else ("gate", "up")
        yield Spelling(
            operation="bias_activation" if bias else "gated_activation",
            function=functions[narrow][bias],
            propose=partial(_elementwise, arrays=arrays, activation=name, narrow=narrow, bias=bias),
            roots=_GATED | _BIASED if bias else _GATED,
            needs=ACTIVATION_NEEDS[name],
            floating=frozenset(("bias",) if bias else ()),
        )


SPELLINGS: tuple[Spelling, ...] = (*_norms(), *_softmaxes(), *_activations())
