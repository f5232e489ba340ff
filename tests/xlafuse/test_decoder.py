"""The decoder model: decoding with a cache is the model's own arithmetic, and a loop over layers changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.pallas.mosaic_gpu import pallas_call_registration

from hlo_analysis.capture.lowering import lower
from hlo_analysis.targets import load_target
from xlafuse.errors import UnknownNameError
from xlafuse.models import BlockConfig
from xlafuse.models.decoder import Decoder, DecoderConfig, get_decoder
from xlafuse.strategies import get_strategy

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
EXPERTS = replace(LLAMA, block=replace(SMALL, num_experts=4, experts_per_token=2))


def generate(decoder, params, prompts, count, *, length):
    """The likeliest `count` tokens after each prompt, with a cache of so many tokens."""
    step = jax.jit(partial(Decoder.step, decoder), donate_argnums=2)
    token, cache, filled = step(params, prompts, decoder.empty_cache(len(prompts), length), jnp.int32(0))
    tokens = [token]
    for _ in range(count - 1):
        token, cache, filled = step(params, token, cache, filled)
        tokens.append(token)
    return jnp.concatenate(tokens, axis=1)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("config", [LLAMA, GPT, EXPERTS], ids=["llama", "gpt", "experts"])
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


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("phase", ["train", "decode"])
def test_equal_layers_lower_each_kernel_once(phase, monkeypatch):
    """Mosaic takes a fifth of a second for each, and XLA as much again."""
    lowered: list[str] = []
    lower_kernel = pallas_call_registration.mpmd_map_mgpu_lowering_rule

    def counted(*args, name, **params):
        lowered.append(name)
        return lower_kernel(*args, name=name, **params)

    monkeypatch.setattr(pallas_call_registration, "mpmd_map_mgpu_lowering_rule", counted)

    def kernels(layers):
        config = replace(get_decoder("llama3-8b"), layers=layers, vocabulary=512)
        decoder = Decoder(config, get_strategy("best").plan)
        params = jax.eval_shape(decoder.params, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((1, 257 if phase == "train" else 1), jnp.int32)
        lowered.clear()
        if phase == "train":
            lower(jax.grad(decoder.loss), (params, tokens), target=load_target("h200"))
        else:
            cache = jax.eval_shape(lambda: decoder.empty_cache(1, 256))
            lower(
                decoder.step, (params, tokens, cache, jax.ShapeDtypeStruct((), jnp.int32)), target=load_target("h200")
            )
        return sorted(lowered)

    two = kernels(2)
    assert len(two) > 3
    assert kernels(3) == two
