"""Public language models of repositories."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlafuse.bench.public import configs
from xlafuse.bench.public.programs import KEY, Program, importing, linen_program, nnx_program, tokens_of
from xlafuse.bench.public.sizes import Stack


def lm1b(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Flax's Linen language model, with the loss of its `train.py`."""
    with importing(folder / "flax/examples/lm1b", "clu", "ml_collections", "tensorflow", "input_pipeline", "utils"):
        models, train = importlib.import_module("models"), importlib.import_module("train")
    config = models.TransformerConfig(
        vocab_size=sizes.vocabulary,
        output_vocab_size=sizes.vocabulary,
        dtype=dtype,
        emb_dim=sizes.width,
        num_heads=sizes.heads,
        qkv_dim=sizes.width,
        mlp_dim=sizes.hidden,
        num_layers=sizes.layers,
        max_len=sizes.length,
    )
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)

    def loss(logits: Any, tokens: jax.Array) -> jax.Array:
        weights = jnp.where(tokens > 0, 1, 0).astype(jnp.float32)
        total, count = train.compute_weighted_cross_entropy(logits, tokens, weights)
        return total / count

    return linen_program(models.TransformerLM(config), (tokens,), {}, loss, size=str(sizes), batch=(tokens, KEY))


def gemma_library(folder: Path, dtype: Any, sizes: Stack) -> tuple[Any, Any, Any]:
    """Imports Flax's NNX Gemma 3; returns its modules `transformer` and `train`, and the configuration."""
    stand_ins = ("clu", "grain", "input_pipeline", "tokenizer", "train_cfg", "sampler")
    with importing(folder / "flax/examples/gemma", *stand_ins):
        transformer, train = importlib.import_module("transformer"), importlib.import_module("train")
        configs = importlib.import_module("transformer_cfg")

    config = configs.TransformerConfig.gemma3_1b(
        num_layers=sizes.layers,
        num_embed=sizes.vocabulary,
        embed_dim=sizes.width,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.key_heads,
        head_dim=sizes.head_width,
        attention_types=configs.make_attention_layers_types(configs.GEMMA3_ATTENTION_PATTERN, sizes.layers),
        sliding_window_size=sizes.window,
        dtype=dtype,
        weight_dtype=jnp.float32,
    )
    return transformer, train, config


def flax_gemma(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Flax's NNX Gemma 3 with the loss of its `train.py`."""
    transformer, train, config = gemma_library(folder, dtype, sizes)

    def forward(module: Any, tokens: jax.Array, _: jax.Array) -> jax.Array:
        mask = transformer.make_causal_attn_mask(tokens > 0)
        return module(tokens, transformer.build_positions_from_mask(tokens > 0), None, mask)[0]

    def loss(logits: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        weights = (tokens > 0).astype(jnp.float32)
        return train.compute_weighted_cross_entropy(logits, targets, weights).mean()

    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    return nnx_program(
        lambda rngs: transformer.Transformer(config, rngs=rngs),
        forward,
        loss,
        size=str(sizes),
        batch=(tokens, jnp.roll(tokens, -1, 1)),
    )


def qwen3_library(folder: Path, sizes: Stack) -> tuple[Any, Any]:
    """Imports Bonsai's Qwen 3; returns its module and the configuration."""
    with importing(folder / "bonsai"):
        library = importlib.import_module("bonsai.models.qwen3.modeling")

    config = library.ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        emb_dim=sizes.width,
        mlp_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head_width,
        num_kv_heads=sizes.key_heads,
        rope_theta=1_000_000,
        rope_scaling_factor=8,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    return library, config


def qwen3(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Bonsai's Qwen 3, which runs on a new cache, all in one dtype."""
    library, config = qwen3_library(folder, sizes)

    def forward(module: Any, tokens: jax.Array) -> jax.Array:
        cache = library.init_cache(config, sizes.batch, sizes.length, 0, dtype)
        return module(tokens, cache=cache, segment_ids=1 * (tokens != 0))

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        given = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(given, tokens[:, 1:]).mean()

    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    return nnx_program(
        lambda rngs: library.Qwen3(config, rngs=rngs), forward, loss, dtype=dtype, size=str(sizes), batch=(tokens,)
    )


def mamba2(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Bonsai's Mamba 2, all in one dtype."""
    with importing(folder / "bonsai"):
        library = importlib.import_module("bonsai.models.mamba2.modeling")

    config = library.ModelConfig(**configs.mamba2(sizes))
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    return nnx_program(
        lambda rngs: library.Mamba2ForCausalLM(config, rngs=rngs),
        lambda module, tokens: module(tokens, tokens)["logits"],
        lambda logits, tokens: optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].reshape(-1, sizes.vocabulary), tokens[:, 1:].reshape(-1)
        ).mean(),
        dtype=dtype,
        size=str(sizes),
        batch=(tokens,),
    )


def umt5(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Bonsai's umT5, which fills in spans, without dropout and all in one dtype."""
    with importing(folder / "bonsai"):
        library = importlib.import_module("bonsai.models.umt5.modeling")

    config = library.ModelConfig(
        vocab_size=sizes.vocabulary,
        d_model=sizes.width,
        d_kv=sizes.head_width,
        d_ff=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        dropout_rate=0.0,
    )

    def make(rngs: Any) -> Any:
        module = library.UMT5Model(config, param_dtype=dtype, rngs=rngs)
        for _, each in module.iter_modules():
            if isinstance(each, library.UMT5Attention):  # T5's scale: scores have none of their own
                each.q.kernel.value *= sizes.head_width**-0.5
        return module

    def forward(module: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        mask = jnp.ones_like(tokens)
        return module.lm_head(module(tokens, mask, jnp.pad(targets[:, :-1], ((0, 0), (1, 0))), jnp.ones_like(targets)))

    def loss(logits: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    targets = tokens_of(sizes.batch, sizes.targets, sizes.vocabulary, seed=1)
    return nnx_program(
        make, forward, loss, dtype=dtype, size=f"{sizes}, {sizes.targets} targets", batch=(tokens, targets)
    )


@contextlib.contextmanager
def _policies(policies: dict[type, Any]) -> Iterator[None]:
    """Sets Haiku's mixed precision policies of classes."""
    import haiku as hk

    for each, policy in policies.items():
        hk.mixed_precision.set_policy(each, policy)
    try:
        yield
    finally:
        for each in policies:
            hk.mixed_precision.clear_policy(each)


def haiku_transformer(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Haiku's example of a transformer, norms in float32 and the rest in `dtype`."""
    import haiku as hk
    import jmp
    from absl import flags

    train = importlib.import_module("examples.transformer.train")
    flags.FLAGS.mark_as_parsed()
    given = {"MODEL_SIZE": sizes.width, "KEY_SIZE": sizes.width // sizes.heads, "NUM_LAYERS": sizes.layers}
    for name, size in given.items():
        setattr(train, name, size)
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    forward, loss = hk.transform(train.forward_pass), train.loss_fn
    narrow = jmp.Policy(jnp.float32, dtype, dtype)
    policies = {hk.Linear: narrow, hk.Embed: narrow, hk.LayerNorm: jmp.Policy(jnp.float32, jnp.float32, dtype)}

    def run(params: Any, tokens: jax.Array, targets: jax.Array, key: jax.Array) -> Any:
        with _policies(policies):
            return forward.apply(params, key, tokens)

    def whole(params: Any, tokens: jax.Array, targets: jax.Array, key: jax.Array) -> Any:
        with _policies(policies):
            return loss.apply(params, key, train.dataset.Batch(inputs=tokens, targets=targets))

    return Program(
        size=str(sizes),
        init=lambda key: forward.init(jnp.asarray(KEY), tokens),
        batch=(tokens, jnp.roll(tokens, -1, 1), KEY),
        forward=run,
        loss=whole,
    )
