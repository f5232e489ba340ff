"""The gradient of a diffusion U-Net: group norm and SiLU before convolutions, attention, images resized."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BATCH, SIZE, FEATURES, GROUPS = 8, 32, 128, 8


def convolve(x: Array, weights: Array, stride: int = 1) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weights, (stride, stride), "SAME", dimension_numbers=numbers)


def group_norm(x: Array, scale: Array, bias: Array) -> Array:
    groups = x.reshape(*x.shape[:3], GROUPS, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    inverse = jax.lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    return ((groups - mean) * inverse).reshape(x.shape) * scale + bias


def res_block(weights: dict[str, Array], x: Array, time: Array) -> Array:
    h = convolve(jax.nn.silu(group_norm(x, weights["scale1"], weights["bias1"])), weights["first"])
    h = h + (jax.nn.silu(time) @ weights["time"])[:, None, None]
    h = convolve(jax.nn.silu(group_norm(h, weights["scale2"], weights["bias2"])), weights["second"])
    return h + (convolve(x, weights["shortcut"]) if "shortcut" in weights else x)


def attention(weights: dict[str, Array], x: Array) -> Array:
    batch, height, width, features = x.shape
    h = group_norm(x, weights["scale"], weights["bias"]).reshape(batch, height * width, features)
    query, key, value = (h @ weights[name] for name in ("query", "key", "value"))
    probabilities = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key) / features**0.5)
    return x + (jnp.einsum("bts,bsd->btd", probabilities, value) @ weights["out"]).reshape(x.shape)


def loss(weights: dict[str, Any], images: Array, noise: Array, times: Array) -> Array:
    frequencies = jnp.exp(-jnp.arange(FEATURES // 2) * 9.2 / (FEATURES // 2))
    angles = times[:, None] * frequencies
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ weights["time"]
    level = jnp.cos(times)[:, None, None, None]
    x = convolve(level * images + jnp.sqrt(1 - level**2) * noise, weights["stem"])
    x = skip = res_block(weights["down"], x, time)
    x = convolve(x, weights["shrink"], 2)
    x = attention(weights["attention"], res_block(weights["middle"], x, time))
    x = jax.image.resize(x, skip.shape, "nearest")
    x = res_block(weights["up"], jnp.concatenate([x, skip], -1), time)
    out = convolve(jax.nn.silu(group_norm(x, weights["scale"], weights["bias"])), weights["head"])
    return jnp.square(out - noise).mean()


def step(weights: dict[str, Any], images: Array, noise: Array, times: Array) -> dict[str, Any]:
    return jax.grad(loss)(weights, images, noise, times)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def block(given: int) -> dict[str, Any]:
        weights = {"first": array(3, 3, given, FEATURES), "second": array(3, 3, FEATURES, FEATURES)}
        weights |= {"time": array(FEATURES, FEATURES), "scale1": array(given), "bias1": array(given)}
        shortcut = {} if given == FEATURES else {"shortcut": array(1, 1, given, FEATURES)}
        return weights | dict.fromkeys(("scale2", "bias2"), array(FEATURES)) | shortcut

    norm = dict.fromkeys(("scale", "bias"), array(FEATURES))
    weights = {
        "stem": array(3, 3, 3, FEATURES),
        "shrink": array(3, 3, FEATURES, FEATURES),
        "head": array(3, 3, FEATURES, 3),
    }
    weights |= {"down": block(FEATURES), "middle": block(FEATURES), "up": block(2 * FEATURES)} | norm
    matrix = array(FEATURES, FEATURES)
    weights |= {"attention": dict.fromkeys(("query", "key", "value", "out"), matrix) | norm, "time": matrix}
    images = array(BATCH, SIZE, SIZE, 3)
    return weights, images, images, array(BATCH)
