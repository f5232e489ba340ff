"""Programs that several tests capture."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLOATS = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
INTEGERS = jax.ShapeDtypeStruct((3,), jnp.int32)


def layer(x: jax.Array, weights: dict[str, jax.Array], index: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ weights["kernel"]), index + 1


LAYER_ARGUMENTS = (FLOATS, {"kernel": FLOATS}, INTEGERS)
