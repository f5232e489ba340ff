"""Model benchmark: times a whole decoder under the strategies, called through `jax.jit` as users call it.

The main figure is the wall-clock time of a step. Beside it stand the sum of its kernel times, compile time and memory.
The benchmark checks each phase against the strategy `xla` first. Then the strategies, and the same model in PyTorch
(`peers`), take turns. An NVIDIA GPU must be attached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.bench.block import BASELINE, WALL_SECONDS, batch_and_length
from xlafuse.bench.candidates import Chain, bytes_of, checked, compiled, timed
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.settings import TORCH_MODES, ModelSettings
from xlafuse.bench.timing import Candidate
from xlafuse.models.decoder import Decoder, DecoderConfig, get_decoder
from xlafuse.strategies import get_strategy

PHASES = ("forward", "train", "prefill", "decode")
_ROOM = 64
"""Tokens that decoding may append before it starts over after the prompt."""
_TOLERANCE = 0.1
"""Largest error, as a share of the root mean square, after all layers in bfloat16.

The bound only catches a program that computes something else.
"""


def bench_model(item: str, settings: ModelSettings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Times a phase at a shape, sequences x tokens, such as "decode 8x1024"; yields a str if it is left out.

    Decoding appends one token to each of that many sequences of that many tokens.
    """
    config = get_decoder(settings.model)
    config = replace(config, layers=settings.layers or config.layers, is_scanned=settings.is_scanned)
    phase, shape = item.split()
    if time.time() > settings.until:
        yield f"{settings.model} {item}: not begun, the time was up"
    elif config.learned_positions is not None and _positions(shape, phase) > config.learned_positions:
        yield (
            f"{settings.model} {item}: {_positions(shape, phase)} positions are needed, and the model has "
            f"{config.learned_positions}: give shorter sequences"
        )
    else:
        yield _bench_phase(config, shape, phase, settings, sampler)


def _bench_phase(
    config: DecoderConfig,
    shape: str,
    phase: str,
    settings: ModelSettings,
    sampler: Sampler | None,
) -> ShapeResult:
    def make(problems: list[Problem]) -> list[Candidate]:
        chain = _chain(config, shape, phase, settings.seed)
        shared: list[Any] = []

        def of(name: str) -> tuple[Candidate, Any]:
            if name != BASELINE and time.time() > settings.until:
                raise TimeoutError("not begun, the time was up")
            if name not in TORCH_MODES:
                return _of_strategy(name, config, phase, chain)
            from xlafuse.bench.peers import torch_model

            if not shared:
                shared.append(torch_model.shared_state(config, phase, chain.arguments, _ROOM))
            return torch_model.candidate(name, config, phase, chain.arguments, *shared)

        names = (BASELINE, *settings.strategies, *settings.peers)
        return checked({name: partial(of, name) for name in names}, problems, tolerance=_TOLERANCE)

    batch, length = batch_and_length(shape)
    tokens = batch * (1 if phase == "decode" else length)
    result = ShapeResult(
        op=f"{settings.model}, {config.layers} layers{', scanned' if config.is_scanned else ''}",
        phase=phase,
        spec=shape,
        bytes=bytes_of(jax.eval_shape(Decoder(config).params, jax.random.key(0))),
    )
    return timed(result, make, settings, sampler, baseline=BASELINE, wall_seconds=WALL_SECONDS, tokens=tokens)


def _of_strategy(name: str, config: DecoderConfig, phase: str, chain: Chain) -> tuple[Candidate, Any]:
    """Returns a strategy's candidate, and the result of its first call."""
    step, costs = _compiled(name, config, phase, chain.arguments)
    if phase == "train":  # a copy of weights and optimizer does not fit; losses hardly change
        found = _summary(phase, chain.call(step))
    else:
        params, *rest = chain.arguments
        found = _summary(phase, step(params, *jax.tree.map(jnp.copy, rest)))
    return Candidate(name=name, kind="strategy", call=partial(chain.call, step), inputs=[()], costs=costs), found


def _positions(shape: str, phase: str) -> int:
    return batch_and_length(shape)[1] + (_ROOM if phase == "decode" else 0)


def _cache_length(prompt: int) -> int:
    return -(-(prompt + _ROOM) // _ROOM) * _ROOM


def _chain(config: DecoderConfig, shape: str, phase: str, seed: int) -> Chain:
    """Returns the calls of a phase."""
    batch, length = batch_and_length(shape)
    appended = 0

    def begin() -> tuple[Any, ...]:
        decoder = Decoder(config)
        params = decoder.params(jax.random.key(seed))
        drawn = jax.random.randint(jax.random.key(seed + 1), (batch, length + 1), 0, config.vocabulary, jnp.int32)
        tokens = drawn[:, :-1]
        if phase == "forward":
            return params, tokens
        if phase == "train":
            return params, jax.jit(_optimizer().init)(params), drawn
        cache = decoder.empty_cache(batch, _cache_length(length))
        if phase == "prefill":
            return params, tokens, cache, jnp.int32(0)
        cache = jax.jit(lambda cache: jax.tree.map(lambda each: each + 0.5, cache), donate_argnums=0)(cache)
        return params, tokens[:, -1:], cache, jnp.int32(length)

    def append(arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        """Starts over after the prompt where the cache is full."""
        nonlocal appended
        appended = (appended + 1) % _ROOM
        token, cache, filled = result
        return arguments[0], token, cache, filled if appended else jnp.int32(length)

    advance: dict[str, Callable[[tuple[Any, ...], Any], tuple[Any, ...]]] = {
        "forward": lambda arguments, _: arguments,
        "train": lambda arguments, result: (*result[:2], arguments[2]),
        "prefill": lambda arguments, result: (*arguments[:2], result[1], arguments[3]),
        "decode": append,
    }
    return Chain(begin, advance[phase])


def _optimizer() -> Any:
    import optax  # only a training step needs it

    return optax.adamw(1e-5)


def _compiled(strategy: str, config: DecoderConfig, phase: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Compiles a phase's function with `jax.jit`; returns it with its compile time and memory."""
    found = get_strategy(strategy)
    decoder = Decoder(config, found.plan)
    function, donated = {
        "forward": (found.rewritten(decoder.logits), ()),
        "train": (partial(decoder.train_step, _optimizer(), loss=found.rewritten(decoder.loss)), (0, 1)),
        "prefill": (found.rewritten(decoder.step), (2,)),
        # With all of its state donated, a step finds every array where the last one did.
        "decode": (found.rewritten(decoder.step), (1, 2, 3)),
    }[phase]
    step = jax.jit(function, donate_argnums=donated, compiler_options=dict(found.compiler_options))
    return step, compiled(strategy, step, arguments)[1]


def _summary(phase: str, result: Any) -> list[jax.Array]:
    """Returns the arrays to compare: the logits, the loss or the caches."""
    if phase == "forward":
        return [result]
    return [result[2]] if phase == "train" else jax.tree.leaves(jax.tree.map(jnp.copy, result[1]))
