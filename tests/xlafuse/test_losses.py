"""`xlafuse.losses` beside the formulas of optax, which need not be installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import recorded_choices
from xlafuse.losses import softmax_cross_entropy_with_integer_labels

GENERATOR = np.random.default_rng(0)
LOGITS = 3 * GENERATOR.standard_normal((4, 5, 12)).astype(np.float32)
LABELS = GENERATOR.integers(0, 12, (4, 5)).astype(np.int32)
ROWS = GENERATOR.random((4, 5)) < 0.6
SOME = GENERATOR.random((4, 5, 12)) < 0.6
SOME[1, 2] = False


def losses(logits, labels, where=None):
    """-log(softmax(logits))[label] in float64, of the last axis."""
    logits = np.asarray(logits, np.float64)
    inside = np.ones(logits.shape, bool) if where is None else np.broadcast_to(where, logits.shape)
    maximum = logits.max(-1)
    total = (np.exp(logits - maximum[..., None]) * inside).sum(-1)
    with np.errstate(divide="ignore"):
        of_rows = maximum + np.log(total) - np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    return np.where(inside.any(-1), of_rows, 0)


def assert_close(ours, expected, dtype=jnp.float32):
    assert ours.dtype == dtype
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=2 * float(jnp.finfo(dtype).eps), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_integer_labels(dtype):
    logits = jnp.asarray(LOGITS, dtype)
    assert_close(softmax_cross_entropy_with_integer_labels(logits, LABELS), losses(logits, LABELS), dtype)
    with recorded_choices() as choices:
        jax.eval_shape(softmax_cross_entropy_with_integer_labels, logits, LABELS)
    assert [choice.operation for choice in choices] == ["cross_entropy"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_labels_of_any_width(dtype):
    logits = GENERATOR.standard_normal((4, 300)).astype(np.float32)
    labels = np.asarray([0, 100, 127, 77], dtype)
    assert_close(softmax_cross_entropy_with_integer_labels(logits, labels), losses(logits, labels.astype(np.int64)))


def test_labels_from_the_end_and_beyond():
    labels = np.asarray([-1, -12, 11, 12, -13, 2**31 - 1, -(2**31)], np.int32)
    ours = softmax_cross_entropy_with_integer_labels(LOGITS[0, :1].repeat(7, 0), labels)
    assert_close(ours[:3], losses(LOGITS[0, :1].repeat(3, 0), np.asarray([11, 0, 11])))
    assert np.isnan(ours[3:]).all()
    assert np.isnan(softmax_cross_entropy_with_integer_labels(LOGITS[0, :1], np.asarray([2**32 - 1], np.uint32))).all()


def test_other_axes():
    assert_close(
        softmax_cross_entropy_with_integer_labels(LOGITS.swapaxes(1, 2), LABELS, axis=1), losses(LOGITS, LABELS)
    )
    wide = LOGITS.reshape(4, 5, 3, 4)
    assert_close(softmax_cross_entropy_with_integer_labels(wide, LABELS, axis=(2, 3)), losses(LOGITS, LABELS))
    turned = wide.transpose(3, 0, 2, 1)
    assert_close(softmax_cross_entropy_with_integer_labels(turned, LABELS, axis=(2, 0)), losses(LOGITS, LABELS))
    assert_close(
        softmax_cross_entropy_with_integer_labels(turned, LABELS, (-2, 0), ROWS), losses(LOGITS, LABELS) * ROWS
    )


def test_where():
    assert_close(softmax_cross_entropy_with_integer_labels(LOGITS, LABELS, where=ROWS), losses(LOGITS, LABELS) * ROWS)
    ours = softmax_cross_entropy_with_integer_labels(LOGITS, LABELS, where=SOME)
    assert_close(ours, losses(LOGITS, LABELS, SOME))
    assert ours[1, 2] == 0
    turned = softmax_cross_entropy_with_integer_labels(LOGITS.swapaxes(1, 2), LABELS, 1, SOME.swapaxes(1, 2))
    assert_close(turned, losses(LOGITS, LABELS, SOME))


def test_gradient():
    ours = jax.grad(lambda z: softmax_cross_entropy_with_integer_labels(z, LABELS, where=ROWS).sum())(LOGITS)
    expected = (jax.nn.softmax(LOGITS) - jax.nn.one_hot(LABELS, 12)) * ROWS[..., None]
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "options", "error", "words"),
    [
        (LABELS, LABELS, {}, TypeError, "logits must be floating, got int32"),
        (LOGITS, LOGITS, {}, TypeError, "labels must be integers, got float32; of distributions, call"),
        (LOGITS, LABELS[:2], {}, ValueError, "labels must be .4, 5., one a row of logits, got .2, 5."),
        (LOGITS, LABELS, {"axis": 3}, ValueError, "axis must name some of 3 axes, each once, got 3"),
        (LOGITS, LABELS, {"axis": (1, -2)}, ValueError, "each once"),
        (LOGITS, LABELS, {"where": SOME, "implementation": "mosaic"}, NotImplementedError, "rows, not single logits"),
        (LOGITS, LABELS, {"implementation": "mosaic"}, NotImplementedError, "cross_entropy cannot run as asked"),
    ],
)
def test_bad_input(logits, labels, options, error, words):
    with pytest.raises(error, match=words):
        softmax_cross_entropy_with_integer_labels(logits, labels, **options)
