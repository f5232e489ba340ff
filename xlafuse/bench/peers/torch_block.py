"""The transformer block in PyTorch, as users write it: products by `linear`, attention by PyTorch's kernels.

The weights are those of the JAX block, with matrices transposed to PyTorch's layout. Cosines and sines of the rotary
embedding are inputs, since PyTorch models compute them once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch  # pyright: ignore[reportMissingImports]
import torch._dynamo  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from xlafuse.bench.peers.tensors import candidate_of, to_jax, to_torch
from xlafuse.bench.peers.torch_functions import angles, rotated
from xlafuse.bench.timing import Candidate
from xlafuse.models import BlockConfig

Attend = Callable[[Any, Any, Any], Any]
"""Maps query, key and value, each (batch, heads, length, head_dim), to the output of attention."""


def block(
    config: BlockConfig,
    weights: Mapping[str, Mapping[str, Any]],
    x,
    cosine=None,
    sine=None,
    attend: Attend | None = None,
):
    """Runs the block; see `xlafuse.models.TransformerBlock`.

    x: (batch, length, hidden).
    cosine, sine: (length, 1, half).

    attend: attention with a cache; None lets the tokens of x attend to each other.
    """

    def linear(name, x):
        return F.linear(x, weights[name]["kernel"], weights[name].get("bias"))

    def norm(name, x):
        scale, shape = weights[name]["scale"], (config.hidden_size,)
        if config.norm == "layer_norm":
            return F.layer_norm(x, shape, scale, weights[name]["bias"], config.epsilon)
        return F.rms_norm(x, shape, scale, config.epsilon)

    def heads(name, x, count):
        return linear(name, x).unflatten(-1, (count, config.head_dim))

    if config.num_experts:
        raise NotImplementedError(f"{config.name} has experts, which the block in PyTorch has not")
    normed = norm("attention_norm", x)
    query = heads("query", normed, config.num_heads)
    key, value = (heads(name, normed, config.num_kv_heads) for name in ("key", "value"))
    if cosine is not None:
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
    attend = own_attention(config) if attend is None else attend
    mixed = attend(*(each.transpose(1, 2) for each in (query, key, value)))
    x = x + linear("output", mixed.transpose(1, 2).flatten(2))
    normed = norm("mlp_norm", x)
    if config.mlp == "swiglu":
        hidden = F.silu(linear("gate", normed)) * linear("up", normed)
    else:
        hidden = F.gelu(linear("up", normed), approximate="tanh")
    return x + linear("down", hidden)


def own_attention(config: BlockConfig) -> Attend:
    """Returns attention of the tokens to each other."""

    def attend(query, key, value):
        is_grouped = config.num_heads != config.num_kv_heads
        return F.scaled_dot_product_attention(query, key, value, is_causal=config.is_causal, enable_gqa=is_grouped)

    return attend


def tables_of(config: BlockConfig, length: int, device: Any) -> tuple[Any, ...]:
    """Returns cosine and sine at positions from 0, (length, 1, half), float32; nothing for a block without RoPE."""
    if config.rope_theta is None:
        return ()
    return angles(torch.arange(length, device=device), config.head_dim, config.rope_theta)


def candidate(
    name: str, config: BlockConfig, mode: str, cases: Sequence[tuple[Any, ...]]
) -> tuple[Candidate, list[jax.Array]]:
    """Returns the candidate and its first results as JAX arrays, in the order of `xlafuse.bench.block.program`.

    mode: "forward" runs without gradients, "grad" runs both passes.
    cases: see `xlafuse.bench.block.Case`.
    """

    def function(weights, x, *rotation):
        return block(config, weights, x, *rotation)

    if name == "torch_compile":
        torch._dynamo.reset()  # shapes are compile-time constants, as in XLA
        function = torch.compile(function, dynamic=False, fullgraph=True)

    def forward(weights, x, rotation):
        with torch.no_grad():
            return (function(weights, x, *rotation),)

    def step(weights, x, rotation, leaves, cotangent):
        y = function(weights, x, *rotation)
        return (y, *torch.autograd.grad((y,), leaves, (cotangent,)))

    torch.cuda.empty_cache()  # frees the last case's memory, which JAX shares
    inputs = []
    for params, tokens, *rest in cases:
        flat, structure = jax.tree.flatten(params)
        leaves = [transposed(to_torch(leaf)) for leaf in flat]
        x = to_torch(tokens)
        call: tuple[Any, ...] = (jax.tree.unflatten(structure, leaves), x, tables_of(config, x.shape[1], x.device))
        if mode == "grad":
            leaves = [leaf.requires_grad_() for leaf in (*leaves, x)]
            call += (leaves, to_torch(rest[-1][0]))
        inputs.append(call)
    made, (y, *gradients) = candidate_of(name, step if mode == "grad" else forward, inputs)
    return made, [to_jax(y), *(to_jax(transposed(each)) for each in gradients)]


def transposed(tensor: Any) -> Any:
    """Returns a transposed copy of a matrix, or anything else as it is."""
    return tensor.transpose(0, 1).contiguous() if len(tensor.shape) == 2 else tensor
