"""Mesh benchmark: layers and a training step on all attached GPUs, data, fully sharded, tensor and sequence parallel.

"gradient" is a stack of layers with the gradients of its weights and its input. "train" is a step of the whole model
with the AdamW of optax: weights and its state in float32, products and collectives in bfloat16. Each is checked against
the first strategy and timed by the wall clock, as one slow GPU holds up all. Beside the strategies: "shard_map", layers
with the same kernels and collectives written by hand; "torch_fsdp", transformers' Llama under PyTorch's FSDP, which
runs by itself before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.bench.block import batch_and_length, case_maker, flops
from xlafuse.bench.candidates import Chain, checked, compiled, measured, problem_of, timed, with_shares
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Measured, Problem, ShapeResult
from xlafuse.bench.settings import MeshSettings
from xlafuse.bench.timing import Candidate, timing_of
from xlafuse.models import block_function
from xlafuse.models.decoder import Decoder, DecoderConfig, get_decoder
from xlafuse.models.shardings import PARALLEL, Layout, layout_of, parse_mesh
from xlafuse.strategies import get_strategy

PHASES = ("gradient", "train")
PEERS = ("shard_map", "torch_fsdp")
_TOLERANCE = 0.1
"""Largest error, as a share of the norm, of what several layers in bfloat16 compute."""
_TORCH_SECONDS = 240.0


def bench_mesh(item: str, settings: MeshSettings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Times a phase under one kind of parallel at a shape, such as "gradient fsdp 4x4096"; yields a str if left out."""
    if time.time() > settings.until:
        yield f"{settings.model} {item}: not begun, the time was up"
        return
    phase, parallel, shape = item.split()
    devices = jax.devices()
    sizes = parse_mesh(settings.mesh) if settings.mesh else {PARALLEL[parallel]: len(devices)}
    layout = layout_of(sizes, parallel, devices)
    config = get_decoder(settings.model)
    config = replace(config, layers=settings.layers)
    result = ShapeResult(op=f"{settings.model}, {config.layers} layers, {layout}", phase=phase, spec=shape)
    peers: list[Measured] = []
    batch, length = batch_and_length(shape)
    tokens = batch * length / len(devices)
    if "torch_fsdp" in settings.peers and (phase, parallel) == ("train", "fsdp"):  # before the others, alone
        try:
            peers.append(_torch(config, shape, len(devices), settings, tokens))
        except Exception as error:  # the others are worth having
            result = replace(result, problems=(problem_of("torch_fsdp", error),))
    made = partial(_candidates, config, shape, phase, layout, settings)
    result = timed(result, made, settings, sampler, baseline=settings.strategies[0], by_gpu=False, tokens=tokens)
    result = replace(result, candidates=(*result.candidates, *peers))
    yield with_shares(result, _flops(config, (batch, length), phase) / len(devices))


def _candidates(
    config: DecoderConfig,
    shape: str,
    phase: str,
    layout: Layout,
    settings: MeshSettings,
    problems: list[Problem],
) -> list[Candidate]:
    """Returns what runs and agrees with the baseline; all compile at the same time."""
    names = [*settings.strategies]
    if "shard_map" in settings.peers and phase == "gradient":
        names.append("shard_map")
    start = {"gradient": _gradient, "train": _train}[phase](config, shape, layout, settings.seed)
    with ThreadPoolExecutor(len(names)) as pool:
        pending = {name: pool.submit(start, name) for name in names}

    def of(name: str) -> tuple[Candidate, Any]:
        call, costs = pending[name].result()
        kind = "peer" if name in PEERS else "strategy"
        return Candidate(name=name, kind=kind, call=call, inputs=[()], costs=costs), jax.tree.leaves(call())

    return checked({name: partial(of, name) for name in names}, problems, tolerance=_TOLERANCE)


Started = Callable[[str], tuple[Callable[[], Any], dict[str, Any]]]
"""Compiles a strategy's program: gives its call, which returns what is to be checked, and its compilation's costs."""


def _gradient(config: DecoderConfig, shape: str, layout: Layout, seed: int) -> Started:
    """The gradient of a stack of layers."""
    block, sizes = config.block, batch_and_length(shape)
    _, (params, x, *_) = block_function(block, sizes, layout=layout)
    placed = jax.tree.map(lambda each: each.sharding, (params, x))
    draw = case_maker(block, sizes, "grad", layout)
    first, *rest = jax.random.split(jax.random.key(seed), config.layers)
    weights, *others = draw(first)
    arguments = ((weights, *(draw(key)[0] for key in rest)), *others)

    def start(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        options: dict[str, Any] = {}
        if name == "shard_map":
            from xlafuse.bench.peers import shard_map

            stack = shard_map.stack(block, layout)
        else:
            strategy = get_strategy(name)
            function, _ = block_function(block, sizes, plan=strategy.plan, layout=layout)
            options = dict(strategy.compiler_options)

            def plain(layers: Any, x: jax.Array, *positions: jax.Array) -> jax.Array:
                for weights in layers:
                    x = function(weights, x, *positions)
                return x

            stack = strategy.rewritten(plain)

        def gradient(layers: Any, x: jax.Array, *rest: jax.Array) -> Any:
            *positions, (cotangent,) = rest
            y, pullback = jax.vjp(lambda layers, x: stack(layers, x, *positions), layers, x)
            return y, pullback(cotangent)

        out = (placed[1], ((placed[0],) * config.layers, placed[1]))
        step = jax.jit(gradient, out_shardings=out, compiler_options=options)
        program, costs = compiled(name, step, arguments)
        return partial(program, *arguments), costs

    return start


def _train(config: DecoderConfig, shape: str, layout: Layout, seed: int) -> Started:
    """A training step; the programs continue with the same weights, as several sets do not fit."""
    import optax  # only a training step needs it

    config = replace(config, block=replace(config.block, param_dtype="float32"))
    optimizer = optax.adamw(1e-5)
    batch, length = batch_and_length(shape)
    decoder = Decoder(config, layout=layout)
    params = jax.eval_shape(decoder.params, jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)
    of_params = layout.of_weights(params)
    of_state = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, of_params, transform_non_params=lambda _: layout.whole
    )
    begin = jax.jit(optimizer.init, out_shardings=of_state)
    tokens = jax.random.randint(jax.random.key(seed + 1), (batch, length + 1), 0, config.vocabulary, jnp.int32)
    tokens = jax.device_put(tokens, layout.tokens)

    def first() -> tuple[Any, ...]:
        weights = decoder.params(jax.random.key(seed))
        return weights, begin(weights), tokens

    chain = Chain(first, lambda arguments, result: (*result[:2], arguments[2]))

    def start(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        strategy = get_strategy(name)
        model = Decoder(config, strategy.plan, layout)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            # Before the weights are gathered, so that half the bytes are.
            small = jax.tree.map(lambda each: each.astype(config.block.dtype), params)
            return model.loss(small, tokens, remat=False)

        step = jax.jit(
            partial(model.train_step, optimizer, loss=strategy.rewritten(loss)),
            donate_argnums=(0, 1),
            out_shardings=(of_params, of_state, layout.whole),
            compiler_options=dict(strategy.compiler_options),
        )
        types = jax.tree.map(
            lambda each, at: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=at),
            (params, state),
            (of_params, of_state),
        )
        program, costs = compiled(name, step, (*types, tokens))
        return lambda: chain.call(program)[2], costs

    return start


def _torch(config: DecoderConfig, shape: str, devices: int, settings: MeshSettings, tokens_a_gpu: float) -> Measured:
    block, (batch, tokens) = config.block, batch_and_length(shape)
    model = {
        "hidden_size": block.hidden_size,
        "intermediate_size": block.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "vocab_size": config.vocabulary,
        "rope_theta": block.rope_theta,
        "rms_norm_eps": block.epsilon,
        "max_position_embeddings": tokens,
    }
    request = {"model": model, "batch": batch, "tokens": tokens, "rounds": settings.rounds, "calls": settings.calls}
    script = Path(__file__).with_name("peers") / "torch_fsdp.py"
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "request.json"), Path(name, "result.json")
        files[0].write_text(json.dumps(request))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        done = subprocess.run(
            [*launch, str(script), *map(str, files)],
            env={**os.environ, "USE_TORCH": "1"},
            timeout=_TORCH_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError("PyTorch's processes failed; they say why above")
        found = json.loads(files[1].read_text())
    costs = {"compile_seconds": found["seconds"], "peak_bytes": found["peak_bytes"]}
    candidate = Candidate(name="torch_fsdp", kind="peer", call=lambda: None, inputs=(), costs=costs)
    return measured(candidate, timing_of(found["microseconds"]), tokens_a_gpu)


def _flops(config: DecoderConfig, shape: tuple[int, int], phase: str) -> int:
    """Counts the FLOPs of matrix products, forward and backward."""
    layers = config.layers * flops(config.block, shape, "grad")
    head = 6 * shape[0] * shape[1] * config.block.hidden_size * config.vocabulary
    return layers + head * (phase == "train")
