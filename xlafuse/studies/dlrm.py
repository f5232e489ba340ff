"""Study of a recommendation model: embedding bags, dot interaction and MLPs, forward and in a training step.

The model is DLRM (Naumov et al., 2019) on data shaped as Criteo's, at reduced size: 13 dense and 26 categorical
features, all fields' rows in one table. The layers between the MLPs' first and last have low-rank adapters; the step
trains these and the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dot_interaction, embedding_bag, lora_linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, claim, comparison
from xlafuse.studies.products import apart, bf16, dot
from xlafuse.studies.variants import Case, Variant, torch_variants

_DENSE, _FIELDS, _FEATURES, _RANK = 13, 26, 128, 16
_ROWS = _FIELDS * 4096
"""Rows of the table; the Kaggle data of Criteo have 34 million categories."""
_BATCH = 8192
_PAIRS = (_FIELDS + 1) * _FIELDS // 2
_TOP = 512
"""The interaction's 351 pairs and the dense vector's 128 values, filled up with zeros for the tensor cores."""
_BOTTOM_LAYERS = ((512, 256), (256, _FEATURES))
_TOP_LAYERS = ((_TOP, 1024), (1024, 512))
_LAYERS = (*_BOTTOM_LAYERS, *_TOP_LAYERS)
_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """One way to compute the model's three kinds of work."""

    look_up: Callable[[jax.Array, jax.Array], jax.Array]
    interact: Callable[[jax.Array], jax.Array]
    layer: Callable[..., jax.Array]


def _separate_sum(table, indices):
    return apart(jnp.sum(apart(jnp.take(table, indices, axis=0)), axis=-2, dtype=jnp.float32)).astype(table.dtype)


def _separate_pairs(x):
    products = apart(jnp.einsum("bik,bjk->bij", x, x, preferred_element_type=jnp.float32))
    return apart(products[:, *np.tril_indices(_FIELDS + 1, -1)].astype(x.dtype))


def _separate_layer(x, w, a, b):
    return apart(apart(dot(x, w)) + apart(dot(apart(dot(x, a)), b)) / _RANK)


def _parts(implementation: str) -> _Parts:
    return _Parts(
        look_up=embedding_bag,
        interact=partial(dot_interaction, implementation=implementation),
        layer=partial(lora_linear, alpha=1 / _RANK, implementation=implementation),
    )


_WAYS = {
    UNFUSED: _Parts(look_up=_separate_sum, interact=_separate_pairs, layer=_separate_layer),
    XLA: _parts("xla"),
    FUSED: _parts("mosaic"),
}


def _logits(parts: _Parts, table, adapters, indices, dense, first, last, *weights) -> jax.Array:
    """Computes a logit for each sample; adapters: a and b of each layer."""
    layers = [(w, *adapters[2 * i : 2 * i + 2]) for i, w in enumerate(weights)]

    def perceptron(x, layers):
        for layer in layers:
            x = jax.nn.relu(parts.layer(x, *layer))
        return x

    dense = perceptron(jax.nn.relu(dot(dense, first)), layers[: len(_BOTTOM_LAYERS)])
    pairs = parts.interact(jnp.concatenate([dense[:, None], parts.look_up(table, indices)], axis=1))
    filling = jnp.zeros((dense.shape[0], _TOP - _FEATURES - _PAIRS), dense.dtype)
    top = perceptron(jnp.concatenate([dense, pairs, filling], axis=1), layers[len(_BOTTOM_LAYERS) :])
    return dot(top, last)[:, 0]


def _forward(parts: _Parts, *arguments) -> jax.Array:
    table, indices, dense, first, last, *others = arguments
    weights, adapters = others[: len(_LAYERS)], others[len(_LAYERS) :]
    return _logits(parts, table, adapters, indices, dense, first, last, *weights)


def _step(parts: _Parts, labels, *arguments) -> Any:
    """Makes a step of gradient descent; returns the new table and adapters."""
    table, indices, dense, first, last, *others = arguments
    weights, adapters = others[: len(_LAYERS)], others[len(_LAYERS) :]

    def loss(trained):
        logits = _logits(parts, *trained, indices, dense, first, last, *weights).astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(logits) - labels * logits)

    trained = (table, adapters)
    return jax.tree.map(lambda p, g: (p - _RATE * g).astype(p.dtype), trained, jax.grad(loss)(trained))


def _torch(torch: Any, *arguments: Any) -> Any:
    table, indices, dense, first, last, *others = arguments
    relu, weights, adapters = torch.relu, others[: len(_LAYERS)], others[len(_LAYERS) :]

    def perceptron(x, numbers: Sequence[int]):
        for i in numbers:
            x = relu(x @ weights[i] + (x @ adapters[2 * i]) @ adapters[2 * i + 1] / _RANK)
        return x

    bottom = len(_BOTTOM_LAYERS)
    dense = perceptron(relu(dense @ first), range(bottom))
    bags = torch.nn.functional.embedding_bag(indices.reshape(-1, indices.shape[-1]), table, mode="sum")
    x = torch.cat([dense[:, None], bags.reshape(-1, _FIELDS, _FEATURES)], 1)
    rows, columns = torch.tril_indices(_FIELDS + 1, _FIELDS + 1, -1, device=x.device)
    pairs = (x @ x.transpose(1, 2))[:, rows, columns]
    filling = dense.new_zeros(dense.shape[0], _TOP - _FEATURES - _PAIRS)
    return (perceptron(torch.cat([dense, pairs, filling], 1), range(bottom, len(_LAYERS))) @ last)[:, 0]


def _drawn(struct: Any, seed: int) -> jax.Array:
    """Draws indices, labels, or normal values small enough that no layer's results grow."""
    key = jax.random.key(seed)
    if jnp.issubdtype(struct.dtype, jnp.integer):
        return jax.random.randint(key, struct.shape, 0, _ROWS, struct.dtype)
    if len(struct.shape) == 1:
        return jax.random.bernoulli(key, 0.5, struct.shape).astype(struct.dtype)
    is_table = struct.shape[0] == _ROWS
    values = jax.random.normal(key, struct.shape) * (_FEATURES if is_table else struct.shape[0]) ** -0.5
    return values.astype(struct.dtype)


def _arguments(bag: int) -> tuple[Any, ...]:
    indices = jax.ShapeDtypeStruct((_BATCH, _FIELDS, bag), jnp.int32)
    ends = (bf16(_DENSE, _BOTTOM_LAYERS[0][0]), bf16(_TOP_LAYERS[-1][1], 1))
    adapters = (each for k, n in _LAYERS for each in (bf16(k, _RANK), bf16(_RANK, n)))
    weights = (bf16(k, n) for k, n in _LAYERS)
    return bf16(_ROWS, _FEATURES), indices, bf16(_BATCH, _DENSE), *ends, *weights, *adapters


def _cases() -> list[Case]:
    forward = {name: Variant(function=partial(_forward, parts)) for name, parts in _WAYS.items()}
    step = {name: Variant(function=partial(_step, parts)) for name, parts in _WAYS.items()}
    labels = jax.ShapeDtypeStruct((_BATCH,), jnp.float32)
    return [
        *(
            Case(
                name=f"forward, bags of {bag}",
                arguments=_arguments(bag),
                variants={**forward, **torch_variants(_torch)},
                is_counted=bag > 1,
                draw=_drawn,
            )
            for bag in (1, 10)
        ),
        Case(name="training step, bags of 1", arguments=(labels, *_arguments(1)), variants=step, draw=_drawn),
    ]


_LECTURE = "GPU MODE lecture on fusing kernels"
STUDY = comparison(
    "dlrm",
    "DLRM: embedding bags and dot interaction",
    [
        claim(
            "Embedding lookups, dot interaction and dense layers fuse by the same principles",
            "no figure",
            _LECTURE,
            Gain(
                over=XLA,
                least=1.0,
                quantity="bytes",
                reason="XLA fuses the lookups by itself; interaction and layers need kernels.",
            ),
        ),
        claim(
            "DLRM with low-rank adapters is faster with fused kernels", "no figure", _LECTURE, Gain(over=XLA, least=1.0)
        ),
    ],
    _cases,
    reason="XLA looks up a bag, sums it and joins the sum with the dense vector in one launch; a kernel of its own for "
    "the bag saves nothing there, since its sums go through memory before XLA joins them. What the fused form saves is "
    "the square of products in float32, and passes between the products of a layer.",
)
