"""Captures of a small transformer block, forward and gradient, compiled once a session for a GPU that is not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from hlo_analysis import Analysis, Capture, analyze, capture

WIDTH, HIDDEN, HEADS = 512, 1536, 8


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def block(weights: dict[str, Array], x: Array) -> Array:
    """Norm, attention with its scores written out, norm, gated MLP."""
    batch, length, _ = x.shape
    with jax.named_scope("attention_norm"):
        h = _norm(x, weights["n1"])
    with jax.named_scope("qkv"):
        query, key, value = (
            (h @ weights[name]).reshape(batch, length, HEADS, WIDTH // HEADS) for name in ("q", "k", "v")
        )
    with jax.named_scope("attention"):
        scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(scores, -1).astype(x.dtype)
        attended = jnp.einsum("bhts,bshd->bthd", probabilities, value).reshape(batch, length, WIDTH)
    with jax.named_scope("projection"):
        x = x + attended @ weights["o"]
    with jax.named_scope("mlp_norm"):
        h = _norm(x, weights["n2"])
    with jax.named_scope("gate_up"):
        gate, up = h @ weights["g"], h @ weights["u"]
    with jax.named_scope("activation"):
        h = jax.nn.silu(gate) * up
    with jax.named_scope("down"):
        return x + h @ weights["d"]


def arguments() -> tuple[dict[str, Any], Any]:
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | dict.fromkeys("gu", (WIDTH, HIDDEN)) | {"d": (HIDDEN, WIDTH)}
    shapes |= {"n1": (WIDTH,), "n2": (WIDTH,)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return weights, jax.ShapeDtypeStruct((2, 2048, WIDTH), jnp.bfloat16)


@pytest.fixture(scope="session")
def captured() -> Callable[..., Capture]:
    """The capture of the block in a mode ('forward' or 'grad'), with compiler options."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs the extra 'deviceless': XLA's CUDA compiler")

    @cache
    def make(mode: str, **options: Any) -> Capture:
        # No recorded autotuning: which products go to a library must not depend on a recording.
        return capture(block, *arguments(), target="h200", mode=mode, compiler_options=options, autotune=None)

    return make


@pytest.fixture(scope="session")
def analyzed(captured: Callable[..., Capture]) -> Callable[..., Analysis]:
    """`analyze` of the same."""

    @cache
    def make(mode: str, **options: Any) -> Analysis:
        return analyze(captured(mode, **options))

    return make
