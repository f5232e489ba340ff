"""Public decoders of `scripts/public_models` that generate with their own caches, on the CPU at the size "tiny"."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlafuse.fusion import Report, fuse

FOLDER = Path(__file__).parents[1] / "scripts/public_models"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the models' code
CHECKOUTS = Path(os.environ.get("CHECKOUTS", "no checkouts"))


def _made(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, Any]:
    """Makes the generation of a model, and the program of its forward pass without dropout; skips what is missing."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("USE_TORCH", "0")
    configs, sizes = (importlib.import_module(each) for each in ("configs", "sizes"))
    makers = importlib.import_module("transformers_models" if name in ("llama", "gpt2") else "language_models")
    config_of = configs.gpt2

    def without_dropout(stack: Any) -> Any:
        config = config_of(stack)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return config

    monkeypatch.setattr(configs, "gpt2", without_dropout)
    stack = getattr(sizes, name.upper())["tiny"]
    stack = replace(stack, window=stack.length)  # Gemma's local layers see the first tokens of a cache, not the last
    make = getattr(makers, "flax_gemma" if name == "gemma" else name)
    try:
        generation = importlib.import_module("generation").GENERATIONS[name](CHECKOUTS, jnp.bfloat16, stack)
        return generation, make(CHECKOUTS, jnp.bfloat16, stack)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def _decoded(generation: Any, params: Any, forward: Callable[..., Any]) -> np.ndarray:
    """Returns the logits of all tokens, one by one, (sequences, length, vocabulary)."""
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
    assert ("decode_attention" in taken) == (name != "qwen3")  # whose mask also hides paddings in front
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
