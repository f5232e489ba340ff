"""Operations on many short rows, where a warp holds whole rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import ArgSpec, ArraySpec, get_op, rms_norm, testing
from pallas_kernels.primitives import rows
from pallas_kernels.primitives.rows import short_rows_at_once, split_short_rows

KEY = ArraySpec(shape=(2,), dtype="uint32", fill="integers")


def array(*shape: int, dtype: str = "bfloat16") -> ArraySpec:
    return ArraySpec(shape=shape, dtype=dtype)


def mask(*shape: int) -> ArraySpec:
    return ArraySpec(shape=shape, dtype="bool", fill="integers")


CASES = {
    "rms_norm": [
        {"x": array(35, 128), "scale": array(128)},
        {"x": array(24, 201), "scale": array(201), "residual": array(24, 201)},
    ],
    "layer_norm": [
        {"x": array(38, 136), "scale": array(136), "bias": array(136)},
        {"x": array(17, 384, dtype="float32"), "residual": array(17, 384, dtype="float32")},
        {"x": array(17, 1000)},
    ],
    "dropout_residual_norm": [
        {"x": array(19, 256), "residual": array(19, 256), "scale": array(256), "rate": 0.3, "key": KEY},
    ],
    "softmax": [
        {"x": array(33, 136), "scale": 0.3},
        {"x": array(18, 896)},
        {"x": array(2, 20, 144, dtype="float32"), "is_causal": True, "mask": mask(144)},
        {"x": array(2, 3, 8, 128), "mask": mask(2, 1, 8, 128)},
        {"x": array(2, 16, 128), "mask": array(2, 1, 128, dtype="float32")},
        {"x": array(3, 7, 128), "mask": mask(7, 128)},
        {"x": array(2, 2, 31, 128), "mask": mask(2, 1, 31, 128)},
        {"x": array(3, 18, 128), "mask": mask(3, 1, 128)},
    ],
    "cross_entropy": [
        {"logits": array(35, 136), "label_smoothing": 0.1},
        {"logits": array(20, 200, dtype="float32"), "reduction": "mean", "z_loss": 1e-3},
    ],
}


def with_labels(arguments: dict) -> dict:
    if "logits" not in arguments:
        return arguments
    count, vocabulary = arguments["logits"].shape
    labels = ArraySpec(shape=(count,), dtype="int32", fill="integers", minimum=-1, maximum=vocabulary)
    return {"logits": arguments["logits"], "labels": labels} | arguments


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [pytest.param(name, each, id=f"{name}-{i}") for name, cases in CASES.items() for i, each in enumerate(cases)],
)
def test_values_and_gradients(name, arguments, seed, monkeypatch):
    monkeypatch.setattr(rows, "MANY_ROWS", 16)
    testing.check(get_op(name), ArgSpec(name="short rows", arguments=with_labels(arguments)), "mosaic", seed=seed)


@pytest.mark.usefixtures("interpreter")
def test_vmap_of_values_and_gradients(seed, monkeypatch):
    monkeypatch.setattr(rows, "MANY_ROWS", 16)
    x, scale = normal(seed, (2, 21, 128)), normal(seed + 1, (128,))

    def loss(x, scale, implementation):
        return jnp.sum(jnp.sin(rms_norm(x, scale, implementation=implementation)))

    got, expected = (
        jax.vmap(jax.value_and_grad(lambda x, s: loss(x, s, name), (0, 1)), (0, None))(x, scale)  # noqa: B023
        for name in ("mosaic", "xla")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"seed={seed}")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("features", [32, 100, 128, 136, 201, 384, 768])
def test_pieces_cover_a_row_once(features, itemsize):
    counted = [0] * features
    pieces = split_short_rows(features, itemsize, rows=8)
    for piece in pieces:
        assert piece.shape == pieces[0].shape
        assert features % piece.vector == 0, "every row must start on a multiple of the access"
        assert piece.offset % piece.vector == 0
        for column in range(piece.offset + piece.repeated, piece.offset + piece.size):
            counted[column] += 1
    assert counted == [1] * features


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((65536, 128, 2), 16),
        ((256, 256, 2), 8),
        ((256, 257, 2), 4),
        ((256, 768, 2), 4),
        ((256, 768, 4), 0),
        ((255, 128, 2), 0),
    ],
)
def test_rows_at_once(shape, expected):
    assert short_rows_at_once(shape[:2], shape[2]) == expected
