"""Products of odd sizes that no operation takes: `fuse` pads them where that pays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import xlafuse
from hlo_analysis import analyze, capture
from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.regressions import costs_more

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, FEATURES, VOCABULARY = 4096, 1024, 30521


def array(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, W, TABLE = array(ROWS, FEATURES), array(FEATURES, VOCABULARY), array(VOCABULARY, FEATURES)
BIAS, LABELS = array(VOCABULARY), array(ROWS, dtype=jnp.int32)


def loss(logits, labels):
    logits = logits.astype(F32)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0])


def reported(fn, *arguments, **options):
    """The report of `fuse` for the H200."""
    told, target = [], load_target("h200")
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        jax.eval_shape(xlafuse.fuse(fn, report=told.append, **options), *arguments)
    return told[0]


def notes(fn, *arguments, **options):
    return [site.note for site in reported(fn, *arguments, **options).taken if site.note]


PADDED = {
    "a head": (lambda x, w: jax.nn.softmax((x @ w).astype(F32)).sum(-1), (X, W), "columns"),
    "with a bias": (lambda x, w, b: jnp.max(x @ w + b, -1), (X, W, BIAS), "columns"),
    "in float32": (
        lambda x, w: jnp.max(jnp.matmul(x, w, preferred_element_type=F32), -1),
        (X, W),
        "columns",
    ),
    "of a table": (lambda x, t: jnp.max(x @ t.T, -1), (X, TABLE), "columns in gradients"),
    "of a table cast": (
        lambda x, t: jnp.max(x @ t.astype(BF16).T, -1),
        (X, array(VOCABULARY, FEATURES, dtype=F32)),
        "columns in gradients",
    ),
    "of soft tokens": (lambda p, t: jnp.tanh(p @ t), (array(ROWS, VOCABULARY), TABLE), "features"),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_product_is_padded(name):
    fn, arguments, kind = PADDED[name]
    assert notes(fn, *arguments) == [f"product padded from 30521 to 30528 {kind}"]
    assert notes(fn, *arguments, skip={"padded_product"}) == []
    assert notes(fn, *arguments, ops=["padded_product"]) == notes(fn, *arguments)
    assert notes(fn, *arguments, ops=["linear"]) == []


LEFT = {
    "an even size": (lambda x, w: jnp.max(x @ w, -1), (X, array(FEATURES, 30528))),
    "few rows": (lambda x, w: jnp.max(x @ w, -1), (array(64, FEATURES), W)),
    "float32": (
        lambda x, w: jnp.max(x @ w, -1),
        (array(ROWS, FEATURES, dtype=F32), array(FEATURES, VOCABULARY, dtype=F32)),
    ),
    "sorted logits": (lambda x, w: jax.lax.top_k(x @ w, 5), (array(1024, 512), array(512, VOCABULARY))),
    "one-hot rows": (
        lambda y, t: jnp.tanh(jax.nn.one_hot(y, VOCABULARY, dtype=BF16) @ t),
        (LABELS, TABLE),
    ),
    "one product a head": (
        lambda q, k: jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k)).sum(-1),
        (array(16, 2001, 512), array(16, 2001, 512)),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_product_is_left(name):
    fn, arguments = LEFT[name]
    assert notes(fn, *arguments) == []


def test_one_that_an_operation_takes_is_left_to_it():
    report = reported(lambda x, w, y: loss(x @ w, y), X, W, LABELS)
    assert [site.operation for site in report.taken] == ["linear_cross_entropy"]


def test_a_kernel_that_would_copy_what_is_padded_is_left_out():
    """The logits have another reader, so that no operation takes product and loss together."""

    def head(x, w, y):
        logits = x @ w
        return loss(logits, y), jnp.argmax(logits, -1)

    report = reported(head, X, W, LABELS)
    assert [site.operation for site in report.taken] == ["padded_product"]
    (reason,) = [site.reason for site in report.refused if site.operation == "cross_entropy"]
    assert "padded product" in reason
    plain = reported(head, X, W, LABELS, skip={"padded_product"})
    assert not any("padded product" in site.reason for site in plain.refused)


def test_a_site_is_told_in_place_of_the_one_that_xla_would_compute():
    report = reported(lambda x, w: jnp.max(x @ w, -1), X, W)
    assert not report.left
    (text,) = map(str, report.taken)
    assert text.endswith(
        "padded_product of bfloat16[4096,1024] by bfloat16[1024,30521]: product padded from 30521 to 30528 columns"
    )


@pytest.fixture(scope="module")
def compiled():
    """The gradient of a head with a table, plain and fused without kernels for the loss."""

    def step(x, t, y):
        return loss(x @ t.T, y)

    fused = xlafuse.fuse(step, ops=["padded_product"])
    given = (X, TABLE, LABELS)
    functions = [jax.value_and_grad(each, argnums=(0, 1)) for each in (step, fused)]
    return [analyze(capture(each, *given, target="h200", autotune=None)) for each in functions]


def test_the_gradient_s_products_are_aligned_and_the_logits_copied_no_more_often(compiled):
    plain, fused = compiled
    logits = 2 * ROWS * VOCABULARY
    sizes = [
        sorted({size for value in (*each.inputs, *each.outputs) for size in _sizes(value.shape) if size > 30000})
        for each in fused.launches
        if each.kind == "triton_gemm"
    ]
    assert sizes == [[30528]] * 3
    written = [sum(launch.bytes_written >= logits for launch in each.launches) for each in compiled]
    assert written[0] == written[1]
    weights = 2 * FEATURES * VOCABULARY
    assert fused.traffic.bytes - plain.traffic.bytes < 4.1 * weights
    assert fused.estimated_us < 0.85 * plain.estimated_us


def _sizes(shape):
    return [int(each) for each in shape[shape.index("[") + 1 : shape.index("]")].split(",") if each]


def test_more_bytes_that_save_much_time_cost_nothing():
    assert costs_more((110e6, 100.0), (100e6, 105.0))
    assert not costs_more((110e6, 100.0), (100e6, 115.0))
    assert costs_more((100e6, 105.0), (110e6, 100.0))
