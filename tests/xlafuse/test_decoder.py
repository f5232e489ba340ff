"""The decoder model: decoding with a cache is the model's own arithmetic, and a loop over layers changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xlafuse.errors import UnknownNameError
from xlafuse.models import BlockConfig
from xlafuse.models.decoder import Decoder, DecoderConfig, generate, get_decoder

SMALL = BlockConfig(
    name="small",
    hidden_size=64,
    mlp_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
    param_dtype="float32",
)
LLAMA = DecoderConfig(block=SMALL, layers=3, vocabulary=96)
GPT = replace(
    LLAMA,
    block=replace(SMALL, norm="layer_norm", mlp="gelu", rope_theta=None, use_bias=True),
    learned_positions=32,
)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_decoding_with_a_cache_takes_the_likeliest_tokens(config):
    decoder = Decoder(config)
    params = decoder.params(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (2, 5), 0, config.vocabulary)
    tokens = prompts
    for _ in range(4):
        tokens = jnp.concatenate([tokens, jnp.argmax(decoder.logits(params, tokens)[:, -1:], -1)], axis=1)
    np.testing.assert_array_equal(generate(decoder, params, prompts, 4, length=16), tokens[:, 5:])


def test_a_loop_over_layers_is_the_same_model():
    unrolled, scanned = Decoder(LLAMA), Decoder(replace(LLAMA, is_scanned=True))
    key, tokens = jax.random.key(0), jax.random.randint(jax.random.key(1), (2, 6), 0, LLAMA.vocabulary)
    one, other = unrolled.params(key), scanned.params(key)
    np.testing.assert_allclose(unrolled.logits(one, tokens), scanned.logits(other, tokens), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(
        generate(unrolled, one, tokens, 3, length=16), generate(scanned, other, tokens, 3, length=16)
    )


def test_training_lowers_the_loss():
    decoder, optimizer = Decoder(GPT), optax.adamw(1e-2)
    params = decoder.params(jax.random.key(0))
    state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, GPT.vocabulary)
    step = jax.jit(partial(decoder.train_step, optimizer))
    losses = []
    for _ in range(5):
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(
        float(decoder.loss(decoder.params(jax.random.key(0)), tokens, remat=False)), rel=1e-5
    )


def test_an_unknown_model_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match="llama3-8b"):
        get_decoder("llama-8b")
