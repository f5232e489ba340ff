"""Two limits of the kernels' accuracy (docs/correctness.md), by float64 programs that round as the kernels do.

The first is of attention, whose backward pass takes `dout · out` from the stored 16-bit output. The second is of
float32 sums of tensor cores, which round toward zero.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import get_op, testing

SPEC, SEED = "1x512x512x2x1x128-bfloat16-deviation_4-causal", 989940866
"""The call and the seed that were out of bounds on an H200."""


def key_gradient_errors(seed: int) -> tuple[float, ...]:
    """The largest errors of the key's gradient: XLA's, and of a program that rounds as the kernel does."""
    case = testing.make_case(
        get_op("attention"), next(s for s in get_op("attention").arg_specs if s.name == SPEC), seed
    )
    exact = testing.oracle(case)["gradient of key"]
    xla = np.asarray(testing.baseline(case)["gradient of key"], np.float64)
    query, key, value = (np.asarray(case.arguments[name], np.float64)[0] for name in ("query", "key", "value"))
    (dout,) = (np.asarray(d, np.float64)[0] for d in case.cotangents)
    tokens, heads, size = query.shape
    found = [np.zeros((tokens, size)) for _ in range(2)]
    for head in range(heads):
        scores = np.where(np.tri(tokens, dtype=bool), query[:, head] @ key[:, 0].T * size**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        stored = rounded(rounded(weights) @ value[:, 0])
        for total, out in zip(found, (stored, weights @ value[:, 0]), strict=True):
            row_sums = (dout[:, head] * out).sum(axis=1, keepdims=True)
            slopes = rounded(weights * (dout[:, head] @ value[:, 0].T - row_sums))
            total += slopes.T @ query[:, head] * size**-0.5
    return tuple(float(np.abs(got - exact[0, :, 0]).max()) for got in (xla[0, :, 0], *map(rounded, found)))


def sum_error(splits: int) -> float:
    """The largest error of a (184, 6656) x (6656, 128) product that rounds toward zero after every 16 products."""
    rng = np.random.default_rng(0)
    x = rounded(rng.standard_normal((184, 6656)))
    w = rounded(rng.standard_normal((6656, 128)) * 6656**-0.5)
    total = np.zeros((184, 128))
    for part in np.split(np.arange(6656), splits):
        own = np.zeros_like(total)
        for step in part[::16]:
            own = toward_zero(own + x[:, step : step + 16] @ w[step : step + 16])
        total += own
    return float(np.abs(total - x @ w).max())


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values."""
    return np.asarray(jnp.asarray(values, jnp.float32).astype(jnp.bfloat16), np.float64)


def toward_zero(values: np.ndarray) -> np.ndarray:
    """The float32 values next to these, toward zero."""
    nearest = values.astype(np.float32)
    too_large = np.abs(nearest.astype(np.float64)) > np.abs(values)
    return np.where(too_large, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float64)


def test_row_sums_of_the_stored_output_cost_accuracy():
    errors = [key_gradient_errors(SEED + 1000 * i) for i in range(testing.DRAWS)]
    xla, stored, exact = np.max(errors, axis=0)
    assert xla < exact < stored < 4 * xla
    np.testing.assert_allclose((stored, exact), (0.122, 0.063), atol=5e-4)


def test_one_long_sum_is_less_accurate_than_sixteen():
    whole, parts = sum_error(1), sum_error(16)
    assert 10 < whole / parts < 40
    np.testing.assert_allclose(whole, 4e-5, rtol=0.2)
