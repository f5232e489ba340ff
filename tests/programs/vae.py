"""A training step of a variational autoencoder: strided convolutions, normal noise, transposed convolutions, Adam."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

BATCH, SIZE, FEATURES, LATENTS = 64, 64, (32, 64, 128), 128
NUMBERS = ("NHWC", "HWIO", "NHWC")
OPTIMIZER = optax.adam(1e-3)


def encode(weights: dict[str, Any], x: Array) -> tuple[Array, Array]:
    for kernel, bias in weights["encoder"]:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)
        x = jax.nn.leaky_relu(x + bias)
    mean, deviation = jnp.split(x.reshape(BATCH, -1) @ weights["latents"] + weights["latents_bias"], 2, -1)
    return mean, deviation


def decode(weights: dict[str, Any], z: Array) -> Array:
    x = jax.nn.leaky_relu(z @ weights["start"] + weights["start_bias"]).reshape(BATCH, SIZE // 8, SIZE // 8, -1)
    for number, (kernel, bias) in enumerate(weights["decoder"]):
        x = jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS) + bias
        x = jax.nn.leaky_relu(x) if number < len(FEATURES) - 1 else x
    return x


def loss(weights: dict[str, Any], images: Array, key: Array) -> Array:
    mean, deviation = encode(weights, images)
    z = mean + jnp.exp(0.5 * deviation) * jax.random.normal(key, mean.shape)
    logits = decode(weights, z)
    likelihood = -(images * jax.nn.log_sigmoid(logits) + (1 - images) * jax.nn.log_sigmoid(-logits)).sum((1, 2, 3))
    divergence = -0.5 * (1 + deviation - jnp.square(mean) - jnp.exp(deviation)).sum(-1)
    return (likelihood + divergence).mean()


def step(weights: dict[str, Any], state: Any, images: Array, seed: Array) -> tuple[Any, ...]:
    value, gradients = jax.value_and_grad(loss)(weights, images, jax.random.wrap_key_data(seed))
    updates, state = OPTIMIZER.update(gradients, state)
    return optax.apply_updates(weights, updates), state, value


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def layers(*features: int) -> list[tuple[Any, Any]]:
        return [(array(4, 4, given, made), array(made)) for given, made in pairwise(features)]

    flat = FEATURES[-1] * (SIZE // 8) ** 2
    weights = {"encoder": layers(3, *FEATURES), "decoder": layers(*FEATURES[::-1], 3)}
    weights |= {"latents": array(flat, 2 * LATENTS), "latents_bias": array(2 * LATENTS)}
    weights |= {"start": array(LATENTS, flat), "start_bias": array(flat)}
    images, seed = array(BATCH, SIZE, SIZE, 3), array(2, dtype=jnp.uint32)
    return weights, jax.eval_shape(OPTIMIZER.init, weights), images, seed
