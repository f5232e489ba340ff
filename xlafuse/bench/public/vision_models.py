"""Public models of images: ResNet and SigLIP."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlafuse.bench.public.programs import KEY, Program, importing, linen_program, normal, statistics_of, tokens_of
from xlafuse.bench.public.sizes import Levels, Stack


def resnet(folder: Path, dtype: Any, sizes: Levels) -> Program:
    """Makes Flax's example of ResNet-50 with batch norms, on the one device of its `pmap`."""
    with importing(folder / "flax/examples/imagenet"):
        models = importlib.import_module("models")
    classes = 1000
    stages = [3, 4, 6, 3] if sizes.blocks == 3 else [sizes.blocks] * len(sizes.widths)
    module = models.ResNet(
        stage_sizes=stages,
        block_cls=models.BottleneckResNetBlock,
        num_classes=classes,
        num_filters=sizes.widths[0],
        dtype=dtype,
    )
    images = normal(sizes.batch, sizes.side, sizes.side, 3, dtype=dtype)
    labels = tokens_of(sizes.batch, 1, classes)[:, 0]
    statistics = statistics_of(jax.eval_shape(module.init, jax.random.key(0), images)["batch_stats"])

    def forward(params: Any, images: jax.Array, _: Any, statistics: Any) -> Any:
        def on_device(images: jax.Array) -> Any:
            return module.apply({"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"])

        logits, state = jax.vmap(on_device, axis_name="batch")(images[None])
        return logits[0], state

    def loss(params: Any, images: jax.Array, labels: jax.Array, statistics: Any) -> jax.Array:
        logits, _ = forward(params, images, labels, statistics)
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, classes)).mean()

    return Program(
        size=f"{sizes.batch} images, {sum(stages)} blocks from width {sizes.widths[0]}",
        init=lambda key: module.init(key, images[:1])["params"],
        batch=(images, labels, statistics),
        forward=forward,
        loss=loss,
    )


def siglip(folder: Path, dtype: Any, sizes: Stack) -> Program:
    """Makes Big Vision's two towers, products of images in `dtype`, with the loss of its `siglip.py`."""
    stand_ins = ("tensorflow", "tensorflow.io", "tensorflow.io.gfile")
    tower = {"width": sizes.width, "depth": sizes.layers, "mlp_dim": sizes.hidden, "num_heads": sizes.heads}
    patch = (8, 8) if sizes.length < 224 else (16, 16)
    image = {**tower, "patch_size": patch, "pool_type": "map", "dtype_mm": jnp.dtype(dtype).name}
    text = {**tower, "vocab_size": sizes.vocabulary}

    def call(method: str, *arguments: Any, **more: Any) -> Any:
        with importing(folder / "big_vision", *stand_ins):  # the towers are imported as the model is called
            towers = importlib.import_module("big_vision.models.proj.image_text.two_towers")
            module = towers.Model(
                image=image, text=text, out_dim=(None, sizes.width), temperature_init=10.0, bias_init=-10.0
            )
            return getattr(module, method)(*arguments, **more)

    module = SimpleNamespace(
        init=lambda *arguments, **more: call("init", *arguments, **more),
        apply=lambda *arguments, **more: call("apply", *arguments, **more),
    )
    images = normal(sizes.batch, sizes.length, sizes.length, 3)
    words = tokens_of(sizes.batch, sizes.targets, sizes.vocabulary)

    def loss(out: Any, *_: Any) -> jax.Array:
        image, text, extra = out
        logits = jnp.dot(image, text.T) * extra["t"] + extra["b"]
        sign = -jnp.ones_like(logits) + 2 * jnp.eye(sizes.batch)
        return jnp.mean(-jnp.sum(jax.nn.log_sigmoid(sign * logits), axis=-1))

    size = f"{sizes}, {sizes.targets} tokens"
    return linen_program(module, (images, words), {"train": True}, loss, size=size, batch=(images, words, KEY))
