"""Public decoders that generate with their own caches: greedily, with weights in bfloat16."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xlafuse.bench.public import configs
from xlafuse.bench.public.language_models import gemma_library, qwen3_library
from xlafuse.bench.public.programs import nnx_program, tokens_of
from xlafuse.bench.public.sizes import ROOM, Stack


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A decoder that generates greedily.

    tokens: (sequences, length), as many as the cache has room for. init: makes the parameters from a key, as they are
    served: floating ones in the dtype of the computation. empty: makes a cache without tokens. forward: of (params,
    tokens, cache), returns the last token's logits, (sequences, vocabulary), and the cache with these tokens.
    """

    size: str
    tokens: jax.Array
    init: Callable[[jax.Array], Any]
    empty: Callable[[], Any]
    forward: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]

    def step(self, params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Returns the next tokens, (sequences, 1), and the cache with the given ones."""
        logits, cache = self.forward(params, tokens, cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None], cache

    @staticmethod
    def generating(step: Callable[..., tuple[jax.Array, Any]]) -> Callable[..., tuple[jax.Array, Any]]:
        """Wraps `step` in a loop on the device that generates `ROOM` tokens, as `generate` of transformers does.

        It returns them, (sequences, `ROOM`), and the cache. The cache's integers, as its length, are those that were
        given, so that the next call generates the same tokens again.
        """

        def generate(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def next_of(last: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], jax.Array]:
                found = step(params, *last)
                return found, found[0][:, 0]

            (_, after), found = jax.lax.scan(next_of, (tokens, cache), length=ROOM)
            again = jax.tree.map(lambda a, b: b if jnp.issubdtype(a.dtype, jnp.floating) else a, cache, after)
            return found.T, again

        return generate

    @cached_property
    def prompted(self) -> Callable[[Any], tuple[jax.Array, Any]]:
        """Makes of the parameters what `step` returns after the prompt: all tokens but the last `ROOM`, one by one.

        It is compiled once. A step's products need no tuning of their own then, as those of a whole prompt would.
        """

        @jax.jit
        def prompted(params: Any) -> tuple[jax.Array, Any]:
            prompt = self.tokens[:, :-ROOM]

            def step(place: jax.Array, last: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                return self.step(params, jax.lax.dynamic_slice_in_dim(prompt, place, 1, 1), last[1])

            return jax.lax.fori_loop(0, prompt.shape[1], step, (prompt[:, :1], self.empty()))

        return prompted


def _served(init: Callable[[jax.Array], Any], dtype: Any) -> Callable[[jax.Array], Any]:
    def made(key: jax.Array) -> Any:
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, init(key))

    return made


def _of_transformers(kind: str, config: Any, dtype: Any, sizes: Stack) -> Generation:
    """Makes the generation of a model of `transformers`, whose methods prepare and update its inputs."""
    import transformers

    model = getattr(transformers, kind)(config, dtype=dtype, _do_init=False)
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)

    def empty() -> Any:
        given = model.prepare_inputs_for_generation(tokens[:, :1], sizes.length)
        return given["past_key_values"], given["position_ids"]

    def forward(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        past, start = cache
        given = {"past_key_values": past, "position_ids": start + jnp.arange(tokens.shape[1])}
        mask = jnp.ones((sizes.batch, sizes.length), jnp.int32)  # as prepare_inputs_for_generation has it
        out = model(tokens, params=params, attention_mask=mask, **given)
        given = model.update_inputs_for_generation(out, given)
        return out.logits[:, -1], (given["past_key_values"], given["position_ids"])

    return Generation(
        size=str(sizes),
        tokens=tokens,
        init=_served(lambda key: model.init_weights(key, (1, 1)), dtype),
        empty=jax.jit(empty),  # XLA drops the weights that transformers makes for it
        forward=forward,
    )


def llama(folder: Path, dtype: Any, sizes: Stack) -> Generation:
    """Makes that of Llama."""
    return _of_transformers("FlaxLlamaForCausalLM", configs.llama(sizes), dtype, sizes)


def gpt2(folder: Path, dtype: Any, sizes: Stack) -> Generation:
    """Makes that of GPT-2."""
    return _of_transformers("FlaxGPT2LMHeadModel", configs.gpt2(sizes), dtype, sizes)


def _of_nnx(
    make: Callable[[Any], Any],
    empty: Callable[[], Any],
    forward: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    dtype: Any,
    sizes: Stack,
) -> Generation:
    """Makes the generation of an NNX module. forward: of module, tokens and cache."""
    program = nnx_program(make, forward, forward, dtype=dtype, size=str(sizes), batch=())
    return Generation(
        size=program.size,
        tokens=tokens_of(sizes.batch, sizes.length, sizes.vocabulary),
        init=_served(program.init, dtype),
        empty=empty,
        forward=program.forward,
    )


def qwen3(folder: Path, dtype: Any, sizes: Stack) -> Generation:
    """Makes that of Bonsai's Qwen 3, whose caches have room for a power of two."""
    library, config = qwen3_library(folder, sizes)

    def empty() -> Any:
        return library.init_cache(config, sizes.batch, sizes.length, 0, dtype)

    def forward(module: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return library.forward(module, cache, tokens, pad_id=0)

    return _of_nnx(lambda rngs: library.Qwen3(config, rngs=rngs), empty, forward, dtype, sizes)


def gemma(folder: Path, dtype: Any, sizes: Stack) -> Generation:
    """Makes that of Flax's Gemma 3, whose local layers see the first tokens of a cache, and not the last."""
    library, _, config = gemma_library(folder, dtype, sizes)

    def make(rngs: Any) -> Any:
        return library.Transformer(config, rngs=rngs)

    def empty() -> Any:
        return nnx.eval_shape(lambda: make(nnx.Rngs(0))).init_cache(sizes.length, sizes.batch, dtype)

    def forward(module: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        positions = cache["layer_0"]["end_index"][:, None] + jnp.arange(tokens.shape[1])
        logits, cache = module(tokens, positions, cache, jnp.arange(sizes.length) <= positions[:, :, None])
        return logits[:, -1], cache

    return _of_nnx(make, empty, forward, dtype, sizes)


GENERATIONS = {"llama": llama, "gpt2": gpt2, "qwen3": qwen3, "gemma": gemma}
"""By the model's name: what makes it from (folder of checkouts, dtype, sizes)."""
