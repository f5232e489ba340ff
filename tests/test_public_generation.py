"""Public decoders generate with their own caches, at the size "tiny" on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlafuse.bench.public import configs
from xlafuse.bench.public import generation as generation_module
from xlafuse.bench.public.generation import GENERATIONS
from xlafuse.bench.public.sources import MODELS
from xlafuse.fusion import Report, fuse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the models' code
CHECKOUTS = Path(os.environ.get("CHECKOUTS", "no checkouts"))


def _made(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, Any]:
    """Builds a model's decoding step and its forward pass without dropout; skips if its packages are missing."""
    monkeypatch.setenv("USE_TORCH", "0")
    config_of = configs.gpt2

    def without_dropout(stack: Any) -> Any:
        config = config_of(stack)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return config

    monkeypatch.setattr(configs, "gpt2", without_dropout)
    model = next(each for each in MODELS if each.name == name)
    stack: Any = model.sizes["tiny"]
    stack = replace(stack, window=stack.length)  # Gemma's local layers see the first tokens of a cache, not the last
    try:
        return GENERATIONS[name](CHECKOUTS, jnp.bfloat16, stack), model.make(CHECKOUTS, jnp.bfloat16, stack)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def _decoded(generation: Any, params: Any, forward: Callable[..., Any]) -> np.ndarray:
    """Decodes token by token and returns all logits, (sequences, length, vocabulary)."""
    step, cache, found = jax.jit(forward, donate_argnums=2), generation.empty(), []
    for place in range(generation.tokens.shape[1]):
        logits, cache = step(params, generation.tokens[:, place : place + 1], cache)
        found.append(logits)
    return np.asarray(jnp.stack(found, 1), np.float32)


def _error(logits: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference of a token's logits, as a share of their norm."""
    return float(np.max(np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma"])
def test_tokens_one_by_one_have_the_logits_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    generation, program = _made(monkeypatch, name)
    params = jax.jit(generation.init)(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    whole = jax.jit(program.forward)(params, *program.batch)
    whole = np.asarray(getattr(whole, "logits", whole), np.float32)

    plain = _decoded(generation, params, generation.forward)
    reports: list[Report] = []
    fused = _decoded(generation, params, fuse(generation.forward, report=reports.append))

    taken = {site.operation for site in reports[0].taken}
    assert ("attention" if name == "qwen3" else "decode_attention") in taken  # Qwen 3's mask hides paddings in front
    assert _error(plain, whole) < 0.02
    assert _error(fused, whole) < 0.02  # up to 0.008 with weights of seed 0; bfloat16 has steps of 2**-8


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma"])
def test_a_prompt_may_be_whole_and_steps_choose_the_most_likely_token(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    generation, _ = _made(monkeypatch, name)
    params = jax.jit(generation.init)(jax.random.key(0))
    prompt = generation.tokens[:, :5]
    logits, cache = jax.jit(generation.forward)(params, prompt, generation.empty())

    tokens, after = jax.jit(generation.step)(params, prompt, generation.empty())

    np.testing.assert_array_equal(tokens[:, 0], jnp.argmax(logits, -1))
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    expected = _decoded(replace(generation, tokens=prompt), params, generation.forward)[:, -1]
    assert _error(np.asarray(logits, np.float32), expected) < 0.02


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma"])
def test_a_loop_generates_the_tokens_of_its_steps_at_every_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(generation_module, "ROOM", 4)
    generation, _ = _made(monkeypatch, name)
    params = jax.jit(generation.init)(jax.random.key(0))
    token, cache = generation.prompted(params)
    generate = jax.jit(generation.generating(generation.step))
    found, after = generate(params, token, cache)
    again, _ = generate(params, token, after)
    np.testing.assert_array_equal(again, found)

    for place in range(4):
        token, cache = jax.jit(generation.step)(params, token, cache)
        np.testing.assert_array_equal(found[:, place], token[:, 0])
