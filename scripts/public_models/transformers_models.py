"""Public models of `transformers`, in its Flax modules; losses are those of its Flax examples."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from programs import KEY, Program, linen_program, normal, tokens_of
from sizes import Stack


def gpt2(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes GPT-2, with dropout."""
    module = _module(
        "gpt2",
        "FlaxGPT2LMHeadModule",
        dtype,
        vocab_size=sizes.vocabulary,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
    )
    return _decoder(module, sizes)


def llama(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Llama."""
    module = _module(
        "llama",
        "FlaxLlamaForCausalLMModule",
        dtype,
        vocab_size=sizes.vocabulary,
        num_key_value_heads=sizes.key_heads,
        head_dim=sizes.head_width,
        max_position_embeddings=sizes.length,
        **_encoder(sizes),
    )
    return _decoder(module, sizes)


def bert(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes BERT, with dropout, that fills in masked tokens: a seventh of them."""
    module = _module(
        "bert",
        "FlaxBertForMaskedLMModule",
        dtype,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.length,
        **_encoder(sizes),
    )
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
    module = _module(
        "vit",
        "FlaxViTForImageClassificationModule",
        dtype,
        image_size=sizes.length,
        patch_size=8 if sizes.length < 224 else 16,
        num_labels=sizes.vocabulary,
        **_encoder(sizes),
    )
    images = normal(sizes.batch, sizes.length, sizes.length, 3)
    labels = tokens_of(sizes.batch, 1, sizes.vocabulary)[:, 0]

    def loss(out: Any, _: Any, labels: jax.Array) -> jax.Array:
        return _cross_entropy(out.logits, labels).mean()

    size = str(sizes)
    return linen_program(module, (images,), {"deterministic": False}, loss, size=size, batch=(images, labels, KEY))


def whisper(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Whisper, of spectrograms of 80 bands and twice the encoder's positions."""
    module = _module(
        "whisper",
        "FlaxWhisperForConditionalGenerationModule",
        dtype,
        vocab_size=sizes.vocabulary,
        d_model=sizes.width,
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        encoder_ffn_dim=sizes.hidden,
        decoder_ffn_dim=sizes.hidden,
        max_source_positions=sizes.length,
        max_target_positions=sizes.targets,
        pad_token_id=0,
    )
    sound = normal(sizes.batch, 80, 2 * sizes.length, dtype=dtype)
    targets = tokens_of(sizes.batch, sizes.targets, sizes.vocabulary)
    positions = jnp.broadcast_to(jnp.arange(sizes.targets), targets.shape)
    inputs = (sound, targets, jnp.ones_like(targets), positions)

    def loss(out: Any, *rest: Any) -> jax.Array:
        return _cross_entropy(out.logits, rest[-1]).mean()

    batch = (*inputs, jnp.roll(targets, -1, 1), KEY)
    return linen_program(module, inputs, {"deterministic": False}, loss, size=str(sizes), batch=batch)


def _module(family: str, module: str, dtype: Any, **config: Any) -> Any:
    """Makes a module of a family, of its configuration."""
    transformers = importlib.import_module("transformers")
    file = importlib.import_module(f"transformers.models.{family}.modeling_flax_{family}")
    name = module.removeprefix("Flax").partition("For")[0].removesuffix("LMHeadModule")
    return getattr(file, module)(getattr(transformers, f"{name}Config")(**config), dtype=dtype)


def _encoder(sizes: Stack) -> dict[str, int]:
    """Returns the arguments that most configurations share."""
    return {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
    }


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
