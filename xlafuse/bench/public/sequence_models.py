"""Public models of sequences beside plain transformers: recurrences (S5, Griffin) and experts (Gemma 4)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.bench.public.programs import KEY, Program, importing, linen_program, normal, statistics_of, tokens_of
from xlafuse.bench.public.sizes import Stack


def s5(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes S5 that classifies images as sequences of pixels, in float32, made as in its `train.py`."""
    with importing(folder / "S5"), mock.patch.object(jnp, "DeviceArray", jax.Array, create=True):  # in annotations
        ssm, hippo = (importlib.import_module(f"s5.{name}") for name in ("ssm", "ssm_init"))
        models = importlib.import_module("s5.seq_model")
    blocks, half = sizes.heads, sizes.hidden // sizes.heads // 2
    values, _, _, vectors, _ = hippo.make_DPLR_HiPPO(2 * half)
    values = jnp.tile(values[:half], blocks)
    vectors = vectors[:, :half]
    recurrence = ssm.init_S5SSM(
        H=sizes.width,
        P=blocks * half,
        Lambda_re_init=values.real,
        Lambda_im_init=values.imag,
        V=jax.scipy.linalg.block_diag(*[vectors] * blocks),
        Vinv=jax.scipy.linalg.block_diag(*[vectors.conj().T] * blocks),
        C_init="lecun_normal",
        discretization="zoh",
        dt_min=0.001,
        dt_max=0.1,
        conj_sym=True,
        clip_eigs=True,
        bidirectional=True,
    )
    module = models.BatchClassificationModel(
        ssm=recurrence,
        d_output=sizes.vocabulary,
        d_model=sizes.width,
        n_layers=sizes.layers,
        padded=False,
        activation="half_glu1",
        dropout=0.1,
        training=True,
        mode="pool",
        prenorm=True,
        batchnorm=True,
        bn_momentum=0.95,
    )
    pixels, steps = normal(sizes.batch, sizes.length, 3), jnp.ones((sizes.batch, sizes.length))
    labels = tokens_of(sizes.batch, 1, sizes.vocabulary)[:, 0]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    statistics = statistics_of(jax.eval_shape(module.init, keys, pixels, steps)["batch_stats"])

    def forward(params: Any, pixels: jax.Array, steps: jax.Array, _: Any, statistics: Any, key: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        rngs = {"dropout": jax.random.wrap_key_data(key)}
        return module.apply(variables, pixels, steps, rngs=rngs, mutable=["batch_stats"])

    def loss(params: Any, *batch: Any) -> jax.Array:
        logits, _ = forward(params, *batch)
        return -jnp.sum(jax.nn.one_hot(batch[2], sizes.vocabulary) * logits, axis=-1).mean()

    return Program(
        size=str(sizes),
        init=lambda key: module.init({"params": key, "dropout": key}, pixels, steps)["params"],
        batch=(pixels, steps, labels, statistics, KEY),
        forward=forward,
        loss=loss,
    )


def griffin(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes RecurrentGemma: two recurrent layers, then one of local attention."""
    with importing(Path(__file__).parent, "sentencepiece"):  # for its sampler
        library = importlib.import_module("recurrentgemma.jax")
        common = importlib.import_module("recurrentgemma.common")
    kinds = common.TemporalBlockType
    pattern = itertools.cycle((kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION))
    config = common.GriffinConfig(
        vocab_size=sizes.vocabulary,
        width=sizes.width,
        mlp_expanded_width=sizes.hidden,
        num_heads=sizes.heads,
        lru_width=sizes.width,
        block_types=tuple(itertools.islice(pattern, sizes.layers)),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=sizes.window,
        logits_soft_cap=30.0,
    )
    module = library.Griffin(config, dtype=dtype, param_dtype=jnp.float32)
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    positions = jnp.asarray(np.broadcast_to(np.arange(sizes.length), tokens.shape))

    def loss(out: Any, tokens: jax.Array, _: Any) -> jax.Array:
        logits = jax.nn.log_softmax(out[0][:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    given = {"return_cache": False}
    return linen_program(module, (tokens, positions), given, loss, size=str(sizes), batch=(tokens, positions, KEY))


def gemma4_experts(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes the experts of Gemma 4's blocks, each after its norm and added to the rest, all in one dtype."""
    import flax.linen as nn

    with importing(folder / "gemma"):
        experts, layers = (importlib.import_module(f"gemma.gm.nn.gemma4.{name}") for name in ("_moe", "_layers"))

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(sizes.layers):
                layer = experts.MoERagged(
                    features=sizes.width,
                    hidden_dim=sizes.hidden,
                    num_experts=sizes.experts,
                    num_experts_per_datapoint=sizes.chosen,
                )
                x += layers.RMSNorm()(layer(layers.RMSNorm()(x), unnormalized_x=x))
            return x

    module = Blocks()
    x, expected = (normal(sizes.batch, sizes.length, sizes.width, dtype=dtype) for _ in range(2))

    def forward(params: Any, x: jax.Array, _: Any) -> Any:
        return module.apply({"params": jax.tree.map(lambda leaf: leaf.astype(dtype), params)}, x)

    def loss(params: Any, x: jax.Array, expected: jax.Array) -> jax.Array:
        return jnp.square((forward(params, x, expected) - expected).astype(jnp.float32)).mean()

    return Program(
        size=f"{sizes}, {sizes.chosen} of {sizes.experts} experts",
        init=lambda key: module.init(key, x)["params"],
        batch=(x, jnp.flip(expected, 1)),
        forward=forward,
        loss=loss,
    )
