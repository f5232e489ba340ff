"""Public models of proteins and molecules: AlphaFold's Evoformer and a network of e3nn."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlafuse.bench.public.programs import KEY, Program, importing, linen_program, molecules, normal, tokens_of
from xlafuse.bench.public.sizes import Graphs, Stack


def evoformer(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes AlphaFold's Evoformer and its head that fills in masked residues; sizes.batch is that of the alignment."""
    import haiku as hk

    with importing(folder / "alphafold"):
        modules, stack, utils, prng, configs = (
            importlib.import_module(f"alphafold.model.{name}")
            for name in ("modules", "layer_stack", "utils", "prng", "config")
        )
    config = configs.model_config("model_1").model
    blocks, heads = config.embeddings_and_evoformer.evoformer, config.heads
    narrow = utils.bfloat16_context if dtype == jnp.bfloat16 else contextlib.nullcontext
    rows, length, width = sizes.batch, sizes.length, sizes.width
    alignment, pairs = normal(rows, length, width), normal(length, length, width // 2)

    def predict(alignment: jax.Array, pairs: jax.Array) -> jax.Array:
        masks = {"msa": jnp.ones((rows, length), dtype), "pair": jnp.ones((length, length), dtype)}

        def block(carried: Any) -> Any:
            activations, key = carried
            key, own = key.split()
            layer = modules.EvoformerIteration(blocks, config.global_config, is_extra_msa=False)
            return layer(activations, masks, is_training=True, safe_key=own), key

        with narrow():
            activations = {"msa": alignment.astype(dtype), "pair": pairs.astype(dtype)}
            key = prng.SafeKey(hk.next_rng_key())
            activations, _ = stack.layer_stack(sizes.layers)(block)((activations, key))
            head = modules.MaskedMsaHead(heads.masked_msa, config.global_config)
            return head(activations, None, is_training=True)["logits"]

    network = hk.transform(predict)
    masked = (tokens_of(rows, length, 7, seed=2) == 1).astype(jnp.float32)
    residues = tokens_of(rows, length, heads.masked_msa.num_output)

    def forward(params: Any, alignment: jax.Array, pairs: jax.Array, *batch: Any) -> jax.Array:
        return network.apply(params, jax.random.wrap_key_data(batch[-1]), alignment, pairs)

    def loss(params: Any, *batch: Any) -> jax.Array:
        residues, masked = batch[2:4]
        logits = forward(params, *batch)
        errors = modules.softmax_cross_entropy(labels=jax.nn.one_hot(residues, logits.shape[-1]), logits=logits)
        return jnp.sum(errors * masked) / (1e-8 + jnp.sum(masked))

    return Program(
        size=f"{rows} sequences x {length}, width {width}, {sizes.layers} blocks",
        init=lambda key: network.init(key, alignment, pairs),
        batch=(alignment, pairs, residues, masked, KEY),
        forward=forward,
        loss=loss,
    )


def e3nn(folder: Path, dtype: Any, sizes: Graphs) -> Program:
    """Makes e3nn's example of an equivariant network, on molecules, in float32."""
    import jraph

    with importing(folder / "e3nn-jax/examples"):
        example = importlib.import_module("tetris_point")
    senders, receivers, count, edges = molecules(sizes)
    graph = jraph.GraphsTuple(
        nodes=normal(sizes.nodes, 3),
        edges=None,
        senders=senders,
        receivers=receivers,
        globals=tokens_of(sizes.graphs, 1, 8)[:, 0],
        n_node=count,
        n_edge=edges,
    )
    module = example.Model()

    def loss(logits: jax.Array, graph: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, graph.globals).mean()

    size = f"{sizes.nodes} atoms, {sizes.edges} edges, 2 layers of 32 + 8 x 3 + 8 x 5 irreps"
    return linen_program(module, (graph,), {}, loss, size=size, batch=(graph, KEY))
