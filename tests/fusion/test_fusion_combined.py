"""Sites that are made of several operations, and what keeps the operations apart."""

from __future__ import annotations

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rewriting import normal

import xlafuse

BF16 = jnp.bfloat16
X, W = normal((2, 8, 64), BF16), normal((64, 64), BF16, 1) / 8
UP, SCALE, BIAS = normal((64, 64), BF16, 2) / 8, normal((64,), seed=3), normal((64,), BF16, 4)
POSITIONS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) % 11


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms(x, scale=1.0, epsilon=1e-6):
    value = wide(x)
    return (value * jax.lax.rsqrt(jnp.mean(value * value, -1, keepdims=True) + epsilon) * scale).astype(x.dtype)


def rms_scaled_after_rounding(x, scale=1.0):
    return rms(x) * jnp.asarray(scale).astype(x.dtype)


def angles(x, positions, theta=5e5):
    half = x.shape[-1] // 2
    return positions.astype(wide(x).dtype)[..., None, None] * theta ** (-jnp.arange(half, dtype=wide(x).dtype) / half)


def halves(x, positions):
    cosine, sine = jnp.cos(angles(x, positions)), jnp.sin(angles(x, positions))
    a, b = jnp.split(wide(x), 2, -1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)


def neighbours(x, positions):
    wavelength = 10000.0 ** (jnp.arange(0, x.shape[-1], 2, dtype=wide(x).dtype) / x.shape[-1])
    angle = (positions.astype(wide(x).dtype)[..., None] / wavelength)[..., None, :]
    a, b = wide(x)[..., 0::2], wide(x)[..., 1::2]
    pairs = [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)]
    return jnp.stack(pairs, -1).reshape(x.shape).astype(x.dtype)


def rotate_half(x, positions):
    angle = jnp.concatenate([angles(x, positions)] * 2, -1)
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * jnp.cos(angle).astype(x.dtype) + turned * jnp.sin(angle).astype(x.dtype)


def rotate_half_before_cast(x, positions):
    angle = jnp.concatenate([angles(x, positions)] * 2, -1)
    return _by_columns(x, jnp.cos(angle), jnp.sin(angle))


def _by_columns(x, cosine, sine):
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return (x * cosine + turned * sine).astype(x.dtype)


Q, K = normal((2, 8, 4, 16), seed=5), normal((2, 8, 2, 16), seed=6)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
@pytest.mark.parametrize("rotate", [halves, neighbours, rotate_half, rotate_half_before_cast])
def test_rope(sites, rotate, dtype):
    reports = []

    def fn(q, k, positions):
        return rotate(q, positions), rotate(k, positions)

    assert sites(fn, Q.astype(dtype), K.astype(dtype), POSITIONS, told=reports.append) == ["rope"]
    (site,) = reports[0].taken
    assert site.options["interleaved"] == (rotate is neighbours)
    assert {"query", "key", "cos", "sin"} <= site.arrays.keys()
    assert sites(fn, Q.astype(dtype), K.astype(dtype), POSITIONS[0]) == ["rope"]


def _two_dimensional(x, positions):
    frequency = 100.0 ** (-jnp.arange(4, dtype=wide(x).dtype) / 4)
    both = jnp.stack([positions // 4, positions % 4], -1).astype(frequency.dtype)
    angle = (both[..., None] * frequency).reshape(*positions.shape, 1, 8)
    return _by_angles(x, angle)


FREQUENCIES = jnp.asarray([1.0, 0.5, 0.4, 0.1, 0.05, 0.01, 0.005, 0.001])


def _stretched(x, positions):
    return _by_angles(x, positions.astype(wide(x).dtype)[..., None, None] * FREQUENCIES)


def _scaled(x, positions):
    angle = angles(x, positions)
    return _by_angles(x, angle, 1.2)  # as YaRN scales cosines and sines


def _by_angles(x, angle, factor=1.0):
    a, b = jnp.split(wide(x), 2, -1)
    cosine, sine = factor * jnp.cos(angle), factor * jnp.sin(angle)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)


def _by_complex_numbers(x, positions):
    factors = jnp.exp(1j * angles(x, positions))
    a, b = jnp.split(wide(x), 2, -1)
    product = jax.lax.complex(a, b) * factors
    return jnp.concatenate([product.real, product.imag], -1).astype(x.dtype)


@pytest.mark.parametrize("rotate", [_two_dimensional, _stretched, _scaled, _by_complex_numbers])
def test_rope_of_any_angles(sites, rotate):
    assert sites(lambda q, k, p: (rotate(q, p), rotate(k, p)), Q, K, POSITIONS) == ["rope"]


NOT_ALIKE = {
    "one array": lambda q, k, p: (halves(q, p), k),
    "other positions": lambda q, k, p: (halves(q, p), halves(k, p + 1)),
    "other pairs": lambda q, k, p: (halves(q, p), neighbours(k, p)),
}


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_arrays_that_are_not_rotated_alike_have_calls_of_their_own(sites, name):
    reports = []
    count = 1 if name == "one array" else 2
    assert sites(NOT_ALIKE[name], Q, K, POSITIONS, told=reports.append) == ["rope"] * count
    assert all("key" not in each.arrays for each in reports[0].taken)


def _by_columns_of_pairs(x, cosine, sine):
    value = wide(x)
    turned = jnp.stack([-value[..., 1::2], value[..., 0::2]], -1).reshape(x.shape)
    return (value * cosine + turned * sine).astype(x.dtype)


def _by_pairs(x, cosine, sine):
    value, (cosine, sine) = wide(x), (each[..., ::2] for each in (cosine, sine))
    a, b = value[..., 0::2], value[..., 1::2]
    return jnp.stack([a * cosine - b * sine, b * cosine + a * sine], -1).reshape(x.shape).astype(x.dtype)


def _by_halves(x, cosine, sine):
    half = x.shape[-1] // 2
    a, b = wide(x)[..., :half], wide(x)[..., half:]
    cosine, sine = cosine[..., :half], sine[..., :half]
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)


ROTATING = normal((16, 16), seed=7)
READ = {"at": lambda t, p: t[p][:, :, None], "slice": lambda t, p: t[None, :8, None]}


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("rotate", [_by_columns, _by_columns_of_pairs, _by_pairs, _by_halves])
@pytest.mark.parametrize("table", [ROTATING, ROTATING.astype(BF16)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("read", READ)
def test_rope_by_tables(sites, rotate, table, read):
    def fn(q, k, positions, cosine, sine):
        cosine, sine = READ[read](cosine, positions), READ[read](sine, positions)
        return rotate(q, cosine, sine), rotate(k, cosine, sine)

    reports = []
    arrays = Q.astype(BF16), K.astype(BF16), POSITIONS, table, table[::-1]
    assert sites(fn, *arrays, told=reports.append) == ["rope"]
    assert sites(lambda q, k, p: fn(q, k, p, table, table[::-1]), *arrays[:3], checks=False) == ["rope"]
    columns = 16 if "columns" in rotate.__name__ else 8
    assert reports[0].taken[0].arrays["cos"].endswith(f",8,{columns}]")


def test_tables_are_differentiated(sites):
    def loss(q, k, cosine, sine):
        rotated = (_by_halves(x, cosine[:, None], sine[:, None]) for x in (q, k))
        return sum(jnp.sum(jnp.sin(each)) for each in rotated)

    arrays = Q, K, ROTATING[:8], ROTATING[8:]
    assert sites(loss, *arrays) == ["rope"]
    every = (0, 1, 2, 3)
    for one, other in zip(jax.grad(loss, every)(*arrays), jax.grad(xlafuse.fuse(loss), every)(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _turn(x, first, second, third, fourth, *, sign=1):
    a, b = x[..., :8], x[..., 8:]
    return jnp.concatenate([a * first - b * second, b * third + sign * a * fourth], -1)


NO_ROTATION = {
    "sign swapped": lambda x, c, s: _turn(x, c, s, c, s, sign=-1),
    "cosine of another table": lambda x, c, s: _turn(x, c, s, c[:, ::-1], s),
    "sine of another table": lambda x, c, s: _turn(x, c, s, c, c),
    "cosine and sine exchanged once": lambda x, c, s: _turn(x, c, s, s, c),
    "a table of heads and tokens": lambda x, c, s: _turn(
        x, *[t[:, :, :1] * jnp.arange(4.0)[:, None] for t in (c, s, c, s)]
    ),
    "other halves": lambda x, c, s: _turn(jnp.concatenate([x[..., :8], x[..., :8]], -1), c, s, c, s),
}


@pytest.mark.parametrize("name", NO_ROTATION)
def test_what_is_no_rotation(sites, name):
    cosine, sine = (normal((2, 8, 1, 8), seed=seed) for seed in (7, 8))
    assert "rope" not in sites(NO_ROTATION[name], Q, cosine, sine)


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[0]], ids=["of each", "shared"])
def test_rope_of_a_key_without_heads(sites, positions):
    def fn(q, k, p):
        cosine, sine = jnp.cos(angles(q, p)), jnp.sin(angles(q, p))
        return _by_halves(q, cosine, sine), _by_halves(k, cosine[..., 0, :], sine[..., 0, :])

    reports = []
    assert sites(fn, Q, K[:, :, 0], positions, told=reports.append) == ["rope"]
    assert reports[0].taken[0].arrays["key"] == "float32[2,8,1,16]"
    assert sites(lambda q, p: halves(q, p), Q[0], POSITIONS[0]) == ["rope"]  # without a batch


PASSED_THROUGH = {
    "joined": lambda x, p: jnp.concatenate([halves(x[..., :8], p), x[..., 8:]], -1),
    "split": lambda x, p: (lambda own: jnp.concatenate([neighbours(own[0], p), own[1]], -1))(jnp.split(x, [8], -1)),
    "all but two": lambda x, p: jnp.concatenate([rotate_half(x[..., :14], p), x[..., 14:]], -1),
}


@pytest.mark.parametrize("name", PASSED_THROUGH)
def test_rope_of_the_first_columns(sites, name):
    reports, rotate = [], PASSED_THROUGH[name]
    assert sites(lambda q, k, p: (rotate(q, p), rotate(k, p)), Q, K, POSITIONS, told=reports.append) == ["rope"]
    (site,) = reports[0].taken
    assert site.options["rotated"] == (14 if name == "all but two" else 8)
    assert site.arrays["query"] == "float32[2,8,4,16]"


NOT_PASSED_THROUGH = {
    "other columns": lambda x, p: jnp.concatenate([halves(x[..., :8], p), x[..., :8]], -1),
    "the last columns rotated": lambda x, p: jnp.concatenate([x[..., :8], halves(x[..., 8:], p)], -1),
    "of another array": lambda x, p: jnp.concatenate([halves(x[..., :8], p), x[::-1, ..., 8:]], -1),
    "of another head": lambda x, p: jnp.concatenate([halves(x[..., :8], p), x[:, :, ::-1, 8:]], -1),
    "some of the rest": lambda x, p: jnp.concatenate([halves(x[..., :8], p), x[..., 8:12]], -1),
    "transposed": lambda x, p: (
        lambda own: jnp.concatenate([halves(own[..., :8], p[:, :4]), own.swapaxes(1, 2)[..., 8:]], -1)
    )(x.reshape(2, 8, 4, 16)[:, :4] * 1.5),
}


@pytest.mark.parametrize("name", NOT_PASSED_THROUGH)
def test_other_columns_beside_rotated_ones_are_left(sites, name):
    reports = []
    assert sites(NOT_PASSED_THROUGH[name], Q, POSITIONS, told=reports.append) == []
    assert [each.operation for each in reports[0].refused] == ["rope"]
    assert "some of an array's tokens or columns" in reports[0].refused[0].reason


def test_a_rotation_of_some_tokens_is_left_and_one_of_joint_columns_taken(sites):
    def later(x, p):
        return jnp.concatenate([x[:, :2], halves(x[:, 2:], p[:, 2:])], 1)

    assert sites(later, Q, POSITIONS) == []
    joint = normal((2, 8, 96), seed=9)
    assert sites(lambda y, p: halves(y[..., :64].reshape(2, 8, 4, 16), p), joint, POSITIONS) == ["rope"]
    assert sites(lambda y, p: halves(y.reshape(2, 8, 3, 2, 16)[:, :, 1], p), joint, POSITIONS) == ["rope"]


def test_rope_of_batches_after_heads(sites):
    def fn(q, k, p):
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
        angle = angles(q, p)[:, :, 0][:, None]
        return _by_angles(q, angle), _by_angles(k, angle)

    assert sites(fn, Q, K, POSITIONS) == ["rope"]


COMBINED = {
    "norm_linear": lambda x, w, u, s, b: jax.nn.gelu(rms(x, s) @ w + b),
    "gated_linear": lambda x, w, u, s, b: jax.nn.silu(rms(x, s) @ w) * (rms(x, s) @ u),
    "linear_residual_norm": lambda x, w, u, s, b: (
        lambda total: (total, jax.nn.silu(rms(total) @ w) * (rms(total) @ u))
    )(x @ u + x[::-1]),
    "lora_linear": lambda x, w, u, s, b: x @ w + (x @ u[:, :4]) @ w[:4] * 0.5 + b,
}


@pytest.mark.parametrize("name", COMBINED)
def test_products(sites, name):
    found = sites(COMBINED[name], X, W, UP, SCALE, BIAS)
    assert found == (["gated_linear", name] if name == "linear_residual_norm" else [name])


def test_a_scale_after_the_rounding_in_front_of_products(sites):
    def normed(x, w, s):
        return rms_scaled_after_rounding(x, s) @ w

    assert sites(normed, X, W, SCALE) == ["norm_linear"]
    identity = jnp.eye(64, dtype=BF16)
    np.testing.assert_array_equal(wide(xlafuse.fuse(normed)(X, identity, SCALE)), wide(normed(X, identity, SCALE)))
    assert sites(lambda x, w, u, s: jax.nn.silu(normed(x, w, s)) * normed(x, u, s), X, W, UP, SCALE) == ["gated_linear"]


def test_a_norm_that_others_read_stays_by_itself(sites):
    assert sites(lambda x, w, s: (rms(x, s) @ w, rms(x, s)), X, W, SCALE) == ["linear", "rms_norm"]
    assert sites(lambda x, w, u, s: (rms(x, s) @ w, rms(x, s) @ u), X, W, UP, SCALE) == ["linear", "linear", "rms_norm"]


def test_a_sum_before_a_norm_goes_to_its_product(sites):
    reports = []

    def fn(x, w, u, s):
        total = x @ u + x[::-1]
        return total, rms(total, s) @ w

    assert sites(fn, X, W, UP, SCALE, told=reports.append) == ["linear", "norm_linear"]
    assert "residual" in next(each for each in reports[0].taken if each.operation == "linear").arrays


def test_low_rank_of_another_input_is_left(sites):
    assert "lora_linear" not in sites(lambda x, y, w, u: x @ w + (y @ u[:, :4]) @ w[:4], X, X[::-1], W, UP)


def block(rotate=None, biased=False, normed=False, rms=rms):
    def fn(x, wq, wk, wv, s, head_scale, b, positions):
        h = rms(x, s)
        q, k, v = (h @ w + b[: w.shape[1]] if biased else h @ w for w in (wq, wk, wv))
        q, k, v = (y.reshape(2, 8, -1, 16) for y in (q, k, v))
        q, k = (rms(q, head_scale), rms(k, head_scale)) if normed else (q, k)
        q, k = (rotate(q, positions), rotate(k, positions)) if rotate else (q, k)
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    return fn


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotate": halves},
        {"rotate": neighbours, "biased": True},
        {"rotate": rotate_half},
        {"rotate": rotate_half_before_cast, "biased": True},
        {"rotate": halves, "normed": True},
        {"rotate": halves, "normed": True, "rms": rms_scaled_after_rounding},
    ],
)
def test_qkv_projection(sites, options):
    reports = []
    arguments = (X, W, UP[:, :32], W[:, 32:], SCALE, normal((16,), seed=8), BIAS, POSITIONS)
    assert sites(block(**options), *arguments, told=reports.append) == ["attention", "qkv_projection"]
    found = next(each for each in reports[0].taken if each.operation == "qkv_projection")
    assert found.arrays["w_k"] == "bfloat16[64,32]" and "norm_scale" in found.arrays
    assert ("q_scale" in found.arrays) == ("normed" in options)


H, TABLE = normal((4, 6, 64), BF16, 9), normal((128, 64), BF16, 10) / 8
LABELS = jnp.arange(24, dtype=jnp.int32).reshape(4, 6) * 5

LOSSES = {
    "optax": lambda h, t, y: optax.softmax_cross_entropy_with_integer_labels(wide(h @ t.T), y).mean(),
    "by hand": lambda h, t, y: -jnp.take_along_axis(jax.nn.log_softmax(wide(h @ t.T)), y[..., None], -1).mean(),
    "one-hot": lambda h, t, y: optax.softmax_cross_entropy(wide(h @ t.T), jax.nn.one_hot(y, 128)).sum(),
    "smoothed": lambda h, t, y: optax.softmax_cross_entropy(
        wide(h @ t.T), optax.smooth_labels(jax.nn.one_hot(y, 128), 0.1)
    ).mean(),
    "z-loss": lambda h, t, y: (
        optax.softmax_cross_entropy_with_integer_labels(wide(h @ t.T), y)
        + 1e-3 * jax.nn.logsumexp(wide(h @ t.T), -1) ** 2
    ).mean(),
    "rows in one": lambda h, t, y: optax.softmax_cross_entropy_with_integer_labels(
        wide(h @ t.T).reshape(-1, 128), y.reshape(-1)
    ).mean(),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", LOSSES)
def test_linear_cross_entropy(sites, name):
    reports = []
    assert sites(LOSSES[name], H, TABLE, LABELS, told=reports.append) == ["linear_cross_entropy"]
    assert reports[0].taken[0].options["reduction"] == "sum"


def loss_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels).mean()


NEXT_TOKENS = {
    "all but the last": lambda h, t, y: loss_of((h @ t.T)[:, :-1], y[:, 1:]),
    "all but the last, rows in one": lambda h, t, y: loss_of((h @ t.T)[:, :-1].reshape(-1, 128), y[:, 1:].reshape(-1)),
    "after a cast": lambda h, t, y: loss_of(wide(h @ t.T)[..., :-1, :], y[..., 1:]),
    "every second": lambda h, t, y: loss_of((h @ t.T)[:, 1::2], y[:, ::2]),
    "the first sequence": lambda h, t, y: loss_of((h @ t.T)[0], y[0]),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", NEXT_TOKENS)
def test_the_loss_of_some_rows_of_the_logits(sites, name):
    fn = NEXT_TOKENS[name]
    assert sites(fn, H, TABLE, LABELS) == ["linear_cross_entropy"]
    for one, other in zip(*(jax.grad(each, (0, 1))(H, TABLE, LABELS) for each in (fn, xlafuse.fuse(fn))), strict=True):
        np.testing.assert_allclose(wide(one), wide(other), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda h, t, y: loss_of((h @ t.T)[..., :64], y % 64),  # some classes
        lambda h, t, y: loss_of((h @ t.T).swapaxes(0, 1)[:-1], y.T[1:]),  # of other tokens
        lambda h, t, y: loss_of((h @ t.T)[:, ::-1][:, 1:], y[:, 1:]),
        lambda h, t, y: loss_of((h @ t.T)[:, :-1], y[:, 1:]) + loss_of((h @ t.T)[:, 1:], y[:, 1:]),
    ],
)
def test_the_loss_of_other_parts_of_the_logits_computes_them(sites, fn):
    assert "linear_cross_entropy" not in sites(fn, H, TABLE, LABELS)


def test_logits_that_are_returned_are_computed(sites):
    def fn(h, t, y):
        logits = wide(h @ t.T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    assert sites(fn, H, TABLE, LABELS) == ["cross_entropy", "linear"]


INTEGERS = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (64, 64)), jnp.int8)
SCALES = jnp.abs(normal((64,), seed=11)) / 64


def test_quantized_linear(sites):
    def fn(x, integers, scales, b):
        return jax.nn.silu(x @ (integers.astype(scales.dtype) * scales).astype(x.dtype) + b)

    assert sites(fn, X, INTEGERS, SCALES, BIAS) == ["quantized_linear"]
    transposed = lambda x, i, s: x @ (i.astype(x.dtype) * s[:, None].astype(x.dtype)).T  # noqa: E731
    assert sites(transposed, X, INTEGERS, SCALES) == ["quantized_linear"]


def test_scales_of_the_inputs_are_left(sites):
    def fn(x, integers, scales):
        return x @ (integers.astype(scales.dtype) * scales[:, None]).astype(x.dtype)

    assert sites(fn, X, INTEGERS, SCALES) == ["linear"]


def test_batch_norm(sites):
    def fn(x, s, b):
        mean, variance = x.mean((0, 1)), x.var((0, 1))
        return (x - mean) / jnp.sqrt(variance + 1e-3) * s + b, 0.9 * mean, variance

    x = normal((4, 8, 64), seed=12)
    assert sites(fn, x, SCALE, SCALE[::-1]) == ["batch_norm"]


def test_a_norm_by_the_mean_of_other_axes_is_left(sites):
    def fn(x, s, b):
        return (x - x.mean((0, 2), keepdims=True)) / jnp.sqrt(x.var((0, 1)) + 1e-3) * s + b

    assert "batch_norm" not in sites(fn, normal((4, 8, 64), seed=12), SCALE, SCALE[::-1])


def test_batch_norm_of_nnx(sites):
    module = nnx.BatchNorm(64, rngs=nnx.Rngs(0))
    assert sites(module, normal((16, 64)), checks=False) == ["batch_norm"]


def test_operations_that_are_named_are_the_only_ones(sites):
    assert sites(COMBINED["norm_linear"], X, W, UP, SCALE, BIAS, ops=["norm_linear"]) == ["norm_linear"]
    assert sites(COMBINED["norm_linear"], X, W, UP, SCALE, BIAS, ops=["linear"]) == ["linear"]
    with pytest.raises(ValueError, match="no operation 'rotation'"):
        sites(COMBINED["norm_linear"], X, W, UP, SCALE, BIAS, ops=["rotation"])
