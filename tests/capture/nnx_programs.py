"""An NNX model without a scope of its own, for tests of the scopes that a capture gives it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 128


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.qkv(x), 3, axis=-1)
        return jax.nn.softmax(query @ key.T) @ value


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), jnp.tanh)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    """The model with shapes for weights."""
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


X = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
