"""Generated programs that look like operations, most of which are something else.

Sizes of axes are equal wherever they can be, and constants differ by much, so that what is wrongly rewritten gives
other shapes' numbers and not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

SIZE = 8
EPSILONS = (1e-6, 0.1, 0.5)
SCALES = (0.25, 0.5, 1.0, -0.5)
ACTIVATIONS: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jax.nn.silu,
    jax.nn.gelu,
    jax.nn.relu,
    jax.nn.sigmoid,
    jnp.tanh,
    lambda x: x * jax.nn.sigmoid(1.702 * x),
)


@dataclass(frozen=True)
class Program:
    """A function of arrays, and the choices that made it."""

    name: str
    fn: Callable[..., Any]
    arguments: tuple[jax.Array, ...]

    def __repr__(self) -> str:
        return self.name


def _random(shape: Sequence[int], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def wide(x: jax.Array) -> jax.Array:
    """In float32, or float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Choices:
    """Draws, and remembers what was drawn."""

    def __init__(self, draw: Callable[..., Any], family: str):
        self._draw = draw
        self.told = [family]

    def __call__(self, name: str, *options: Any, likely: float = 0.0) -> Any:
        """One of the options; the first one more often, by the share `likely`."""
        is_first = bool(likely) and self._draw(st.integers(0, 99)) < 100 * likely
        place = 0 if is_first else self._draw(st.integers(0, len(options) - 1))
        self.told.append(f"{name}={getattr(options[place], '__name__', options[place])}")
        return options[place]

    def program(self, fn: Callable[..., Any], *arguments: jax.Array) -> Program:
        """Of what was drawn."""
        return Program(", ".join(self.told), fn, arguments)


def _norm(choose: Choices) -> Callable[..., Any]:
    axis = choose("axis", -1, 0, 1, likely=0.6)
    kind = choose("kind", "rms", "layer")
    epsilon = choose("epsilon", *EPSILONS)
    casts = choose("casts", True, False, likely=0.7)
    other = choose("square of", "itself", "the transposed", "another", likely=0.7)
    squares = choose("square", "x*x", "x**2", "abs")
    root = choose("root", "rsqrt", "sqrt", "outside", likely=0.7)
    center = choose("center", "mean", "max", "rows' mean", likely=0.7)
    weights = choose("scale", "columns", "rows", "1 +", "none", "late", "late, wide", likely=0.3)
    biased = choose("bias", "none", "columns", "rows", "before")
    count = choose("count", 0, 1, likely=0.8)
    extra = choose("extra", None, 0, 1, likely=0.8)
    before = choose("before", "none", "sum", "transposed", likely=0.5)

    def fn(x: jax.Array, y: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
        total = {"none": x, "sum": x + y, "transposed": x.T}[before]
        value = wide(total) if casts else total
        if kind == "layer":
            mean = {
                "mean": jnp.mean(value, axis, keepdims=True),
                "max": jnp.max(value, axis, keepdims=True),
                "rows' mean": jnp.mean(value, 0, keepdims=True),
            }[center]
            value = value - mean
        of = {"itself": value, "the transposed": value.T, "another": value[::-1]}[other]
        of = {"x*x": of * value, "x**2": of**2, "abs": jnp.abs(of)}[squares]
        square = jnp.sum(of, axis, keepdims=True) / (SIZE - count)
        if root == "outside":
            normed = value / (jnp.sqrt(jnp.abs(square)) + epsilon)
        elif root == "sqrt":
            normed = value / jnp.sqrt(jnp.abs(square) + epsilon)
        else:
            normed = value * jax.lax.rsqrt(square + epsilon)
        column, row = wide(scale) if casts else scale, wide(scale)[:, None] if casts else scale[:, None]
        b = wide(bias) if casts else bias
        normed = normed + b if biased == "before" else normed
        if weights in ("late", "late, wide"):
            result = normed.astype(x.dtype) * scale.astype(x.dtype if weights == "late" else wide(x).dtype)
        else:
            result = normed * {"columns": column, "rows": row, "1 +": 1 + column, "none": 1.0}[weights]
        result = result + {"columns": b, "rows": b[:, None]}[biased] if biased in ("columns", "rows") else result
        result = result.astype(x.dtype)
        return result if extra is None else (result, (square, total)[extra])

    return fn


def norms(draw: Callable[..., Any]) -> Program:
    """RMSNorm and LayerNorm."""
    choose = Choices(draw, "norm")
    dtype = choose("dtype", jnp.float32, jnp.bfloat16)
    x, y, scale, bias = (_random(s, dtype, k) for k, s in enumerate(((SIZE, SIZE), (SIZE, SIZE), (SIZE,), (SIZE,))))
    return choose.program(_norm(choose), x, y, scale, bias)


def batch_norms(draw: Callable[..., Any]) -> Program:
    """Norms over rows, whose statistics are results."""
    choose = Choices(draw, "batch_norm")
    axes = choose("axes", (0, 1), (0,), (1,), (0, 2), (1, 2), likely=0.5)
    epsilon = choose("epsilon", *EPSILONS)
    ddof = choose("ddof", 0, 1, likely=0.8)
    fast = choose("fast", True, False)
    center = choose("center", "own", "other", likely=0.8)
    order = choose("order", ("scale", "bias"), ("bias", "scale"))
    returned = choose("returned", "both", "mean", "square", "none")

    def fn(x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
        mean = jnp.mean(x, axes, keepdims=True)
        square = jnp.mean(x * x, axes, keepdims=True)
        variance = jnp.maximum(0, square - mean**2) if fast else jnp.var(x, axes, keepdims=True, ddof=ddof)
        shift = mean if center == "own" else jnp.mean(x[::-1] ** 2, axes, keepdims=True)
        y = (x - shift) * jax.lax.rsqrt(variance + epsilon)
        for each in order:
            y = y * scale if each == "scale" else y + bias
        more = {"both": (mean, variance), "mean": (jnp.squeeze(mean, axes),), "square": (square,), "none": ()}[returned]
        return y, *more

    return choose.program(fn, _random((SIZE,) * 3, seed=1), _random((SIZE,), seed=2), _random((SIZE,), seed=3))


def _mask(choose: Choices) -> tuple[Callable[[int, jax.Array], jax.Array | None], bool]:
    """A mask, and whether it leaves every row an element."""
    kind = choose("mask", "tril", "none", "inverted", "transposed", "offset", "positions", "strict", "given")

    def mask(size: int, given: jax.Array) -> jax.Array | None:
        tril, at = jnp.tril(jnp.ones((size, size), bool)), jnp.arange(size)
        return {
            "tril": tril,
            "none": None,
            "inverted": ~tril,
            "transposed": tril.T,
            "offset": jnp.tril(jnp.ones((size, size), bool), 1),
            "positions": at[:, None] >= at,
            "strict": at[:, None] > at,
            "given": given,
        }[kind]

    return mask, kind not in ("inverted", "strict", "given")


def _softmax(choose: Choices) -> Callable[[jax.Array, jax.Array], jax.Array]:
    mask, is_full = _mask(choose)
    # A row of nothing but -inf is NaN in the program, and zeros in softmax and attention: docs/fuse.md says so.
    hidden = choose("hidden", -1e30, 0.0, -5.0, -1e4, -1e38, *([-jnp.inf] if is_full else []))
    hides = choose("hides", "choice", "opposite", "sum", "sum of opposite", likely=0.5)
    axis, of = choose("axis", -1, -2, likely=0.8), choose("maximum over", "axis", "other", "none", likely=0.7)
    scale, scaled = choose("scale", *SCALES), choose("scaled", "before", "after", likely=0.7)
    by_hand = choose("by hand", False, True)
    total = choose("sum over", "axis", "other", likely=0.9)

    def softmax(scores: jax.Array, given: jax.Array) -> jax.Array:
        scores = scores * scale if scaled == "before" else scores
        seen = mask(scores.shape[-1], given)
        if seen is not None:
            scores = {
                "choice": lambda: jnp.where(seen, scores, hidden),
                "opposite": lambda: jnp.where(~seen, hidden, scores),
                "sum": lambda: scores + jnp.where(seen, 0, hidden).astype(scores.dtype),
                "sum of opposite": lambda: scores + jnp.where(~seen, hidden, 0).astype(scores.dtype),
            }[hides]()
        scores = scores * abs(scale) if scaled == "after" else scores
        if not by_hand:
            return jax.nn.softmax(scores, axis)
        other = -2 if axis == -1 else -1
        if of != "none":
            scores = scores - jnp.max(scores, axis if of == "axis" else other, keepdims=True)
        weights = jnp.exp(scores)
        return weights / jnp.sum(weights, axis if total == "axis" else other, keepdims=True)

    return softmax


def softmaxes(draw: Callable[..., Any]) -> Program:
    """Softmax with masks."""
    choose = Choices(draw, "softmax")
    softmax = _softmax(choose)
    return choose.program(softmax, _random((3, SIZE, SIZE)), _random((SIZE, SIZE), seed=1) > 0)


def _dropout(choose: Choices) -> Callable[[jax.Array, jax.Array], jax.Array]:
    form = choose("drops", "nothing", "choice", "opposite", "product", "one minus", "a number", "late", likely=0.3)
    kept, of = choose("kept", 0.75, 0.5, 1.0, 2.0, -0.5, likely=0.7), choose("mask of", "all", "rows", "queries")
    axes = choose("mask's axes", None, (0, 1, 3, 2), (1, 0, 2, 3), likely=0.7)
    part = {"all": slice(None), "rows": slice(0, 1), "queries": (slice(0, 1), slice(0, 1))}[of]

    def dropped(weights: jax.Array, masks: jax.Array) -> jax.Array:
        keep = masks[part] if axes is None else masks[part].transpose(axes)
        share = keep.astype(weights.dtype)
        return {
            "nothing": lambda: weights,
            "choice": lambda: jnp.where(keep, weights / kept, 0),
            "opposite": lambda: jnp.where(keep, 0, weights * (1 / kept)),
            "product": lambda: weights * (share / kept),
            "one minus": lambda: (1 - share) * weights / kept,
            "a number": lambda: jnp.where(keep, weights / kept, 0.125),
            "late": lambda: jnp.where(keep, weights, 0) / kept,
        }[form]()

    return dropped


def attentions(draw: Callable[..., Any]) -> Program:
    """Products around a softmax, of arrays whose axes are all equally long."""
    choose = Choices(draw, "attention")
    dtype = choose("dtype", jnp.float32, jnp.bfloat16)
    softmax = _softmax(choose)
    first = choose(
        "scores", "bqhd,bkhd->bhqk", "bqhd,bkhd->bhkq", "bhqd,bhkd->bhqk", "bqhd,bkdh->bhqk", "bqhd,bhkd->bhqk",
        "bqhd,bkhd->bqhk", likely=0.5,
    )  # fmt: skip
    second = choose(
        "values", "bhqk,bkhd->bqhd", "bhqk,bhkd->bhqd", "bhqk,bkhd->bhqd", "bhkq,bkhd->bqhd", "bhqk,bkdh->bqhd",
        "bhqk,bqhd->bkhd", likely=0.5,
    )  # fmt: skip
    operands = choose("operands", (0, 1, 2), (0, 1, 1), (1, 0, 2), (0, 2, 1), (0, 0, 0), likely=0.5)
    repeats = choose("repeats", "none", "repeat", "tile")
    cap = choose("cap", None, 2.0, likely=0.7)
    biases = choose("biases", 0, 1, 2, likely=0.5)
    dropped, casts = _dropout(choose), choose("casts", "none", "scores", "weights", "dropped")
    extra = choose("extra", None, 0, likely=0.8)

    def fn(a: jax.Array, b: jax.Array, c: jax.Array, given: jax.Array, masks: jax.Array, bias: jax.Array) -> Any:
        if repeats != "none":
            spread = jnp.repeat if repeats == "repeat" else lambda x, n, axis: jnp.tile(x, (1, 1, n, 1))
            b, c = spread(b[:, :, :2], 2, axis=2), spread(c[:, :, :2], 2, axis=2)
        q, k, v = ((a, b, c)[place] for place in operands)
        scores = jnp.einsum(first, q, k)
        scores = wide(scores) if casts != "none" else scores
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        for each in (bias, bias[:1, :1].transpose(0, 1, 3, 2))[:biases]:
            scores = scores + each.astype(scores.dtype)
        scores = scores.astype(v.dtype) if casts == "scores" else scores
        weights = softmax(scores, given)
        weights = weights if casts == "dropped" else weights.astype(v.dtype)
        out = jnp.einsum(second, dropped(weights, masks).astype(v.dtype), v)
        return out if extra is None else (out, scores)

    a, b, c = (_random((4,) * 4, dtype, seed=k) for k in range(3))
    masks = _random((4,) * 4, seed=4) > -0.5
    return choose.program(fn, a, b, c, _random((4, 4), seed=3) > 0, masks, _random((4,) * 4, seed=5))


def ropes(draw: Callable[..., Any]) -> Program:
    """Rotations of two arrays whose tokens are as many as their heads."""
    choose = Choices(draw, "rope")
    dtype = choose("dtype", jnp.float32, jnp.bfloat16)
    form = choose("pairs", "halves", "neighbours", "rotate_half", "halves to neighbours")
    low = choose("low", "-", "+", likely=0.8)
    swapped = choose("swapped", False, True, likely=0.8)
    theta = choose("theta", 10000.0, 100.0, 50.0)
    other_theta = choose("other theta", None, 1000.0, likely=0.8)
    exponent = choose("exponent", "2k/d", "k/half", "k/d", "-2k/d", "1-based", likely=0.5)
    axis = choose("axis of positions", 1, 2, 0, likely=0.7)
    where = choose("positions", "given", "arange", "given rows", "floating", "halves of them")
    narrow = choose("in the dtype", "nothing", "all", "the array")
    second = choose("the second is", "rotated alike", "not rotated", "rotated by other positions", likely=0.7)
    ends = choose("cast", "last", "before", "none")

    def rotated(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
        size, half = x.shape[-1], x.shape[-1] // 2
        k = jnp.arange(half, dtype=wide(x).dtype)
        powers = {"2k/d": 2 * k / size, "k/half": k / half, "k/d": k / size, "-2k/d": -2 * k / size}
        frequency = 1 / base ** (powers[exponent] if exponent in powers else (k + 1) / half)
        shape = [1, 1, 1, 1]
        if positions.ndim == 2:
            angle = (positions.astype(k.dtype)[..., None] * frequency)[:, :, None]
        else:
            shape[axis] = x.shape[axis]
            angle = positions.astype(k.dtype).reshape(shape) * frequency
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        cosine, sine = (sine, cosine) if swapped else (cosine, sine)
        value = wide(x) if narrow == "nothing" else x
        cosine, sine = (cosine.astype(x.dtype), sine.astype(x.dtype)) if narrow == "all" else (cosine, sine)
        if form == "rotate_half":
            second_half = -value[..., half:] if low == "-" else value[..., half:]
            turned = jnp.concatenate([second_half, value[..., :half]], -1)
            both = (jnp.concatenate([each, each], -1) for each in (cosine, sine))
            return (value * next(both) + turned * next(both)).astype(x.dtype)
        by_two = form == "neighbours"
        a, b = (value[..., 0::2], value[..., 1::2]) if by_two else jnp.split(value, 2, -1)
        parts = [a * cosine - b * sine if low == "-" else a * cosine + b * sine, b * cosine + a * sine]
        parts = [each.astype(x.dtype) for each in parts] if ends == "before" else parts
        result = jnp.concatenate(parts, -1) if form == "halves" else jnp.stack(parts, -1).reshape(x.shape)
        return result.astype(x.dtype)

    def fn(q: jax.Array, k: jax.Array, given: jax.Array) -> Any:
        positions = {
            "given": given,
            "arange": jnp.arange(4),
            "given rows": given[0],
            "floating": jnp.arange(4, dtype=wide(q).dtype),
            "halves of them": jnp.arange(4, dtype=wide(q).dtype) / 2,
        }[where]
        other = {
            "rotated alike": lambda: rotated(k, positions, other_theta or theta),
            "not rotated": lambda: k,
            "rotated by other positions": lambda: rotated(k, positions + 1, theta),
        }[second]()
        return rotated(q, positions, theta), other

    q, k = _random((4, 4, 4, 4), dtype), _random((4, 4, 4, 4), dtype, 1)
    return choose.program(fn, q, k, jnp.arange(16, dtype=jnp.int32).reshape(4, 4) % 7)


def losses(draw: Callable[..., Any]) -> Program:
    """Cross-entropy, of as many tokens as classes."""
    choose = Choices(draw, "loss")
    kind = choose("kind", "optax", "log_softmax", "logsumexp", "one-hot", "by hand")
    axis = choose("axis", -1, 0, likely=0.8)
    gathered = choose("gathered along", -1, 0, likely=0.8)
    made = choose("labels", "in range", "with -1", "out of range", "a vector's", likely=0.4)
    total = choose("total", "mean", "sum", "none", "of rows", "masked", "over one axis")
    scale, sign = choose("scale", 1.0, 0.5, -1.0, likely=0.6), choose("sign", 1, -1, likely=0.8)
    dtype = choose("dtype", jnp.float32, jnp.bfloat16)
    product = choose("product", "none", "w", "w.T", "biased", likely=0.3)
    extra = choose("extra", None, 0, likely=0.8)
    shifted = choose("maximum over", -1, 0, likely=0.8)

    def fn(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        x = {"none": x, "w": x @ w, "w.T": x @ w.T, "biased": x @ w + w[0]}[product]
        logits = wide(x) * scale
        chosen = labels[:, None] if gathered == -1 else labels[None]

        def at(rows: jax.Array) -> jax.Array:
            return jnp.take_along_axis(rows, chosen, gathered).reshape(-1)

        if kind == "optax":
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis)
        elif kind == "log_softmax":
            loss = -at(jax.nn.log_softmax(logits, axis))
        elif kind == "logsumexp":
            loss = jax.nn.logsumexp(logits, axis) - at(logits)
        elif kind == "one-hot":
            loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, SIZE), axis)
        else:
            most = jnp.max(logits, shifted, keepdims=True)
            inner = logits - most
            loss = jnp.log(jnp.sum(jnp.exp(inner), axis)) + jnp.squeeze(most, shifted) - at(logits)
        loss = sign * loss
        result = {
            "mean": lambda: loss.mean(),
            "sum": lambda: loss.sum(),
            "none": lambda: loss,
            "of rows": lambda: loss[:4].sum(),
            "masked": lambda: (loss * (labels > 2)).sum() / (labels > 2).sum(),
            "over one axis": lambda: loss.reshape(2, -1).sum(0),
        }[total]()
        return result if extra is None else (result, logits)

    labels = {
        "in range": np.arange(SIZE)[::-1] % SIZE,
        "with -1": np.arange(SIZE) - 1,
        "out of range": np.arange(SIZE) + 3,
        "a vector's": np.zeros(SIZE),
    }[made]
    x, w = _random((SIZE, SIZE), dtype), _random((SIZE, SIZE), dtype, 1)
    return choose.program(fn, x, w, jnp.asarray(labels, jnp.int32))


def quantized(draw: Callable[..., Any]) -> Program:
    """Products with integers that are scaled."""
    choose = Choices(draw, "quantized")
    scaled = choose("scales of", "columns", "rows", "all", likely=0.6)
    transposed = choose("transposed", False, True)
    when = choose("scaled", "before", "after", "in the dtype")
    shift = choose("zero point", 0.0, 3.0, likely=0.8)
    end = choose("end", "none", "bias", "silu", "residual")
    extra = choose("extra", None, 0, likely=0.8)

    def fn(x: jax.Array, integers: jax.Array, scales: jax.Array) -> Any:
        own = {"columns": scales[None], "rows": scales[:, None], "all": scales[0]}[scaled]
        values = integers.astype(x.dtype if when == "in the dtype" else scales.dtype)
        values = values - shift if shift else values
        if when != "after":
            values = values * own.astype(values.dtype)
        w = values.astype(x.dtype)
        y = x @ (w.T if transposed else w)
        y = (wide(y) * own).astype(x.dtype) if when == "after" else y
        y = {"none": y, "bias": y + x[0], "silu": jax.nn.silu(y), "residual": y + x}[end]
        return y if extra is None else (y, w)

    integers = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (SIZE, SIZE)), jnp.int8)
    return choose.program(fn, _random((SIZE, SIZE), jnp.bfloat16), integers, abs(_random((SIZE,), seed=3)) / 64)


STEPS = (
    "linear", "linear", "linear", "bias", "activation", "gate", "sum", "rms", "rms", "rms without scale", "layer",
    "transpose", "low rank", "projections", "product", "reverse", "widened",
)  # fmt: skip


def layers(draw: Callable[..., Any]) -> Program:
    """Some steps of a model, each of any results before it, with weights that are as wide as they are long."""
    choose = Choices(draw, "layers")
    dtype = choose("dtype", jnp.bfloat16, jnp.float32, likely=0.8)
    steps = []
    for place in range(1, draw(st.integers(2, 7))):
        recent = draw(st.integers(max(0, place - 2), place - 1))
        any_one, weight = draw(st.integers(0, place - 1)), draw(st.integers(0, 2))
        steps.append(
            (choose(f"step {place} of {recent}, {any_one}, {weight}", *STEPS), recent, any_one, weight,
             choose("epsilon", *EPSILONS), choose("activation", *ACTIVATIONS), choose("scale", *SCALES))
        )  # fmt: skip
    returned = draw(st.sets(st.integers(0, len(steps)), max_size=2)) | {len(steps)}
    choose.told.append(f"returns {sorted(returned)}")

    def fn(x: jax.Array, weights: jax.Array, vectors: jax.Array) -> Any:
        values = [x]
        for name, recent, any_one, weight, epsilon, activation, scale in steps:
            a, b, w, vector = values[recent], values[any_one], weights[weight], vectors[weight]
            values.append(_step(name, a, b, w, weights, vector, epsilon, activation, scale))
        return tuple(values[place] for place in sorted(returned))

    weights = (_random((3, SIZE, SIZE), seed=1) / math.sqrt(SIZE)).astype(dtype)
    return choose.program(fn, _random((SIZE, SIZE), dtype), weights, _random((3, SIZE), seed=2))


def _step(
    name: str, a: jax.Array, b: jax.Array, w: jax.Array, weights: jax.Array, vector: jax.Array, epsilon: float,
    activation: Callable[[jax.Array], jax.Array], scale: float,
) -> jax.Array:  # fmt: skip
    if name in ("rms", "rms without scale"):
        value = wide(a)
        normed = value * jax.lax.rsqrt(jnp.mean(value * value, -1, keepdims=True) + epsilon)
        return (normed if name != "rms" else normed * wide(vector)).astype(a.dtype)
    if name == "layer":
        value = wide(a)
        mean = jnp.mean(value, -1, keepdims=True)
        centered = (value - mean) * jax.lax.rsqrt(jnp.var(value, -1, keepdims=True) + epsilon)
        return (centered * wide(vector)).astype(a.dtype)
    if name == "projections":
        q, k, v = (a @ each for each in weights)
        p = jax.nn.softmax(wide(q[None, :, None] * k[None, None] * scale).sum(-1), -1)[0].astype(a.dtype)
        return p @ v
    return {
        "linear": lambda: a @ w,
        "bias": lambda: a @ w + vector.astype(a.dtype),
        "activation": lambda: activation(a),
        "gate": lambda: activation(a @ w) * (b @ weights[0]),
        "sum": lambda: a + b,
        "transpose": lambda: a.T,
        "low rank": lambda: a @ w + (b @ weights[1][:, :2]) @ weights[2][:2] * scale,
        "product": lambda: a * activation(b),
        "reverse": lambda: a[::-1],
        "widened": lambda: (wide(a) * scale + wide(b)).astype(a.dtype),
    }[name]()


FAMILIES = (norms, batch_norms, softmaxes, attentions, ropes, losses, quantized, layers, layers)


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Any of them."""
    return draw(st.sampled_from(FAMILIES))(draw)
