"""The gradient of a Mamba block: projections, a short causal convolution, a selective scan, a gate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BATCH, LENGTH, WIDTH, INNER, STATES, RANK, TAPS = 4, 256, 512, 1024, 16, 32, 4


def rms_norm(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def convolve(x: Array, weights: Array) -> Array:
    return jax.lax.conv_general_dilated(
        x, weights, (1,), [(TAPS - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=INNER
    )


def selective_scan(decay: Array, driven: Array) -> Array:
    def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(combine, (decay, driven), axis=1)[1]


def block(weights: dict[str, Array], x: Array) -> Array:
    hidden, gate = jnp.split(rms_norm(x, weights["scale"]) @ weights["in"], 2, -1)
    hidden = jax.nn.silu(convolve(hidden, weights["taps"]) + weights["bias"])
    rank, into, out = jnp.split(hidden @ weights["parameters"], [RANK, RANK + STATES], -1)
    step = jax.nn.softplus(rank @ weights["step"] + weights["step_bias"])
    decay = jnp.exp(step[..., None] * -jnp.exp(weights["log_a"]))
    states = selective_scan(decay, (step * hidden)[..., None] * into[:, :, None, :])
    y = jnp.einsum("bldn,bln->bld", states, out) + hidden * weights["skip"]
    return x + (y * jax.nn.silu(gate)) @ weights["out"]


def step(weights: dict[str, Array], x: Array) -> dict[str, Array]:
    return jax.grad(lambda weights: jnp.square(block(weights, x)).mean())(weights)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = {"scale": array(WIDTH), "in": array(WIDTH, 2 * INNER), "taps": array(TAPS, 1, INNER)}
    weights |= {"parameters": array(INNER, RANK + 2 * STATES), "step": array(RANK, INNER), "out": array(INNER, WIDTH)}
    weights |= dict.fromkeys(("bias", "step_bias", "skip"), array(INNER)) | {"log_a": array(INNER, STATES)}
    return weights, array(BATCH, LENGTH, WIDTH)
