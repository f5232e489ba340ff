"""Equal layers are searched, traced and lowered once, and layers that differ are not taken for equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax._src.pallas.mosaic_gpu import pallas_call_registration

import xlafuse
from hlo_analysis.capture.lowering import lower
from hlo_analysis.targets import load_target
from pallas_kernels.primitives import partitioned
from xlafuse.fusion.match import Matcher
from xlafuse.fusion.repeats import Repeats
from xlafuse.fusion.site import Site

WIDTH, HEADS = 128, 2


def norm(x: Array, scale: Array, epsilon: float = 1e-6) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def layer(x: Array, weights: dict[str, Array], number: int = 0) -> Array:
    h = norm(x, weights["scale"])
    query, key, value = ((h @ weights[name]).reshape(*h.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    x = x + jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value).reshape(x.shape) @ weights["out"]
    h = norm(x, weights["scale"])
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


def with_another_epsilon(x: Array, weights: dict[str, Array], number: int) -> Array:
    return norm(layer(x, weights), weights["scale"], 1e-5 if number == 6 else 1e-6)


def with_one_scale_of_what_it_norms(x: Array, weights: dict[str, Array], number: int) -> Array:
    y = layer(x, weights)
    return norm(y, y[0, 0] if number == 6 else weights["scale"])


def with_one_squared_gate(x: Array, weights: dict[str, Array], number: int) -> Array:
    gate = x @ weights["gate"]
    up = gate if number == 6 else x @ weights["up"]
    return layer(x + (jax.nn.silu(gate) * up) @ weights["down"], weights)


def stack(layers: int, block: Callable[..., Array] = layer) -> tuple[Callable[..., Array], Any]:
    sizes = {"scale": (WIDTH,), "gate": (WIDTH, 256), "up": (WIDTH, 256), "down": (256, WIDTH)}
    sizes |= dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    weights = [{name: jnp.ones(size) for name, size in sizes.items()} for _ in range(layers)]

    def model(x: Array, weights: Any) -> Array:
        for number, own in enumerate(weights):
            x = block(x, own, number)
        return x

    return model, weights


def sites(model: Callable[..., Array], weights: Any) -> tuple[list[Any], int]:
    """The sites taken, by operation and arguments, and how often a value was compared with a pattern."""
    told, compared = [], Counter()
    first = Matcher.first

    def counted(self: Matcher, *given: Any) -> Any:
        compared["values"] += 1
        return first(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "first", counted)
        jax.eval_shape(xlafuse.fuse(model, report=told.append), jnp.ones((2, 16, WIDTH)), weights)
    return [(each.operation, each.arrays, each.options, each.equations) for each in told[0].taken], compared["values"]


def test_more_equal_layers_take_no_more_comparisons() -> None:
    (few, compared), (many, again) = sites(*stack(8)), sites(*stack(16))
    assert Counter(each[0] for each in many)["attention"] == 16
    assert len(many) == 2 * len(few)
    assert again < 1.05 * compared


@pytest.mark.parametrize("block", [layer, with_another_epsilon, with_one_scale_of_what_it_norms, with_one_squared_gate])
def test_sites_and_results_are_those_of_searching_every_layer(
    block: Callable[..., Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = stack(8, block)
    found, _ = sites(model, weights)
    draw = np.random.default_rng(0)
    given = jax.tree.map(lambda each: jnp.asarray(draw.standard_normal(each.shape) / 16, each.dtype), weights)
    x = jnp.asarray(draw.standard_normal((2, 16, WIDTH)), jnp.float32)
    np.testing.assert_allclose(xlafuse.fuse(model)(x, given), model(x, given), rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(Repeats, "first_alike", lambda self, value: None)

    def another(x: Array, weights: Any) -> Array:
        return model(x, weights)

    assert found == sites(another, weights)[0]


REPEATED = {
    "calls": (Site, "call"),
    "traces, forward and backward": (partitioned, "_either"),
    "kernels lowered": (pallas_call_registration, "mpmd_map_mgpu_lowering_rule"),
}
"""The work of a training step that equal layers share, by the function that does it."""


def work_of(layers: int) -> Counter[str]:
    """How often a training step of so many layers does each kind of work until it is lowered for an H200."""
    model, weights = stack(layers)
    done: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done[name] += 1
            return function(*args, **kwargs)

        return call

    def loss(x: Array, weights: Any) -> Array:
        return model(x, weights).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((2, 512, WIDTH), jnp.bfloat16)
    given = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, x.dtype), weights)
    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, function) in REPEATED.items():
            patch.setattr(owner, function, counted(name, getattr(owner, function)))
        lower(jax.grad(xlafuse.fuse(loss), (0, 1)), (x, given), target=load_target("h200"))
    return done


def test_more_equal_layers_are_no_more_work() -> None:
    few, many = work_of(3), work_of(6)
    assert few["kernels lowered"] > 3
    assert many == few
