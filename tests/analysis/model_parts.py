"""Parts of well-known models, on which advice was wrong once: each a function and its arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

bf16, f32, s32 = jnp.bfloat16, jnp.float32, jnp.int32


def shape(*sizes: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def convolve(x: Array, weights: Array, stride: int = 1) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weights, (stride, stride), "SAME", dimension_numbers=numbers)


def group_norm(x: Array, scale: Array) -> Array:
    groups = x.reshape(*x.shape[:3], 8, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    inverse = lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    return ((groups - mean) * inverse).reshape(x.shape) * scale


def layer_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(f32) - x.astype(f32).mean(-1, keepdims=True)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def dropout(x: Array, key: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)


def unet_block(weights: dict[str, Array], x: Array) -> Array:
    """Group norm, SiLU and a convolution; then the image is resized, and the same once more."""
    x = x + convolve(jax.nn.silu(group_norm(x, weights["scale"])), weights["first"])
    batch, height, width, features = x.shape
    wide = jax.image.resize(x, (batch, 2 * height, 2 * width, features), "bilinear")
    return (convolve(jax.nn.silu(group_norm(wide, weights["scale"])), weights["second"]) ** 2).mean()


def mamba(weights: dict[str, Array], x: Array) -> Array:
    """A selective state space by lax.associative_scan, between its projections."""
    hidden, gate = jnp.split(x @ weights["in"], 2, -1)
    step, b, c = jnp.split(jax.nn.silu(hidden) @ weights["parameters"], [48, 64], -1)
    step = jax.nn.softplus(step @ weights["step"])
    decay = jnp.exp(step[..., None] * -jnp.exp(weights["a"]))
    driven = step[..., None] * b[:, :, None, :] * hidden[..., None]

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = lax.associative_scan(combine, (decay, driven), axis=1)
    return ((jnp.einsum("blen,bln->ble", states, c) * jax.nn.silu(gate)) @ weights["out"]).sum()


def lm1b_layer(weights: dict[str, Array], x: Array, seed: Array) -> Array:
    """Attention and an MLP, both with dropout."""
    keys = jax.random.split(jax.random.wrap_key_data(seed, impl="rbg"), 2)
    h = layer_norm(x, weights["norm"])
    with jax.named_scope("attention"):
        query, key, value = (jnp.einsum("btd,dhk->bthk", h, weights[name]) for name in ("query", "key", "value"))
        scores = jnp.einsum("bthk,bshk->bhts", query, key) / 8
        probabilities = dropout(jax.nn.softmax(scores.astype(f32)).astype(x.dtype), keys[0])
        x = x + jnp.einsum("bhts,bshk->bthk", probabilities, value).reshape(x.shape)
    h = dropout(jax.nn.gelu(layer_norm(x, weights["norm"]) @ weights["up"]), keys[1])
    return (x + h @ weights["down"]).astype(f32).sum()


def loss(weight: Array, x: Array, labels: Array) -> Array:
    logits = (x @ weight).astype(f32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


def loss_biased(weight: Array, x: Array, labels: Array, bias: Array) -> Array:
    logits = (x @ weight + bias).astype(f32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


def loss_shifted(weight: Array, x: Array, labels: Array, shift: Array) -> Array:
    return loss(weight, x + shift, labels)


def loss_again(weight: Array, x: Array, labels: Array) -> Array:
    return jax.checkpoint(loss)(weight, x, labels)


def resnet_stem(weights: dict[str, Array], x: Array) -> Array:
    """A convolution, batch norm, ReLU and max-pooling; then another convolution."""
    h = convolve(x, weights["first"], 2)
    h = jax.nn.relu((h - h.mean((0, 1, 2))) * lax.rsqrt(h.var((0, 1, 2)) + 1e-5))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return (convolve(h, weights["second"]) ** 2).mean()


def attention(query: Array, key: Array, value: Array) -> Array:
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / 8
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value).sum()


def model_parts() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Function and arguments by name; those that are trained with their gradients."""
    weight = shape(3, 3, 128, 128)
    lm1b = {name: shape(512, 8, 64, dtype=bf16) for name in ("query", "key", "value")}
    lm1b |= {"norm": shape(512, dtype=bf16), "up": shape(512, 2048, dtype=bf16), "down": shape(2048, 512, dtype=bf16)}
    states = {"in": shape(256, 1024), "parameters": shape(512, 80), "step": shape(48, 512), "a": shape(512, 16)}
    stem = {"first": shape(7, 7, 3, 64), "second": shape(3, 3, 64, 64)}

    def tokens(vocabulary: int, dtype: Any = bf16) -> tuple[Any, ...]:
        return shape(1024, vocabulary, dtype=dtype), shape(1024, 1024, dtype=dtype), shape(1024, dtype=s32)

    return {
        "unet_block": (
            jax.grad(unet_block, (0, 1)),
            ({"scale": shape(128), "first": weight, "second": weight}, shape(4, 32, 32, 128)),
        ),
        "mamba": (jax.grad(mamba, (0, 1)), ({**states, "out": shape(512, 256)}, shape(8, 64, 256))),
        "lm1b_layer": (
            jax.grad(lm1b_layer, (0, 1)),
            (lm1b, shape(16, 128, 512, dtype=bf16), shape(4, dtype=jnp.uint32)),
        ),
        "loss": (jax.value_and_grad(loss, (0, 1)), tokens(32000)),
        "loss_gradient": (jax.grad(loss, (0, 1)), tokens(32000)),
        "loss_again": (jax.value_and_grad(loss_again, (0, 1)), tokens(32000)),
        "loss_of_many_tokens": (
            jax.value_and_grad(loss, (0, 1)),
            (shape(1024, 32000, dtype=bf16), shape(4096, 1024, dtype=bf16), shape(4096, dtype=s32)),
        ),
        "loss_30000": (jax.value_and_grad(loss, (0, 1)), tokens(30000)),
        "loss_biased": (jax.value_and_grad(loss_biased, (0, 1, 3)), (*tokens(32000), shape(32000, dtype=bf16))),
        "loss_shifted": (jax.value_and_grad(loss_shifted, (0, 1, 3)), (*tokens(32000), shape(1024, dtype=bf16))),
        "loss_float32": (jax.value_and_grad(loss, (0, 1)), tokens(32000, f32)),
        "resnet_stem": (jax.grad(resnet_stem, (0, 1)), (stem, shape(16, 112, 112, 3))),
        "attention_float32": (jax.grad(attention, (0, 1, 2)), (shape(4, 1024, 8, 64),) * 3),
    }
