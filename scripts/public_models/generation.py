"""Generates with public decoders and their own caches, and times that on a GPU with and without `xlafuse.fuse`.

    python scripts/public_models/generation.py [MODEL ...] --checkouts FOLDER --layers 100 --results FILE

Greedy, weights in bfloat16, one call of `jax.jit` a token, which donates its cache. The sizes are those of `decoding`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
import jax
import jax.numpy as jnp
import numpy as np
import sizes as tables
from flax import nnx
from language_models import gemma_library, qwen3_library
from programs import nnx_program, tokens_of
from sizes import ROOM, Stack
from times import difference

from xlafuse.fusion import fuse

_TOLERANCE = 0.1
"""Largest accepted difference after all layers in bfloat16: it only catches a program that computes something else."""
RESULTS = Path(__file__).resolve().parents[2] / "notebooks/results/public_models.json"


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


def timed(generation: Generation, params: Any, rounds: int = 7) -> dict[str, Any]:
    """Times the tokens after the prompt, as the program is and by `xlafuse.fuse`, in turns.

    Returns:
        "before" and "after": the wall clock of a token, of `ROOM` in a row, in microseconds: the median of the rounds.
        "error": the difference of the first step's keys and values, over what it writes. "alike": the share of equal
        tokens, which part for good where two logits are nearly equal.
    """
    prompt = np.asarray(generation.tokens[:, :-ROOM])
    programs = {"before": generation.step, "after": fuse(generation.step)}
    given = params, generation.tokens[:, :1], generation.empty()
    with ThreadPoolExecutor(2) as pool:  # XLA compiles a program on one core
        made = pool.map(lambda each: jax.jit(each, donate_argnums=2).lower(*given).compile(), programs.values())
        compiled = dict(zip(programs, made, strict=True))
    first, cache = given[1:]
    for place in range(prompt.shape[1]):
        first, cache = compiled["before"](params, prompt[:, place : place + 1], cache)

    def generated(name: str) -> tuple[float, np.ndarray]:
        """Returns the microseconds of a token, and the tokens."""
        token, own = first, jax.block_until_ready(jax.tree.map(jnp.copy, cache))
        found, began = [], time.perf_counter()
        for _ in range(ROOM):
            token, own = compiled[name](params, token, own)
            found.append(token)
        jax.block_until_ready(token)
        return (time.perf_counter() - began) / ROOM * 1e6, np.concatenate(jax.device_get(found), 1)

    after = {name: each(params, first, jax.tree.map(jnp.copy, cache))[1] for name, each in compiled.items()}
    written = {name: jax.tree.map(jnp.subtract, each, cache) for name, each in after.items()}
    error = difference(written["after"], written["before"])
    if not error < _TOLERANCE:
        raise ArithmeticError(f"keys and values differ by {error:.3g} of their norm")
    tokens = {name: generated(name)[1] for name in compiled}
    walls = [{name: generated(name)[0] for name in compiled} for _ in range(rounds)]
    return {
        "gpu": jax.devices()[0].device_kind,
        **{name: {"wall_us": round(statistics.median(each[name] for each in walls), 1)} for name in compiled},
        "error": error,
        "alike": float(np.mean(tokens["after"] == tokens["before"])),
    }


def main() -> int:
    """Times the models and adds them to the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(GENERATIONS), metavar="MODEL", help=", ".join(GENERATIONS))
    parser.add_argument("--checkouts", type=Path, default=Path(), help="folder of the repositories")
    parser.add_argument("--layers", type=int, required=True, help="at most so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to complete")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    failed = 0
    for name in options.models:
        try:
            stack = tables.decoding(tables.resolve(getattr(tables, name.upper()), "real", options.layers))
            generation = GENERATIONS[name](options.checkouts, jnp.bfloat16, stack)
            with jax.default_device(jax.devices("cpu")[0]):  # where XLA compiles random weights sooner
                params = jax.jit(generation.init)(jax.random.key(0))
            found = {"size": generation.size, **timed(generation, jax.device_put(params, jax.devices()[0]))}
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        print(f"{name} decode: {found}", flush=True)
        results.setdefault(name, {}).setdefault("decode", {})["real"] = found
        options.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
