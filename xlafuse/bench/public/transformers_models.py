"""Public models of `transformers`, in its Flax modules; losses are those of its Flax examples."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlafuse.bench.public import configs
from xlafuse.bench.public.programs import KEY, Program, linen_program, normal, tokens_of
from xlafuse.bench.public.sizes import Stack


def gpt2(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes GPT-2, with dropout."""
    return _decoder(_module("gpt2", "FlaxGPT2LMHeadModule", configs.gpt2, dtype, sizes), sizes)


def llama(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Llama."""
    return _decoder(_module("llama", "FlaxLlamaForCausalLMModule", configs.llama, dtype, sizes), sizes)


def bert(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes BERT, with dropout, that fills in masked tokens: a seventh of them."""
    module = _module("bert", "FlaxBertForMaskedLMModule", configs.bert, dtype, sizes)
    tokens, mask, positions = _text(sizes)
    inputs = (tokens, mask, jnp.zeros_like(tokens), positions)

    def loss(out: Any, tokens: jax.Array, *rest: Any) -> jax.Array:
        weight = rest[-1]
        return (_cross_entropy(out.logits, tokens) * weight).sum() / weight.sum()

    weight = (tokens_of(sizes.batch, sizes.length, 7, seed=2) == 1).astype(jnp.float32)
    given = {"deterministic": False, "head_mask": None}
    return linen_program(module, inputs, given, loss, size=str(sizes), batch=(*inputs, weight, KEY))


def vit(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes a vision transformer that classifies."""
    module = _module("vit", "FlaxViTForImageClassificationModule", configs.vit, dtype, sizes)
    images = normal(sizes.batch, sizes.length, sizes.length, 3)
    labels = tokens_of(sizes.batch, 1, sizes.vocabulary)[:, 0]

    def loss(out: Any, _: Any, labels: jax.Array) -> jax.Array:
        return _cross_entropy(out.logits, labels).mean()

    size = str(sizes)
    return linen_program(module, (images,), {"deterministic": False}, loss, size=size, batch=(images, labels, KEY))


def whisper(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Whisper, of spectrograms of 80 bands and twice the encoder's positions."""
    module = _module("whisper", "FlaxWhisperForConditionalGenerationModule", configs.whisper, dtype, sizes)
    sound = normal(sizes.batch, 80, 2 * sizes.length, dtype=dtype)
    targets = tokens_of(sizes.batch, sizes.targets, sizes.vocabulary)
    positions = jnp.broadcast_to(jnp.arange(sizes.targets), targets.shape)
    inputs = (sound, targets, jnp.ones_like(targets), positions)

    def loss(out: Any, *rest: Any) -> jax.Array:
        return _cross_entropy(out.logits, rest[-1]).mean()

    batch = (*inputs, jnp.roll(targets, -1, 1), KEY)
    return linen_program(module, inputs, {"deterministic": False}, loss, size=str(sizes), batch=batch)


def _module(family: str, module: str, config_of: Callable[[Stack], Any], dtype: Any, sizes: Stack) -> Any:
    """Makes a module of a family."""
    file = importlib.import_module(f"transformers.models.{family}.modeling_flax_{family}")
    return getattr(file, module)(config_of(sizes), dtype=dtype)


def _text(sizes: Stack) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, a mask that hides none, and positions."""
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    return tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(sizes.length), tokens.shape)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def _decoder(module: Any, sizes: Stack) -> Program:
    """Makes the program of a causal language model."""
    inputs = _text(sizes)

    def loss(out: Any, tokens: jax.Array, *_: Any) -> jax.Array:
        return _cross_entropy(out.logits[:, :-1], tokens[:, 1:]).mean()

    return linen_program(module, inputs, {"deterministic": False}, loss, size=str(sizes), batch=(*inputs, KEY))
