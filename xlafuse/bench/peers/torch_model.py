"""The decoder model in PyTorch, as users write it: `torch_block`'s layers, a static cache and fused AdamW.

The peers of a phase share one set of tensors and update it in place: token, position and cache for decoding, the
weights for training. All addresses are marked as static, like those of a module's parameters; otherwise CUDA graphs
would first copy the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]
import torch._dynamo  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportMissingImports]

from xlafuse.bench.peers.tensors import candidate_of, to_jax, to_torch
from xlafuse.bench.peers.torch_block import Attend, block, tables_of, transposed
from xlafuse.bench.settings import TORCH_MODES
from xlafuse.bench.timing import Candidate
from xlafuse.models.decoder import DecoderConfig


@dataclass(kw_only=True)
class State:
    """Tensors that all peers of a phase share.

    tokens: (batch, length), with one token more for a training step and a single one for decoding.
    positions: positions of the tokens, (length,).
    caches: key and value of each layer, (batch, kv heads, length, head_dim).
    tables: cosine and sine of all positions.
    room: number of tokens that fit after the prompt.
    calls: number of tokens appended after the prompt.
    """

    weights: Mapping[str, Any]
    tokens: Any
    positions: Any
    caches: list[tuple[Any, Any]]
    tables: tuple[Any, ...]
    first: Any
    room: int
    calls: int = 0


def shared_state(config: DecoderConfig, phase: str, arguments: tuple[Any, ...], room: int) -> State:
    """Copies a phase's arguments into tensors; see `xlafuse.bench.model`."""
    if phase == "prefill":
        raise NotImplementedError("the prefill of a cache is not written in PyTorch here")
    params, *rest = arguments
    torch._dynamo.reset()  # once for all peers of a phase: forgets what was compiled before
    torch.cuda.empty_cache()
    tokens = to_torch(rest[-1] if phase == "train" else rest[0]).long()
    caches, start, most = [], 0, tokens.shape[1]
    if phase == "decode":
        caches = [tuple(_heads_first(each) for each in layer) for layer in _layers(config, rest[1])]
        start, most = int(rest[2]), caches[0][0].shape[2]
    weights: dict[str, Any] = {name: to_torch(leaf) for name, leaf in params.items() if name not in ("layers", "head")}
    weights["head"] = transposed(to_torch(params["head"]))
    layers = _layers(config, params["layers"])
    weights["layers"] = [jax.tree.map(lambda leaf: transposed(to_torch(leaf)), layer) for layer in layers]
    count = tokens.shape[1] - (phase == "train")
    positions = torch.arange(count, device=tokens.device, dtype=torch.int64) + start
    tables = tables_of(config.block, most, tokens.device)
    for tensor in _tensors((weights, caches, tables, tokens, positions)):
        torch._dynamo.mark_static_address(tensor)
    return State(
        weights=weights,
        tokens=tokens,
        positions=positions,
        caches=caches,
        tables=tables,
        first=positions.clone(),
        room=room,
    )


def candidate(
    name: str, config: DecoderConfig, phase: str, arguments: tuple[Any, ...], state: State
) -> tuple[Candidate, list[jax.Array]]:
    """Returns the candidate, and its first results for `xlafuse.bench.model` to compare."""
    if phase == "decode":  # another peer may have moved the position
        state.tokens.copy_(to_torch(arguments[1]).long())
        for mine, given in zip(_tensors(state.caches), jax.tree.leaves(_layers(config, arguments[2])), strict=True):
            mine.copy_(_heads_first(given))
        _begin_again(state)
    compile_mode = TORCH_MODES[name]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=compile_mode, dynamic=False, fullgraph=True) if compile_mode else function

    call = {"forward": _forward, "train": _train, "decode": _decode}[phase](config, state, compiled)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    made, results = candidate_of(name, call, [()])
    seconds = time.perf_counter() - start
    if state.caches:
        found = [to_jax(each.transpose(1, 2).clone()) for each in _tensors(state.caches)]
        if config.is_scanned:
            found = [jnp.stack(found[i::2]) for i in range(2)]
    else:
        found = [to_jax(each) for each in results]
    costs = {"compile_seconds": seconds if compile_mode else 0.0, "peak_bytes": torch.cuda.max_memory_allocated()}
    return replace(made, costs=costs), found


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def _forward(config: DecoderConfig, state: State, compiled: Compile) -> Callable[[], tuple[Any, ...]]:
    def logits(weights, tokens, positions):
        return F.linear(_hidden(config, weights, tokens, positions, state.tables), weights["head"])

    run = compiled(logits)

    def call():
        with torch.no_grad():
            return (run(state.weights, state.tokens, state.positions),)

    return call


def _decode(config: DecoderConfig, state: State, compiled: Compile) -> Callable[[], tuple[Any, ...]]:
    def step(weights, tokens, positions, caches):
        seen = torch.arange(caches[0][0].shape[2], device=tokens.device)[None] <= positions
        attends = [_attend_cached(config, cache, positions, seen) for cache in caches]
        tokens.copy_(_next(weights, _hidden(config, weights, tokens, positions, state.tables, attends=attends)))
        positions.add_(1)

    run = compiled(step)

    def call():
        with torch.no_grad():
            run(state.weights, state.tokens, state.positions, state.caches)
            state.calls += 1
            if state.calls == state.room:
                _begin_again(state)
        return ()

    return call


def _begin_again(state: State) -> None:
    state.positions.copy_(state.first)
    state.calls = 0


def _train(config: DecoderConfig, state: State, compiled: Compile) -> Callable[[], tuple[Any, ...]]:
    leaves = [leaf.requires_grad_() for leaf in _tensors(state.weights)]
    optimizer = torch.optim.AdamW(leaves, lr=1e-5, weight_decay=1e-4, fused=True)

    def loss(weights, tokens, positions):
        x = _hidden(config, weights, tokens[:, :-1], positions, state.tables, remat=True)
        logits = F.linear(x, weights["head"]).float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))

    run = compiled(loss)

    def call():
        value = run(state.weights, state.tokens, state.positions)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (value.detach(),)

    return call


def _hidden(
    config: DecoderConfig,
    weights: Mapping[str, Any],
    tokens: Any,
    positions: Any,
    tables: tuple[Any, ...],
    *,
    attends: Sequence[Attend | None] = (),
    remat: bool = False,
):
    """Returns the result of the last norm, (batch, length, hidden)."""
    x = F.embedding(tokens, weights["embedding"])
    if config.learned_positions is not None:
        x = x + weights["positions"][positions]
    rotation = [table[positions] for table in tables] or [None, None]
    for layer, attend in zip(weights["layers"], attends or [None] * config.layers, strict=True):
        if remat:
            x = checkpoint(block, config.block, layer, x, *rotation, use_reentrant=False)
        else:
            x = block(config.block, layer, x, *rotation, attend=attend)
    shape = (config.block.hidden_size,)
    if "bias" in weights:
        return F.layer_norm(x, shape, weights["scale"], weights["bias"], config.block.epsilon)
    return F.rms_norm(x, shape, weights["scale"], config.block.epsilon)


def _next(weights: Mapping[str, Any], x: Any) -> Any:
    """Returns the likeliest token after the last one, (batch, 1)."""
    return torch.argmax(F.linear(x[:, -1:], weights["head"]), -1)


def _attend_cached(config: DecoderConfig, cache: tuple[Any, Any], positions: Any, seen: Any) -> Attend:
    """Attends one token to the cache; the query heads of a group act as several queries of one head."""
    key_cache, value_cache = cache

    def attend(query, key, value):
        key_cache.index_copy_(2, positions, key)
        value_cache.index_copy_(2, positions, value)
        grouped = query.reshape(query.shape[0], config.block.num_kv_heads, -1, config.block.head_dim)
        return F.scaled_dot_product_attention(grouped, key_cache, value_cache, attn_mask=seen).reshape(query.shape)

    return attend


def _heads_first(cache: jax.Array) -> Any:
    return to_torch(cache).transpose(1, 2).contiguous()


def _layers(config: DecoderConfig, tree: Any) -> list[Any]:
    """Returns the tree of each layer, from a tree stacked over layers or a tuple with one tree a layer."""
    if not config.is_scanned:
        return list(tree)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(config.layers)]


def _tensors(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)
