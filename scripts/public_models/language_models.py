"""Public language models, and classifiers made like them."""

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
from programs import KEY, Program, importing, linen_program, nnx_program, normal, tokens_of


def transformers_program(folder: Path, dtype: Any, small: bool, name: str) -> Program:
    """Makes a language model or classifier of `transformers`; losses are those of its Flax examples."""
    import transformers

    width, length, batch = (64, 32, 2) if small else (1024, 512, 8)
    layers, heads, vocabulary = 1, width // (16 if small else 64), 128 if small else 32000
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    wide = {"intermediate_size": 4 * width}
    tokens, mask = tokens_of(batch, length, vocabulary), jnp.ones((batch, length), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    given: dict[str, Any] = {"deterministic": False}

    def shifted(out: Any, tokens: jax.Array, *_: Any) -> jax.Array:
        logits, labels = out.logits[:, :-1], tokens[:, 1:]
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()

    def masked(out: Any, tokens: jax.Array, *rest: Any) -> jax.Array:
        weight = rest[-1]
        loss = optax.softmax_cross_entropy(out.logits, jax.nn.one_hot(tokens, out.logits.shape[-1])) * weight
        return loss.sum() / weight.sum()

    if name == "bert":
        config = transformers.BertConfig(vocab_size=vocabulary, max_position_embeddings=length, **sizes, **wide)
        module = transformers.models.bert.modeling_flax_bert.FlaxBertForMaskedLMModule(config, dtype=dtype)
        given["head_mask"] = None
        inputs, loss = (tokens, mask, jnp.zeros_like(tokens), positions), masked
        weight = (tokens_of(batch, length, 7, seed=2) == 1).astype(jnp.float32)
        batch_ = (*inputs, weight, KEY)
    elif name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads
        )
        module = transformers.models.gpt2.modeling_flax_gpt2.FlaxGPT2LMHeadModule(config, dtype=dtype)
        inputs, loss = (tokens, mask, positions), shifted
        batch_ = (*inputs, KEY)
    elif name in ("llama", "gemma"):
        key_heads = {"num_key_value_heads": heads // 2, "head_dim": width // heads, "max_position_embeddings": length}
        families = {
            "llama": (transformers.LlamaConfig, "FlaxLlamaForCausalLMModule"),
            "gemma": (transformers.GemmaConfig, "FlaxGemmaForCausalLMModule"),
        }
        configure, class_name = families[name]
        config = configure(vocab_size=vocabulary, **sizes, **wide, **key_heads)
        file = importlib.import_module(f"transformers.models.{name}.modeling_flax_{name}")
        module = getattr(file, class_name)(config, dtype=dtype)
        inputs, loss = (tokens, mask, positions), shifted
        batch_ = (*inputs, KEY)
    else:
        image, patch = (32, 8) if small else (224, 16)
        config = transformers.ViTConfig(image_size=image, patch_size=patch, num_labels=10, **sizes, **wide)
        file = importlib.import_module("transformers.models.vit.modeling_flax_vit")
        module = file.FlaxViTForImageClassificationModule(config, dtype=dtype)
        inputs = (normal(batch, image, image, 3),)

        def classified(out: Any, _: Any, labels: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy(out.logits, jax.nn.one_hot(labels, 10)).mean()

        loss = classified

        batch_ = (*inputs, tokens_of(batch, 1, 10)[:, 0], KEY)
    size = f"{batch} x {length}, width {width}, {layers} layer" if name != "vit" else f"{batch} images, width {width}"
    return linen_program(module, inputs, given, loss, size=size, batch=batch_)


def lm1b(folder: Path, dtype: Any, small: bool) -> Program:
    """Makes Flax's Linen language model, with the loss of its `train.py`."""
    with importing(folder / "flax/examples/lm1b", "clu", "ml_collections", "tensorflow", "input_pipeline", "utils"):
        models, train = importlib.import_module("models"), importlib.import_module("train")
    width, length, batch, vocabulary = (64, 24, 2, 128) if small else (512, 512, 8, 30000)
    config = models.TransformerConfig(
        vocab_size=vocabulary,
        output_vocab_size=vocabulary,
        dtype=dtype,
        emb_dim=width,
        qkv_dim=width,
        mlp_dim=4 * width,
        num_layers=1,
        max_len=length,
    )
    tokens = tokens_of(batch, length, vocabulary)

    def loss(logits: Any, tokens: jax.Array) -> jax.Array:
        weights = jnp.where(tokens > 0, 1, 0).astype(jnp.float32)
        total, count = train.compute_weighted_cross_entropy(logits, tokens, weights)
        return total / count

    size = f"{batch} x {length}, width {width}, 1 layer"
    return linen_program(models.TransformerLM(config), (tokens,), {}, loss, size=size, batch=(tokens, KEY))


def flax_gemma(folder: Path, dtype: Any, small: bool) -> Program:
    """Makes Flax's NNX Gemma 3 with one layer of local attention, with the loss of its `train.py`."""
    stand_ins = ("clu", "grain", "input_pipeline", "tokenizer", "train_cfg", "sampler")
    with importing(folder / "flax/examples/gemma", *stand_ins):
        transformer, train = importlib.import_module("transformer"), importlib.import_module("train")
        sizes = importlib.import_module("transformer_cfg")
    from flax import nnx

    width, length, batch, vocabulary = (64, 24, 2, 128) if small else (1024, 512, 8, 32000)
    heads = 4 if small else 8
    config = sizes.TransformerConfig.gemma3_1b(
        num_layers=1,
        num_embed=vocabulary,
        embed_dim=width,
        hidden_dim=4 * width,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=width // heads,
        attention_types=(sizes.AttentionType.LOCAL_SLIDING,),
        sliding_window_size=length // 2,
        dtype=dtype,
        weight_dtype=jnp.float32,
    )

    def forward(module: Any, tokens: jax.Array, _: jax.Array) -> jax.Array:
        mask = transformer.make_causal_attn_mask(tokens > 0)
        return module(tokens, transformer.build_positions_from_mask(tokens > 0), None, mask)[0]

    def loss(logits: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        weights = (tokens > 0).astype(jnp.float32)
        return train.compute_weighted_cross_entropy(logits, targets, weights).mean()

    tokens = tokens_of(batch, length, vocabulary)
    return nnx_program(
        lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)),
        forward,
        loss,
        size=f"{batch} x {length}, width {width}, 1 layer",
        batch=(tokens, jnp.roll(tokens, -1, 1)),
    )


def qwen3(folder: Path, dtype: Any, small: bool) -> Program:
    """Makes Bonsai's Qwen 3, which runs on a new cache, all in one dtype."""
    with importing(folder / "bonsai"):
        library = importlib.import_module("bonsai.models.qwen3.modeling")
    from flax import nnx

    width, length, batch, vocabulary = (64, 16, 2, 128) if small else (1024, 512, 8, 32000)
    config = library.ModelConfig(
        num_layers=1,
        vocab_size=vocabulary,
        emb_dim=width,
        mlp_dim=3 * width,
        num_heads=4 if small else 8,
        head_dim=16 if small else 128,
        num_kv_heads=2 if small else 4,
        rope_theta=1_000_000,
        rope_scaling_factor=8,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )

    def make() -> Any:
        return library.Qwen3(config, rngs=nnx.Rngs(0))

    def forward(module: Any, tokens: jax.Array) -> jax.Array:
        given = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(module))
        module = nnx.merge(nnx.graphdef(module), given)
        cache = library.init_cache(config, batch, length, 0, dtype)
        return module(tokens, cache=cache, segment_ids=1 * (tokens != 0))

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        given = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(given, tokens[:, 1:]).mean()

    tokens = tokens_of(batch, length, vocabulary)
    return nnx_program(make, forward, loss, size=f"{batch} x {length}, width {width}, 1 layer", batch=(tokens,))


def mamba2(folder: Path, dtype: Any, small: bool) -> Program:
    """Makes Bonsai's Mamba 2, all in one dtype."""
    with importing(folder / "bonsai"):
        library = importlib.import_module("bonsai.models.mamba2.modeling")
    from flax import nnx

    width, length, batch, vocabulary = (64, 32, 2, 128) if small else (768, 1024, 4, 32000)
    more = {"state_size": 16, "head_dim": 16, "chunk_size": 16} if small else {}
    config = library.ModelConfig(vocab_size=vocabulary, hidden_size=width, num_hidden_layers=1, **more)

    def forward(module: Any, tokens: jax.Array) -> Any:
        given = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(module))
        return nnx.merge(nnx.graphdef(module), given)(tokens, tokens)

    tokens = tokens_of(batch, length, vocabulary)
    return nnx_program(
        lambda: library.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)),
        lambda module, tokens: forward(module, tokens)["logits"],
        lambda logits, tokens: optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].reshape(-1, vocabulary), tokens[:, 1:].reshape(-1)
        ).mean(),
        size=f"{batch} x {length}, width {width}, 1 layer",
        batch=(tokens,),
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


def haiku_transformer(folder: Path, dtype: Any, small: bool) -> Program:
    """Makes Haiku's example of a transformer, norms in float32 and the rest in `dtype`."""
    import haiku as hk
    import jmp
    from absl import flags

    train = importlib.import_module("examples.transformer.train")
    flags.FLAGS.mark_as_parsed()
    width, length, batch = (64, 24, 2) if small else (512, 512, 8)
    for name, size in {"MODEL_SIZE": width, "KEY_SIZE": width // 8, "NUM_LAYERS": 1}.items():
        setattr(train, name, size)
    tokens = tokens_of(batch, length, 128)
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
        size=f"{batch} x {length}, width {width}, 1 layer",
        init=lambda key: forward.init(jnp.asarray(KEY), tokens),
        batch=(tokens, jnp.roll(tokens, -1, 1), KEY),
        forward=run,
        loss=whole,
    )
