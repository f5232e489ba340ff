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
from xlafuse.bench.candidates import checked, compiled, timed
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.settings import ModelSettings
from xlafuse.bench.timing import Candidate
from xlafuse.models.decoder import Decoder, DecoderConfig, get_decoder
from xlafuse.strategies import get_strategy

PHASES = ("forward", "train", "prefill", "decode")
PEERS = ("torch_eager", "torch_compile", "torch_reduce_overhead")
_ROOM = 64
"""Tokens that decoding may append before it starts over after the prompt."""
_TOLERANCE = 0.1
"""Largest error, as a share of the root mean square, after all layers in bfloat16.

The bound only catches a program that computes something else.
"""


class _Chain:
    """Arguments of successive calls: a step's results replace the arguments that were donated to it.

    peers: the arguments that the peers share.
    """

    def __init__(self, arguments: tuple[Any, ...], advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]) -> None:
        self.arguments = arguments
        self.advance = advance
        self.peers: Any = None

    def call(self, step: Callable[..., Any]) -> Any:
        result = step(*self.arguments)
        self.arguments = self.advance(self.arguments, result)
        return result


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
        chain = _chain(config, shape, phase, Decoder(config).params(jax.random.key(settings.seed)), settings.seed)

        def of(name: str) -> tuple[Candidate, Any]:
            if name != BASELINE and time.time() > settings.until:
                raise TimeoutError("not begun, the time was up")
            return (_of_peer if name in PEERS else _of_strategy)(name, config, phase, chain)

        names = (BASELINE, *settings.strategies, *settings.peers)
        return checked({name: partial(of, name) for name in names}, problems, tolerance=_TOLERANCE)

    batch, length = batch_and_length(shape)
    tokens = batch * (1 if phase == "decode" else length)
    result = ShapeResult(
        op=f"{settings.model}, {config.layers} layers{', scanned' if config.is_scanned else ''}",
        phase=phase,
        spec=shape,
        bytes=_bytes_of(jax.eval_shape(Decoder(config).params, jax.random.key(0))),
    )
    return timed(result, make, settings, sampler, baseline=BASELINE, wall_seconds=WALL_SECONDS, tokens=tokens)


def _of_strategy(name: str, config: DecoderConfig, phase: str, chain: _Chain) -> tuple[Candidate, Any]:
    """Returns a strategy's candidate, and the result of its first call."""
    step, costs = _compiled(name, config, phase, chain.arguments)
    if phase == "train":  # a copy of weights and optimizer does not fit; losses hardly change
        found = _summary(phase, chain.call(step))
    else:
        params, *rest = chain.arguments
        found = _summary(phase, step(params, *jax.tree.map(jnp.copy, rest)))
    return Candidate(name=name, kind="strategy", call=partial(chain.call, step), inputs=[()], costs=costs), found


def _of_peer(name: str, config: DecoderConfig, phase: str, chain: _Chain) -> tuple[Candidate, Any]:
    """Returns a peer's candidate, and the result of its first call."""
    from xlafuse.bench.peers import torch_model

    if chain.peers is None:
        chain.peers = torch_model.shared_state(config, phase, chain.arguments, _ROOM)
    return torch_model.candidate(name, config, phase, chain.arguments, chain.peers)


def _bytes_of(tree: Any) -> int:
    return sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(tree))


def _positions(shape: str, phase: str) -> int:
    return batch_and_length(shape)[1] + (_ROOM if phase == "decode" else 0)


def _cache_length(prompt: int) -> int:
    return -(-(prompt + _ROOM) // _ROOM) * _ROOM


def _chain(config: DecoderConfig, shape: str, phase: str, params: Any, seed: int) -> _Chain:
    """Puts the arguments of a phase's first call on the device, with the rule by which a result updates them."""
    batch, length = batch_and_length(shape)
    decoder = Decoder(config)
    drawn = jax.random.randint(jax.random.key(seed + 1), (batch, length + 1), 0, config.vocabulary, jnp.int32)
    tokens = drawn[:, :-1]
    if phase == "forward":
        return _Chain((params, tokens), lambda arguments, _: arguments)
    if phase == "train":
        state = jax.jit(_optimizer().init)(params)
        return _Chain((params, state, drawn), lambda arguments, result: (*result[:2], arguments[2]))
    cache = decoder.empty_cache(batch, _cache_length(length))
    if phase == "prefill":
        start = jnp.int32(0)
        return _Chain((params, tokens, cache, start), lambda _, result: (params, tokens, result[1], start))
    count = 0

    def append(arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        nonlocal count
        count = (count + 1) % _ROOM
        token, cache, filled = result
        return params, token, cache, filled if count else jnp.int32(length)

    cache = jax.jit(lambda cache: jax.tree.map(lambda each: each + 0.5, cache), donate_argnums=0)(cache)
    return _Chain((params, tokens[:, -1:], cache, jnp.int32(length)), append)


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
