"""The model benchmark: a whole decoder under the strategies, called by `jax.jit` as its users call it.

What counts is the wall clock of a step, beside the sum of its kernels' times, compile time and memory. Each phase is
checked against the strategy `xla` first; then the strategies take turns. Needs an attached NVIDIA GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.bench.block import BASELINE, batch_and_length
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Measured, Problem, Results, ShapeResult
from xlafuse.bench.timing import Candidate, Timing, time_candidates
from xlafuse.comparison import fit_plan
from xlafuse.models.decoder import Decoder, DecoderConfig, get_decoder
from xlafuse.strategies import get_strategy

PHASES = ("forward", "train", "prefill", "decode")
_ROOM = 64
"""Tokens that decoding may append before it starts over behind the prompt."""
_TOLERANCE = 0.1
"""Of a root mean square, after all layers in bfloat16: guards against timing nonsense."""
_MESSAGE_LENGTH = 600
_UNTIMED = Timing(median_us=0, p20_us=0, p80_us=0, wall_us=0, kernels=(), samples=0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How to measure. layers: in place of the model's own number. seconds: no new phase is begun after so many."""

    model: str
    strategies: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    layers: int | None = None
    is_scanned: bool = False
    rounds: int = 5
    calls: int = 4
    seconds: float = float("inf")
    seed: int = 0


class _Chain:
    """Arguments that calls hand on: a step's results take the place of the arguments that it was given to keep."""

    def __init__(self, arguments: tuple[Any, ...], advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]) -> None:
        self.arguments = arguments
        self.advance = advance

    def call(self, step: Callable[..., Any]) -> Any:
        result = step(*self.arguments)
        self.arguments = self.advance(self.arguments, result)
        return result


def bench_model(shape: str, settings: ModelSettings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Measures each phase at a shape, "8x1024": sequences, and tokens of each; a str names a phase left out.

    Decoding appends one token to each of so many sequences of so many tokens.
    """
    config = get_decoder(settings.model)
    config = replace(config, layers=settings.layers or config.layers, is_scanned=settings.is_scanned)
    deadline = time.monotonic() + settings.seconds
    params = jax.jit(Decoder(config).params)(jax.random.key(settings.seed))
    for phase in settings.phases:
        if time.monotonic() > deadline:
            yield f"{settings.model} {phase} {shape}: not begun within {settings.seconds:.0f} s"
            continue
        if phase == "train":  # gives the weights' memory away
            params, given = None, params
            yield _bench_phase(config, shape, phase, given, settings, sampler)
            params = jax.jit(Decoder(config).params)(jax.random.key(settings.seed))
        else:
            yield _bench_phase(config, shape, phase, params, settings, sampler)


def _bench_phase(
    config: DecoderConfig, shape: str, phase: str, params: Any, settings: ModelSettings, sampler: Sampler | None
) -> ShapeResult:
    start = time.monotonic()
    chain = _chain(config, shape, phase, params, settings.seed)
    del params  # a training step gives its memory away
    problems: list[Problem] = []
    measured: dict[str, Measured] = {}
    candidates: list[Candidate] = []
    expected: Any = None
    for name in dict.fromkeys((BASELINE, *settings.strategies)):
        try:
            step, costs = _compiled(name, config, phase, chain.arguments)
            if phase == "train":  # there is no memory for a copy of weights and optimizer: losses hardly move
                found = _summary(phase, chain.call(step))
            else:
                params, *rest = chain.arguments
                found = _summary(phase, step(params, *jax.tree.map(jnp.copy, rest)))
                del params, rest
            expected = found if expected is None else expected
            _check_close(found, expected)
        except Exception as error:  # one strategy must not end the run of the others
            problems.append(Problem(candidate=name, message=f"{type(error).__name__}: {str(error)[:_MESSAGE_LENGTH]}"))
            continue
        candidates.append(Candidate(name=name, kind="strategy", call=partial(chain.call, step), inputs=[()]))
        measured[name] = costs
    timed_from = time.monotonic()
    run = time_candidates(candidates, rounds=settings.rounds, calls=settings.calls)
    problems += [Problem(candidate=name, message=text[:_MESSAGE_LENGTH]) for name, text in run.failures.items()]
    return ShapeResult(
        op=f"{settings.model}, {config.layers} layers{', scanned' if config.is_scanned else ''}",
        phase=phase,
        spec=shape,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(chain.arguments[0])),
        ceiling=None,
        candidates=tuple(replace(measured[name], timing=timing) for name, timing in run.timings.items()),
        problems=tuple(problems),
        seconds=time.monotonic() - start,
        warm_up_seconds=run.warm_up_seconds,
        is_steady=run.is_steady,
        activity=sampler.since(timed_from) if sampler else None,
    )


def _chain(config: DecoderConfig, shape: str, phase: str, params: Any, seed: int) -> _Chain:
    """The arguments of a phase's first call, on the device, and what a call's result changes in them."""
    batch, length = batch_and_length(shape)
    decoder = Decoder(config)
    drawn = jax.random.randint(jax.random.key(seed + 1), (batch, length + 1), 0, config.vocabulary, jnp.int32)
    tokens = drawn[:, :-1]
    if phase == "forward":
        return _Chain((params, tokens), lambda arguments, _: arguments)
    if phase == "train":
        state = jax.jit(_optimizer().init)(params)
        return _Chain((params, state, drawn), lambda arguments, result: (*result[:2], arguments[2]))
    cache = decoder.empty_cache(batch, -(-(length + _ROOM) // _ROOM) * _ROOM)
    if phase == "prefill":
        start = jnp.int32(0)
        return _Chain((params, tokens, cache, start), lambda _, result: (params, tokens, result[1], start))
    start = jnp.int32(length)
    count = 0

    def append(arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        nonlocal count
        count = (count + 1) % _ROOM
        token, cache, filled = result
        return params, token, cache, filled if count else start

    cache = jax.jit(lambda cache: jax.tree.map(lambda each: each + 0.5, cache), donate_argnums=0)(cache)
    return _Chain((params, tokens[:, -1:], cache, start), append)


def _optimizer() -> Any:
    import optax  # only a training step needs it

    return optax.adamw(1e-5)


def _compiled(strategy: str, config: DecoderConfig, phase: str, arguments: tuple[Any, ...]) -> tuple[Any, Measured]:
    """The phase's function as `jax.jit` makes it, and what it cost to make, without times of calls."""
    fitted, _ = fit_plan(get_strategy(strategy), config.block)
    decoder = Decoder(config, fitted.plan)
    function, donated = {
        "forward": (decoder.logits, ()),
        "train": (partial(decoder.train_step, _optimizer()), (0, 1)),
        "prefill": (decoder.step, (2,)),
        "decode": (decoder.step, (2,)),
    }[phase]
    step = jax.jit(function, donate_argnums=donated, compiler_options=dict(fitted.compiler_options))
    start = time.perf_counter()
    lowered = step.lower(*arguments)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    memory = compiled.memory_analysis()
    peak = None
    if memory is not None:
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
        peak = sum(sizes) - memory.alias_size_in_bytes
    return step, Measured(
        name=strategy,
        kind="strategy",
        timing=_UNTIMED,
        lower_seconds=lowered_at - start,
        compile_seconds=compiled_at - lowered_at,
        peak_bytes=peak,
    )


def _summary(phase: str, result: Any) -> list[jax.Array]:
    """What is compared: logits, the loss, or the caches."""
    if phase == "forward":
        return [result]
    return [result[2]] if phase == "train" else jax.tree.leaves(jax.tree.map(jnp.copy, result[1]))


def _check_close(found: list[jax.Array], expected: list[jax.Array]) -> None:
    for i, (got, exact) in enumerate(zip(found, expected, strict=True)):
        size = float(jnp.sqrt(jnp.mean(jnp.square(exact.astype(jnp.float32)))))
        error = float(jnp.sqrt(jnp.mean(jnp.square(got.astype(jnp.float32) - exact.astype(jnp.float32)))))
        if not error <= _TOLERANCE * size:
            raise AssertionError(f"array {i} {exact.shape} is off by {error / size:.3g} of its size from {BASELINE}'s")


def tokens_per_second(result: ShapeResult, name: str) -> float:
    """By the wall clock: of decoding one token a sequence, else all tokens of the shape."""
    batch, length = batch_and_length(result.spec)
    wall = next(c.timing.wall_us for c in result.candidates if c.name == name)
    return batch * (1 if result.phase == "decode" else length) / wall * 1e6


def model_lines(result: ShapeResult) -> list[str]:
    """A phase: for each strategy wall clock, tokens a second, kernels' time, seconds to compile, and memory."""
    base = next((c for c in result.candidates if c.name == BASELINE), None)
    lines = [f" {result.phase} {result.op} {result.spec}"]
    for each in result.candidates:
        ratio = f"{base.timing.wall_us / each.timing.wall_us:.3f}" if base else "–"
        timing = each.timing
        lines.append(
            f"      {each.name:<14} wall {timing.wall_us:10.1f} µs ×{ratio}  kernels {timing.median_us:10.1f} µs in "
            f"{len(timing.kernels)}  {tokens_per_second(result, each.name):9.0f} tokens/s  lower "
            f"{each.lower_seconds or 0:.1f} + compile {each.compile_seconds or 0:.1f} s  "
            f"{(each.peak_bytes or 0) / 1e9:.1f} GB"
        )
    return lines


def model_summary(results: Results) -> list[str]:
    """What was left out; the lines of each phase stand above."""
    return [f"left out: {note}" for run in results.runs for note in run.left_out]
