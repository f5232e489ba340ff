"""Programs that take longer than they need, each beside the same program as the report's advice has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, kw_only=True)
class Advised:
    """A program with a cause, the same as the advice has it, arguments of several sizes, and words of both."""

    needs: Callable[..., Any]
    followed: Callable[..., Any]
    sizes: tuple[tuple[Any, ...], ...]
    cause: str
    remedy: str
    least: float
    """The part of the time above need that following the advice saves at least at the first size, by the estimates."""


def lookup_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    return jax.vjp(lambda table: table[ids % len(table)], table)[1](cotangent)[0]


def one_hot_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    def taken(table: Array) -> Array:
        return jax.nn.one_hot(ids % len(table), len(table), dtype=table.dtype) @ table

    return jax.vjp(taken, table)[1](cotangent)[0]


def sorted_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    ids = ids % len(table)
    order = jnp.argsort(ids)
    return jax.ops.segment_sum(cotangent[order], ids[order], len(table), indices_are_sorted=True)


def operation_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    from xlafuse.kernels import embedding

    return jax.vjp(lambda table: embedding(table, ids % len(table)), table)[1](cotangent)[0]


def dispatched(x: Array, w: Array, slots: Array) -> Array:
    one_hot = jax.nn.one_hot(slots, 2 * len(x), dtype=x.dtype)
    y = jax.nn.gelu(jnp.einsum("ts,td->sd", one_hot, x) @ w)
    return jnp.einsum("ts,sd->td", 0.5 * one_hot, y)


def gathered(x: Array, w: Array, slots: Array) -> Array:
    tokens = jnp.full(2 * len(x), len(x)).at[slots].set(jnp.arange(len(x)), mode="drop")
    y = jax.nn.gelu(jnp.take(x, tokens, axis=0, mode="fill", fill_value=0) @ w)
    return 0.5 * jnp.take(y, slots, axis=0, mode="fill", fill_value=0)


def product(x: Array, w: Array, precision: Any = None, wide: bool = False) -> Array:
    return jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32 if wide else None)


def widened_product(x: Array, w: Array) -> Array:
    return x.astype(jnp.float32) @ w.astype(jnp.float32)


def dropout(seed: Array, x: Array) -> Array:
    return jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.9, x.shape) * x


def dropout_of_bytes(seed: Array, x: Array) -> Array:
    words = jax.random.bits(jax.random.wrap_key_data(seed), (x.size // 4,), jnp.uint32)
    return (jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(x.shape) < 230) * x


def layer_gradient(w: Array, x: Array, seed: Array, *, draws_again: bool) -> Array:
    def layer(w: Array, kept: Array | None) -> Array:
        hidden = jax.nn.gelu(x @ w)
        return (dropout(seed, hidden) if kept is None else kept * hidden) @ w.T

    def loss(w: Array) -> Array:
        shape = (len(x), w.shape[1])
        kept = None if draws_again else jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.9, shape)
        return (jax.checkpoint(layer)(w, kept).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)(w)


def embedded_patches(images: Array, kernel: Array) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, kernel.shape[:2], "VALID", dimension_numbers=numbers)


def multiplied_patches(x: Array, kernel: Array) -> Array:
    (n, h, w, c), p = x.shape, len(kernel)
    patches = x.reshape(n, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(n, (h // p) * (w // p), p * p * c)
    return patches @ kernel.reshape(p * p * c, -1)


def stem(images: Array, kernel: Array, channels: int = 0) -> Array:
    more = max(channels - images.shape[-1], 0)
    images = jnp.pad(images, [(0, 0)] * 3 + [(0, more)])
    kernel = jnp.pad(kernel, [(0, 0), (0, 0), (0, more), (0, 0)])
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=numbers)


def depthwise(x: Array, kernel: Array) -> Array:
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )


def shifted_sum(x: Array, kernel: Array) -> Array:
    last = len(kernel) - 1
    return sum(x[:, tap : tap + x.shape[1] - last] * kernel[tap, 0] for tap in range(len(kernel)))  # pyright: ignore[reportReturnType]


def loss_gradient(x: Array, w: Array, labels: Array, *, is_picked_of: Callable[[Array], Array]) -> Array:
    def loss(w: Array) -> Array:
        logits = x @ w
        scores = is_picked_of(logits)
        picked = jnp.sum(jax.nn.one_hot(labels, w.shape[1]) * scores, -1)
        normalizer = jax.nn.logsumexp(logits, -1) if scores is logits else 0
        return jnp.mean(normalizer - picked).astype(jnp.float32)

    return jax.grad(loss)(w)


def steps(state: Array, xs: Array, unroll: int = 1) -> Array:
    return jax.lax.scan(lambda state, x: (jnp.tanh(state * x), None), state, xs, unroll=unroll)[0]


def chosen(scores: Array, k: int = 8) -> Array:
    return jax.lax.top_k(scores, k)[0]


def chosen_in_turn(scores: Array, k: int = 8) -> Array:
    taken = []
    for _ in range(k):
        taken.append(scores.max(-1))
        scores = jnp.where(jnp.arange(scores.shape[-1]) == scores.argmax(-1)[..., None], -jnp.inf, scores)
    return jnp.stack(taken, -1)


def _struct(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


_bf16, _f32, _s32 = (partial(_struct, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int32))
_SEED = _struct(jnp.uint32, 2)


def _lookups(*sizes: tuple[int, int, int]) -> tuple[tuple[Any, ...], ...]:
    return tuple((_bf16(rows, width), _s32(count), _bf16(count, width)) for rows, count, width in sizes)


def _squares(kind: Callable[..., Any], *sizes: tuple[int, int, int]) -> tuple[tuple[Any, ...], ...]:
    return tuple((kind(m, k), kind(k, n)) for m, k, n in sizes)


ADVISED: Mapping[str, Advised] = {
    "a lookup of two rows": Advised(
        needs=lookup_gradient, followed=one_hot_gradient,
        sizes=_lookups((2, 8192, 1024), (16, 16384, 768), (512, 8192, 1024)),
        cause="A scatter adds 8192 rows into 2", remedy="one_hot", least=0.02,
    ),
    "a lookup of a vocabulary": Advised(
        needs=lookup_gradient, followed=operation_gradient,
        sizes=_lookups((2000, 65536, 512), (4096, 131072, 256), (30522, 32768, 1024)),
        cause="A scatter adds 65536 rows into 2000", remedy="sort the indices", least=0.02,
    ),
    "dispatch by one-hot products": Advised(
        needs=dispatched, followed=gathered,
        sizes=tuple((_bf16(rows, width), _bf16(width, width), _s32(rows))
                    for rows, width in ((4096, 1024), (2048, 4096), (8192, 512))),
        cause="A product with a one-hot matrix of 34 million", remedy="by their index", least=0.9,
    ),
    "exact float32": Advised(
        needs=partial(product, precision="highest"),
        followed=partial(product, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3),
        sizes=_squares(_f32, (4096, 4096, 4096), (8192, 1024, 4096), (2048, 8192, 2048)),
        cause="A float32 product of the highest precision", remedy="TF32_TF32_F32_X3", least=0.8,
    ),
    "widened operands": Advised(
        needs=widened_product, followed=partial(product, wide=True),
        sizes=_squares(_bf16, (4096, 4096, 4096), (8192, 1024, 4096), (2048, 8192, 2048)),
        cause="A float32 product of bf16 values", remedy="preferred_element_type", least=0.8,
    ),
    "dropout": Advised(
        needs=dropout, followed=dropout_of_bytes,
        sizes=((_SEED, _bf16(8192, 4096)), (_SEED, _bf16(16384, 1024)), (_SEED, _f32(4096, 8192))),
        cause="Random numbers by threefry", remedy="four of each random word", least=0.5,
    ),
    "dropout in a checkpoint": Advised(
        needs=partial(layer_gradient, draws_again=True), followed=partial(layer_gradient, draws_again=False),
        sizes=tuple((_bf16(width, hidden), _bf16(rows, width), _SEED)
                    for rows, width, hidden in ((8192, 512, 2048), (16384, 256, 2048), (4096, 1024, 4096))),
        cause="Random numbers by threefry, about 100 integer operations each, made again", remedy="jax.checkpoint",
        least=0.5,
    ),
    "patches of three channels": Advised(
        needs=embedded_patches, followed=multiplied_patches,
        sizes=tuple((_bf16(n, 224, 224, 3), _bf16(p, p, 3, width))
                    for n, p, width in ((64, 16, 1024), (128, 16, 768), (32, 14, 1024))),
        cause="A convolution of 3 channels", remedy="patches", least=0.8,
    ),
    "a stem of three channels": Advised(
        needs=stem, followed=partial(stem, channels=8),
        sizes=tuple((_bf16(n, size, size, 3), _bf16(p, p, 3, width))
                    for n, size, p, width in ((128, 224, 7, 64), (64, 256, 3, 32), (32, 384, 3, 64))),
        cause="A convolution of 3 channels", remedy="pad the channels", least=0.2,
    ),
    "a depthwise convolution": Advised(
        needs=depthwise, followed=shifted_sum,
        sizes=tuple((_f32(n, length + taps - 1, width), _f32(taps, 1, width))
                    for n, length, width, taps in ((4, 2048, 2048, 4), (8, 1024, 4096, 4), (2, 4096, 1536, 3))),
        cause="A convolution of each channel alone", remedy="shifted products", least=0.8,
    ),
    "a one-hot gradient": Advised(
        needs=partial(loss_gradient, is_picked_of=jax.nn.log_softmax),
        followed=partial(loss_gradient, is_picked_of=lambda logits: logits),
        sizes=tuple((_bf16(rows, width), _bf16(width, vocabulary), _s32(rows))
                    for rows, width, vocabulary in ((4096, 512, 32768), (8192, 256, 16384), (2048, 1024, 65536))),
        cause="The rows of a one-hot array of 4096 × 32768", remedy="logsumexp", least=0.8,
    ),
    "a loop of small steps": Advised(
        needs=steps, followed=partial(steps, unroll=8),
        sizes=tuple((_f32(n, n), _f32(count, n, n)) for count, n in ((256, 64), (512, 128), (128, 32))),
        cause="A loop of 256 iterations", remedy="unroll", least=0.5,
    ),
}  # fmt: skip
