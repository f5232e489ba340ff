"""Block benchmark: times a transformer block under every strategy, forward only and with the backward pass.

Each case is one mode at one shape. The benchmark first checks outputs and gradients against those of the strategy
`xla`. Then all strategies, and the same block in other libraries (`peers`), take turns in one run. An NVIDIA GPU must
be attached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hlo_analysis.capture.lowering import gradient
from xlafuse.bench.candidates import bytes_of, checked, timed
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.settings import BlockSettings
from xlafuse.bench.timing import Candidate, buffer_sets
from xlafuse.models import BlockConfig, Layout, block_function, get_preset
from xlafuse.strategies import Strategy, get_strategy

PEERS = ("torch_compile", "torch_eager")
BASELINE = "xla"
WALL_SECONDS = 0.1
"""The host takes up to two milliseconds to prepare a call."""
TOLERANCE = 5e-2
"""Largest error, as a share of an array's root mean square.

The bound only catches a program that computes something else. The tests check accuracy.
"""
_SMALLEST = 2e-3
"""Smallest reference for an array's error, as a share of the largest root mean square among a result's arrays.

An array below it, such as the gradient of a key's bias, holds only rounding errors.
"""


Case = tuple[Any, ...]
"""Arguments of one call: weights, x, positions where the block has RoPE, and for "grad" the cotangents last."""


def bench_block(item: str, settings: BlockSettings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Times a mode at a shape, such as "grad 2x4096"; yields a str if the time limit left it out."""
    if time.time() > settings.until:
        yield f"{settings.preset} {item}: not begun, the time was up"
        return
    mode, shape = item.split()
    yield bench_case(get_preset(settings.preset), shape, mode, settings, sampler)


def bench_case(
    config: BlockConfig, shape: str, mode: str, settings: BlockSettings, sampler: Sampler | None = None
) -> ShapeResult:
    """Times one mode at one shape after checking its results; failures go into the result's problems."""
    sizes = batch_and_length(shape)
    moved = perfect_bytes(config, sizes, mode)

    def make(problems: list[Problem]) -> list[Candidate]:
        cases = [case_maker(config, sizes, mode)(jax.random.key(settings.seed))]
        cases += [jax.tree.map(jnp.copy, cases[0]) for _ in range(1, buffer_sets(moved))]
        return _candidates(config, sizes, mode, cases, settings, problems)

    result = ShapeResult(op=config.name, phase=mode, spec=shape, bytes=moved)
    return timed(result, make, settings, sampler, baseline=BASELINE, wall_seconds=WALL_SECONDS)


def batch_and_length(shape: str) -> tuple[int, int]:
    """Parses a shape: '2x4096' gives (2, 4096)."""
    batch, _, length = shape.partition("x")
    return int(batch), int(length)


def case_maker(
    config: BlockConfig, shape: tuple[int, int], mode: str, layout: Layout | None = None
) -> Callable[[jax.Array], Case]:
    """Returns a jitted function that draws random arguments from a key, sharded by the layout.

    Weights are scaled so that activations keep their size from layer to layer. Everything else is standard normal.
    """
    _, abstract = block_function(config, shape, layout=layout)
    x = abstract[1]

    def make(key: jax.Array) -> Case:
        keys = iter(jax.random.split(key, len(jax.tree.leaves(abstract)) + 1))

        def normal(like: Any, deviation: float = 1.0) -> jax.Array:
            return (deviation * jax.random.normal(next(keys), like.shape, jnp.float32)).astype(like.dtype)

        def weight(path: Any, like: Any) -> jax.Array:
            is_scale = jax.tree_util.keystr(path).endswith("['scale']")
            return is_scale + normal(like, 0.1 if like.ndim == 1 else like.shape[-2] ** -0.5)

        params = jax.tree_util.tree_map_with_path(weight, abstract[0])
        case: Case = (params, normal(x))
        if len(abstract) > 2:
            case += (jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),)
        if mode == "grad":
            case += ([normal(x)],)  # the output is as x
        return case

    if layout is None:
        return jax.jit(make)
    places = jax.tree.map(lambda each: each.sharding, abstract)
    cotangents = ([x.sharding],) if mode == "grad" else ()
    return jax.jit(make, out_shardings=(*places, *cotangents))


def program(strategy: Strategy, config: BlockConfig, shape: tuple[int, int], mode: str) -> Callable[..., Any]:
    """Returns the jitted block under a strategy, a function of a `Case`.

    It returns the output and, for "grad", the gradients of the weights' leaves and of x.

    Raises:
        InapplicablePlanError: the block cannot use one of the strategy's kernels.
    """
    function, abstract = block_function(config, shape, plan=strategy.plan)
    function = strategy.rewritten(function)
    if mode == "grad":
        function, _ = gradient(function, abstract)
    return jax.jit(function, compiler_options=dict(strategy.compiler_options))


def _candidates(
    config: BlockConfig,
    shape: tuple[int, int],
    mode: str,
    cases: Sequence[Case],
    settings: BlockSettings,
    problems: list[Problem],
) -> list[Candidate]:
    """Returns the candidates that run and agree with the first that does; failures go into `problems`."""

    def strategy(name: str) -> tuple[Candidate, Sequence[jax.Array]]:
        call = program(get_strategy(name), config, shape, mode)
        result = jax.block_until_ready(jax.tree.leaves(call(*cases[0])))
        return Candidate(name=name, kind="strategy", call=call, inputs=cases), result

    def peer(name: str) -> tuple[Candidate, Sequence[jax.Array]]:
        from xlafuse.bench.peers import torch_block  # imports PyTorch

        return torch_block.candidate(name, config, mode, cases)

    makers = {name: partial(strategy, name) for name in (BASELINE, *settings.strategies)}
    makers |= {name: partial(peer, name) for name in settings.peers}
    return checked(makers, problems, smallest=_SMALLEST, tolerance=TOLERANCE)


def flops(config: BlockConfig, shape: tuple[int, int], mode: str) -> int:
    """Counts the FLOPs of the block's matrix products; attention counts only the scores that its mask keeps.

    The backward pass counts twice the forward pass. Recomputation does not count.
    """
    batch, length = shape
    _, (params, *_) = block_function(config, shape)
    weights = sum(math.prod(leaf.shape[-2:]) * _uses(config, leaf) for leaf in jax.tree.leaves(params))
    pairs = length * (length + 1) // 2 if config.is_causal else length * length
    forward = 2 * batch * length * weights + 4 * batch * pairs * config.num_heads * config.head_dim
    return forward * (3 if mode == "grad" else 1)


def _uses(config: BlockConfig, weight: Any) -> int:
    """Returns how many products with a weight's matrices each token takes part in."""
    return {1: 0, 2: 1, 3: config.experts_per_token}[len(weight.shape)]


def perfect_bytes(config: BlockConfig, shape: tuple[int, int], mode: str) -> int:
    """Counts the bytes that any block must read and write: weights, x and y.

    "grad" adds the gradients of the weights and of x, and the cotangent.
    """
    _, (params, x, *_) = block_function(config, shape)
    weights, tokens = bytes_of(params), bytes_of(x)
    return 2 * (weights + 2 * tokens) if mode == "grad" else weights + 2 * tokens
