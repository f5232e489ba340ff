"""Programs that are nearly an operation, and what `fuse` says that they do besides or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.fusion import Report, fuse

BF16, F32 = jnp.bfloat16, jnp.float32
BATCH, LENGTH, HEADS, SIZE, FEATURES, CLASSES = 2, 512, 8, 64, 1024, 4096


def struct(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def reported(fn: Callable[..., Any], *arguments: Any, **options: Any) -> Report:
    """What `fuse` says of a function that is traced for the H200."""
    told: list[Report] = []
    target = load_target("h200")
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        jax.eval_shape(fuse(fn, report=told.append, **options), *arguments)
    return told[0]


HEADED = struct(BATCH, LENGTH, HEADS, SIZE)
ROWS, SCALE, WIDE_SCALE = struct(4096, FEATURES), struct(FEATURES), struct(FEATURES, dtype=F32)
KEY = struct(2, dtype=jnp.uint32)


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=F32) * SIZE**-0.5


def mixed(scores: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(BF16), v)


def kept(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)


ATTENTION: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "three biases": (
        lambda q, k, v, a, b, c: mixed(scores(q, k) + a + b + c, v),
        (struct(1, HEADS, LENGTH, LENGTH, dtype=F32), *[struct(BATCH, 1, 1, LENGTH, dtype=F32)] * 2),
        "has no addition here",
    ),
    "weights that are kept as they are": (
        lambda q, k, v, keep: jnp.einsum(
            "bhqk,bkhd->bqhd", jnp.where(keep, jax.nn.softmax(scores(q, k)), 0).astype(BF16), v
        ),
        (struct(BATCH, HEADS, LENGTH, LENGTH, dtype=jnp.bool_),),
        "the weights that are kept are not scaled",
    ),
    "weights that are kept get smaller": (
        lambda q, k, v, keep: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)).astype(BF16) * keep * 0.5, v),
        (struct(BATCH, HEADS, LENGTH, LENGTH, dtype=jnp.bool_),),
        "the weights that are kept are divided by 2",
    ),
    "scores that are dropped": (
        lambda q, k, v, keep: mixed(jnp.where(keep, scores(q, k) / 0.9, 0), v),
        (struct(BATCH, HEADS, LENGTH, LENGTH, dtype=jnp.bool_),),
        "hidden scores are 0, and those of attention are below 0",
    ),
    "scores times what dropout keeps": (
        lambda q, k, v, keep: mixed(scores(q, k) * (keep / 0.9), v),
        (struct(BATCH, HEADS, LENGTH, LENGTH, dtype=jnp.bool_),),
        "has no multiplication here",
    ),
    "an endless score": (
        lambda q, k, v, seen: mixed(jnp.where(seen, scores(q, k), jnp.inf), v),
        (struct(BATCH, 1, 1, LENGTH, dtype=jnp.bool_),),
        "hidden scores are inf",
    ),
    "a temperature for each head": (
        lambda q, k, v, t: mixed(scores(q, k) * t[:, None, None], v),
        (struct(HEADS, dtype=F32),),
        "has no multiplication here",
    ),
    "weights kept in float32": (
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), v.astype(F32)).astype(BF16),
        (),
        "keeps a division in float32, and attention rounds to 16 bits",
    ),
    "sinks with values": (
        lambda q, k, v, s: mixed_with_sinks(scores(q, k), s, jnp.concatenate([v, v[:, :1]], 1)),
        (struct(HEADS, dtype=F32),),
        "no concatenation here",
    ),
}


def mixed_with_sinks(scores: jax.Array, sinks: jax.Array, v: jax.Array) -> jax.Array:
    columns = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, columns], -1))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(BF16), v)


@pytest.mark.parametrize("name", ATTENTION)
def test_nearly_attention(name: str):
    fn, more, expected = ATTENTION[name]
    report = reported(fn, HEADED, HEADED, HEADED, *more)
    assert not any(site.operation == "attention" for site in report.taken)
    (reason,) = [site.reason for site in report.refused if site.operation == "attention"]
    assert expected in reason


def rms(x, scale, dtype: Any = F32, eps: float = 1e-6, axis: int = -1, length: int | None = None):
    value = x.astype(dtype)
    mean = jnp.sum(value * value, axis, keepdims=True) / (length or x.shape[axis])
    return value * jax.lax.rsqrt(mean.astype(dtype) + eps) * scale


def layer(x, scale, bias, dtype: Any = F32, *, root_eps: float = 0.0, ddof: int = 0):
    value = x.astype(dtype)
    deviation = jnp.sqrt(value.var(-1, keepdims=True, ddof=ddof) + 1e-5) + root_eps
    return (value - value.mean(-1, keepdims=True)) / deviation * scale + bias


NORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "16 bits": (lambda x, s: rms(x, s + 1, BF16), (ROWS, SCALE), "in bfloat16, and rms_norm in float32"),
    "mean and variance in 16 bits": (
        lambda x, s, b: layer(x, s, b, BF16),
        (ROWS, SCALE, SCALE),
        "in bfloat16, and layer_norm in float32",
    ),
    "a further sum": (
        lambda x, s, b: layer(x, s, b, root_eps=1e-3).astype(BF16),
        (ROWS, WIDE_SCALE, WIDE_SCALE),
        "has no addition here",
    ),
    "another count": (
        lambda x, s, b: layer(x, s, b, ddof=1).astype(BF16),
        (ROWS, WIDE_SCALE, WIDE_SCALE),
        "divides a sum by 1023, and layer_norm by 1024",
    ),
    "a sum": (
        lambda x, s: rms(x, s, length=1).astype(BF16),
        (ROWS, WIDE_SCALE),
        "takes a sum, and rms_norm the mean of 1024 numbers",
    ),
    "another axis": (
        lambda x, s: rms(x, s, axis=1).astype(BF16),
        (struct(8, FEATURES, 128), struct(FEATURES, 1, dtype=F32)),
        "divides a sum by 1024, and rms_norm by 128",
    ),
}


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_nearly_a_norm(name: str, restricted: bool):
    fn, arguments, expected = NORMS[name]
    operation = "layer_norm" if "layer_norm" in expected or name == "a further sum" else "rms_norm"
    report = reported(fn, *arguments, ops=[operation] if restricted else None)
    assert any(expected in site.reason for site in report.refused if site.operation == operation), str(report)


@pytest.mark.parametrize("name", ["16 bits", "mean and variance in 16 bits"])
def test_a_norm_that_rounds_is_taken_where_that_is_allowed(name: str, sites):
    fn, arguments, _ = NORMS[name]
    report = reported(fn, *arguments, allow={"rounding"})
    (site,) = report.taken
    assert site.operation in ("rms_norm", "layer_norm")
    assert site.arrays["x"] == "bfloat16[4096,1024]"
    small = [jax.random.normal(jax.random.key(k), each.shape[-1:], each.dtype) for k, each in enumerate(arguments)]
    assert sites(fn, jnp.stack([small[0], 2 * small[0]]), *small[1:], allow={"rounding"}) == [site.operation]


def test_what_keeps_more_bits_than_the_operation_is_not_taken_as_rounding():
    fn, _, _ = ATTENTION["weights kept in float32"]
    report = reported(fn, HEADED, HEADED, HEADED, allow={"rounding"})
    assert not any(site.operation == "attention" for site in report.taken)


def rotated(x, angles):
    cosine, sine = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x.astype(F32), 2, -1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)


def frequencies(count: int, base: float = 1e4) -> jax.Array:
    return base ** (-jnp.arange(count) / count)


def scaled(frequency: jax.Array) -> jax.Array:
    return jnp.where(frequency < 1e-3, frequency / 8, frequency)


ROPES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "coordinates": (
        lambda p: (p[..., None] * frequencies(16)).reshape(*p.shape[:2], 32),
        struct(BATCH, LENGTH, 2, dtype=jnp.int32),
    ),
    "scaled coordinates": (
        lambda p: (2 * jnp.pi * p[..., None] * frequencies(16)).reshape(*p.shape[:2], 32),
        struct(BATCH, LENGTH, 2, dtype=F32),
    ),
    "sections": (
        lambda p: jnp.concatenate([p[0][..., None] * frequencies(32)[:8], p[1][..., None] * frequencies(32)[8:]], -1),
        struct(2, BATCH, LENGTH, dtype=jnp.int32),
    ),
    "frequencies of a long context": (
        lambda p: p[..., None] * scaled(frequencies(32)),
        struct(BATCH, LENGTH, dtype=jnp.int32),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_of_any_angles_is_taken(name: str):
    angles, positions = ROPES[name]
    report = reported(lambda q, k, p: (rotated(q, angles(p)), rotated(k, angles(p))), HEADED, HEADED, positions)
    assert [site.operation for site in report.taken] == ["rope"] and not report.refused


def test_a_rotation_by_other_tables_is_told():
    def turned(x, cosine, sine):
        a, b = jnp.split(x.astype(F32), 2, -1)
        low, high = a * cosine[:, None] - b * sine[:, None], b * cosine[:, None] - a * sine[:, None]
        return jnp.concatenate([low, high], -1).astype(x.dtype)

    table = struct(LENGTH, SIZE // 2, dtype=F32)
    report = reported(turned, HEADED, table, table)
    assert not report.taken
    assert [site.operation for site in report.refused] == ["rope"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_of_complex_numbers_are_taken(interleaved: bool):
    def multiplied(x, factors):
        halves = x.astype(F32).reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
        first, second = (halves[..., 0], halves[..., 1]) if interleaved else (halves[..., 0, :], halves[..., 1, :])
        product = jax.lax.complex(first, second) * factors[:, None]
        both = [product.real, product.imag]
        return (jnp.stack(both, -1).reshape(x.shape) if interleaved else jnp.concatenate(both, -1)).astype(x.dtype)

    factors = struct(LENGTH, SIZE // 2, dtype=jnp.complex64)
    report = reported(lambda q, k, f: (multiplied(q, f), multiplied(k, f)), HEADED, HEADED, factors)
    assert [site.operation for site in report.taken] == ["rope"] and not report.refused


def smoothed(logits, labels):
    hot = 0.95 * jax.nn.one_hot(labels, CLASSES) + 0.1 / CLASSES
    return -jnp.sum(hot * jax.nn.log_softmax(logits), -1)


def with_z_loss(logits, labels):
    total = jax.nn.logsumexp(logits, -1)
    return total - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0] + 1e-4 * jnp.abs(total)


W, A, B = struct(FEATURES, CLASSES), struct(FEATURES, 16), struct(16, CLASSES)
LOGITS, LABELS = struct(512, CLASSES, dtype=F32), struct(512, dtype=jnp.int32)
INT8 = struct(FEATURES, CLASSES, dtype=jnp.int8)
OTHERS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...], str]] = {
    "label smoothing": ("cross_entropy", smoothed, (LOGITS, LABELS), "labels sum to 1.05,"),
    "soft labels": (
        "cross_entropy",
        lambda logits, labels: -jnp.sum(labels * jax.nn.log_softmax(logits), -1),
        (LOGITS, LOGITS),
        "an array is given",
    ),
    "z-loss": ("cross_entropy", with_z_loss, (LOGITS, LABELS), "is needed elsewhere, too"),
    "softmax over another axis": (
        "softmax",
        lambda x: jax.nn.softmax(x, 1),
        (struct(8, FEATURES, 128),),
        "a maximum runs over 1024 elements, and over 128 in softmax",
    ),
    "adapters behind dropout": (
        "lora_linear",
        lambda x, w, a, b, key: x @ w + kept(key, x) @ a @ b * 2,
        (ROWS, W, A, B, KEY),
        "reads several arrays where lora_linear reads x again",
    ),
    "zero points": (
        "quantized_linear",
        lambda x, w, s, z: x @ ((w.astype(F32) - z) * s).astype(BF16),
        (ROWS, INT8, struct(CLASSES, dtype=F32), struct(CLASSES, dtype=F32)),
        "has no subtraction here",
    ),
    "two numbers of 4 bits in a byte": (
        "quantized_linear",
        lambda x, w, s: x @ (jnp.concatenate([w & 15, w >> 4]).astype(BF16) * s),
        (ROWS, struct(FEATURES // 2, CLASSES, dtype=jnp.uint8), struct(CLASSES)),
        "in uint8, and in int8 in quantized_linear",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nearly_another_operation(name: str):
    operation, fn, arguments, expected = OTHERS[name]
    report = reported(fn, *arguments)
    assert any(expected in site.reason for site in report.refused if site.operation == operation), str(report)


@pytest.mark.parametrize("fast", [False, True])
def test_group_norm_is_told_once(fast: bool):
    def fn(x, scale, bias):
        groups = x.astype(F32).reshape(8, 16, 16, 32, 8)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = (
            (groups**2).mean((1, 2, 4), keepdims=True) - mean**2 if fast else groups.var((1, 2, 4), keepdims=True)
        )
        return (((groups - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape) * scale + bias).astype(BF16)

    report = reported(fn, struct(8, 16, 16, 256), struct(256, dtype=F32), struct(256, dtype=F32))
    (refused,) = report.refused
    assert refused.operation.endswith("_norm")


def test_nothing_is_compared_again_where_no_report_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    compared = []
    monkeypatch.setattr("xlafuse.fusion.reasons.nearest", lambda *args, **options: compared.append(args))
    fn, arguments, _ = NORMS["a further sum"]
    jax.eval_shape(fuse(fn), *arguments)
    assert not compared
    jax.eval_shape(fuse(fn, report=lambda report: None), *arguments)
    assert compared


def test_a_value_that_others_read_is_named():
    def fn(x, scale):
        value = rms(x, 1.0)
        return (value * scale).astype(BF16), jnp.tanh(value)

    report = reported(fn, ROWS, WIDE_SCALE, ops=["rms_norm"])
    assert any(
        "(a multiplication, float32[4096, 1024]) is needed elsewhere, too" in site.reason for site in report.refused
    ), str(report)


@pytest.mark.parametrize(("rows", "taken"), [(8, []), (4096, ["rms_norm", "rope"])])
def test_norms_and_rotations_of_a_token_are_left(rows: int, taken: list[str]) -> None:
    def fn(x, scale, query, angles):
        halves = jnp.split(query.astype(F32), 2, axis=-1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        rotated = halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin
        return rms(x, scale).astype(BF16), jnp.concatenate(rotated, -1).astype(BF16)

    shapes = struct(rows, FEATURES), WIDE_SCALE, struct(1, rows, HEADS, SIZE), struct(rows, SIZE // 2, dtype=F32)
    report = reported(fn, *shapes)
    assert sorted(site.operation for site in report.taken) == taken
    reasons = [site.reason for site in report.refused]
    assert len(reasons) == 2 - len(taken) and all("takes as long as a launch" in each for each in reasons)


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_what_the_operation_leaves_to_xla_is_never_taken(target: str):
    told: list[Report] = []
    described = load_target(target)
    with name_target_in_meshes(described), jax.sharding.use_abstract_mesh(mesh_of_one(described)):
        jax.eval_shape(fuse(lambda x, w: x @ w, report=told.append), ROWS, W)
    assert (told[0].taken, [site.operation for site in told[0].left]) == ((), ["linear"])
