"""Public models that are no transformers, or not of text."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlafuse.bench.public import configs
from xlafuse.bench.public.programs import KEY, Program, importing, linen_program, molecules, normal, tokens_of
from xlafuse.bench.public.sizes import WORDS, Graphs, Levels, Stack


def haiku_rnn(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Haiku's example of two LSTMs, in float32."""
    import haiku as hk
    from absl import flags

    names = ("tensorflow", "tensorflow.compat", "tensorflow.compat.v2", "tensorflow_datasets")
    with importing(Path(str(hk.__file__)).parents[2], *names):
        train = importlib.import_module("examples.rnn.train")
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.hidden_size = sizes.width
    tokens = tokens_of(sizes.length, sizes.batch, sizes.vocabulary)
    loss = hk.without_apply_rng(hk.transform(train.sequence_loss))

    def unrolled(batch: Any) -> Any:
        core = train.make_network()
        return hk.dynamic_unroll(core, batch["input"], core.initial_state(batch["input"].shape[1]))[0]

    forward = hk.without_apply_rng(hk.transform(unrolled))

    def given(tokens: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        return {"input": tokens, "target": targets}

    return Program(
        size=f"{sizes.length} steps x {sizes.batch}, width {sizes.width}, 2 LSTMs",
        init=lambda key: loss.init(key, given(tokens, tokens)),
        batch=(tokens, jnp.roll(tokens, -1, 0)),
        forward=lambda params, *batch: forward.apply(params, given(*batch)),
        loss=lambda params, *batch: loss.apply(params, given(*batch)),
    )


def graph_net(folder: Path, dtype: Any, sizes: Graphs) -> Program:
    """Makes Flax's example of a GraphNetwork for molecules, in float32."""
    import jraph

    names = ("clu", "ml_collections", "tensorflow", "sklearn", "sklearn.metrics", "input_pipeline")
    with importing(folder / "flax/examples/ogbg_molpcba", *names):
        models, train = importlib.import_module("models"), importlib.import_module("train")
    senders, receivers, atoms, bonds = molecules(sizes)
    graph = jraph.GraphsTuple(
        nodes=normal(sizes.nodes, 9),
        edges=normal(sizes.edges, 3),
        senders=senders,
        receivers=receivers,
        globals=normal(sizes.graphs, 4),
        n_node=atoms,
        n_edge=bonds,
    )
    module = models.GraphNet(
        latent_size=sizes.width,
        num_mlp_layers=2,
        message_passing_steps=sizes.steps,
        output_globals_size=128,
        dropout_rate=0.1,
        deterministic=not sizes.dropout,
    )
    labels = (normal(sizes.graphs, 128) > 0).astype(jnp.float32)

    def loss(out: Any, _: Any, labels: jax.Array) -> jax.Array:
        mask = jnp.ones_like(labels, bool)
        return train.binary_cross_entropy_with_mask(logits=out.globals, labels=labels, mask=mask).mean()

    steps = "1 step" if sizes.steps == 1 else f"{sizes.steps} steps"
    size = f"{sizes.nodes} nodes, {sizes.edges} edges, width {sizes.width}, {steps}"
    return linen_program(module, (graph,), {}, loss, size=size, batch=(graph, labels, KEY))


def unet(folder: Path, dtype: Any, sizes: Levels) -> Program:
    """Makes the U-Net of Stable Diffusion."""
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel

    batch, side = sizes.batch, sizes.side
    module = FlaxUNet2DConditionModel(dtype=dtype, **configs.unet(sizes))
    noisy, noise = (normal(batch, 4, side, side, dtype=dtype) for _ in range(2))
    words = normal(batch, WORDS, sizes.context, dtype=dtype)
    times = jnp.arange(batch, dtype=jnp.int32)

    def loss(out: Any, noisy: Any, times: Any, words: Any, noise: jax.Array) -> jax.Array:
        return jnp.square(noise - out.sample).mean()

    size = f"{batch} x {side} x {side}, widths {', '.join(map(str, sizes.widths))}"
    return linen_program(module, (noisy, times, words), {}, loss, size=size, batch=(noisy, times, words, noise, KEY))


def equinox_gru(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes a GRU that classifies sequences, of Equinox' cell, in float32."""
    import equinox as eqx

    width, length, batch = sizes.width, sizes.length, sizes.batch

    def model(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return eqx.nn.GRUCell(width, width, key=first), eqx.nn.Linear(width, 1, key=second)

    abstract = eqx.filter_eval_shape(model, jax.random.key(0))
    static = eqx.partition(abstract, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def forward(params: Any, sequences: jax.Array, _: jax.Array) -> jax.Array:
        cell, head = eqx.combine(params, static)

        def one(sequence: jax.Array) -> jax.Array:
            last, _ = jax.lax.scan(lambda state, x: (cell(x, state), None), jnp.zeros(width), sequence)
            return head(last)[0]

        return jax.vmap(one)(sequences)

    def loss(params: Any, sequences: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(forward(params, sequences, labels), labels).mean()

    labels = (normal(batch) > 0).astype(jnp.float32)
    return Program(
        size=f"{batch} x {length} steps, width {width}",
        init=lambda key: eqx.filter(model(key), eqx.is_array),
        batch=(normal(batch, length, width), labels),
        forward=forward,
        loss=loss,
    )
