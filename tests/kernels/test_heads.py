"""The launch that normalises and rotates heads, and its gradient, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

from pallas_kernels import Norm, Rope, qkv_projection
from pallas_kernels.ops.norms.reference import rms_norm_reference
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads
from pallas_kernels.ops.rope.heads_kernel import HeadNorm
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.ops.rope.tables import angle_tables

EPSILON = 1e-3
THETA = 1e4

pytestmark = pytest.mark.usefixtures("interpreter")

CASES = [
    # rows, heads of query and key, size, dtype, which of query and key have a norm, rotated
    pytest.param(1, (3, 1), 128, "bfloat16", (True, True), True, id="one row"),
    pytest.param(5, (4, 2), 128, "bfloat16", (True, True), True, id="fewer rows than a tile of 8-byte accesses"),
    pytest.param(37, (5, 3), 64, "bfloat16", (True, True), True, id="odd heads of 64"),
    pytest.param(19, (1, 1), 256, "float16", (True, False), True, id="query norm, heads of 256"),
    pytest.param(9, (2, 1), 256, "float16", (False, True), False, id="key norm, not rotated"),
    pytest.param(40, (4, 2), 128, "bfloat16", (False, False), True, id="rotated"),
    pytest.param(23, (8, 2), 128, "bfloat16", (True, True), False, id="not rotated"),
    pytest.param(50, (2, 2), 64, "float16", (True, True), True, id="heads of 64, float16"),
    pytest.param(140, (8, 4), 128, "bfloat16", (True, True), True, id="several steps"),
    pytest.param(99, (8, 4), 128, "bfloat16", (True, True), True, id="strips of four heads"),
]


def normalised_and_rotated(products, scales, tables, size, normed):
    """Query and key in the products' dtype, unrounded for float64. tables: of cosines and sines, or None."""
    query, key = (product.reshape(1, product.shape[0], -1, size) for product in products)
    query, key = (
        _norm(heads, scale) if is_normed else heads
        for heads, scale, is_normed in zip((query, key), scales, normed, strict=True)
    )
    if tables is not None:
        query, key = rope_reference(query, key, cos=tables[0], sin=tables[1])
    return [heads.reshape(product.shape) for heads, product in zip((query, key), products, strict=True)]


def _norm(heads, scale):
    normed = rms_norm_reference(heads, scale, epsilon=EPSILON)
    assert isinstance(normed, jax.Array)
    return normed


def assert_close(got, exact, dtype, seed, *, addends=None):
    """To half a unit of the dtype, and float32 of the largest value or of the sum's addends."""
    exact = np.asarray(exact)
    eps = 0.51 * float(jnp.finfo(dtype).eps) if got.dtype == dtype else 0.0
    bound = eps * np.abs(exact) + 2e-5 * (np.abs(exact).max() if addends is None else addends)
    error = np.abs(np.asarray(got, np.float64) - exact)
    assert (error <= bound).all(), f"seed={seed}: {(error - bound).max()} too much"


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(("rows", "counts", "size", "dtype", "normed", "rotated"), CASES)
def test_heads_and_their_gradients(rows, counts, size, dtype, normed, rotated, seed):
    products, cotangents = (
        [normal(seed + 3 * j + i, (rows, count * size), dtype) for i, count in enumerate(counts)] for j in range(2)
    )
    scales = [1 + 0.2 * normal(seed + 6 + i, (size,)) for i in range(2)]
    positions = integers(seed + 8, (rows,), 0, 2000)

    def arrays(given, products=(None, None)):
        return [
            HeadArray(
                array=array,
                product=product if is_normed else None,
                scale=scale if is_normed else None,
                norm=HeadNorm(epsilon=EPSILON) if is_normed else None,
            )
            for array, product, scale, is_normed in zip(given, products, scales, normed, strict=True)
        ]

    launch = {"size": size, "name": "heads"}
    tables = angle_tables(positions, size, THETA) if rotated else None
    got, _ = launch_heads(arrays(products), tables, is_backward=False, **launch)
    back, sums = launch_heads(arrays(cotangents, products), tables, is_backward=True, **launch)
    with jax.enable_x64(True):
        wide = [jnp.asarray(product, jnp.float64) for product in products]

        @jax.jit
        def exact(products, scales):
            return normalised_and_rotated(products, scales, tables, size, normed)

        results, pullback = jax.vjp(exact, wide, [jnp.asarray(scale, jnp.float64) for scale in scales])
        gradients, scale_gradients = pullback([jnp.asarray(d, jnp.float64) for d in cotangents])
    for one, expected in zip([*got, *back], [*results, *gradients], strict=True):
        assert_close(one, expected, dtype, seed)
    for i, total in enumerate(sums):
        if normed[i]:
            assert_close(total, scale_gradients[i], dtype, seed, addends=np.sqrt(rows * counts[i]))
        else:
            assert total is None


def program(function, *operands):
    return str(jax.make_jaxpr(function)(*operands))


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(("heads", "size", "scaled"), [((3, 1), 128, True), ((2, 2), 64, True), ((2, 2), 64, False)])
def test_one_norm_of_two(heads, size, scaled, seed):
    columns = [count * size for count in (heads[0], heads[1], heads[1])]
    x = normal(seed, (7, 128), jnp.bfloat16)
    weights = [normal(seed + 1 + i, (128, n), jnp.bfloat16) / 11 for i, n in enumerate(columns)]
    bias = [normal(seed + 4 + i, (n,), jnp.bfloat16) for i, n in enumerate(columns)]
    scale = (1 + 0.2 * normal(seed + 7, (size,))).astype(jnp.bfloat16)

    def gradients(implementation):
        def total(x, weights, bias, scale):
            norm, rope = Norm(scale if scaled else None), Rope(jnp.arange(7) * 100)
            results = qkv_projection(
                x, *weights, bias=bias, head_size=size, rope=rope, k_norm=norm, implementation=implementation
            )
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results)

        return jax.grad(total, argnums=(0, 1, 2, 3))(x, weights, bias, scale)

    for got, exact in zip(*(jax.tree.leaves(gradients(name)) for name in ("mosaic", "xla")), strict=True):
        error = jnp.linalg.norm((got - exact).astype(jnp.float32))
        assert error <= 0.02 * jnp.linalg.norm(exact.astype(jnp.float32)), f"seed={seed}"


def test_the_gradient_computes_no_product_again():
    x, *weights = (normal(i, shape, jnp.bfloat16) for i, shape in enumerate([(8, 128), *3 * [(128, 128)]]))

    def project(x, *weights):
        norm = Norm(None)
        return qkv_projection(x, *weights, head_size=64, q_norm=norm, k_norm=norm, implementation="mosaic")

    assert program(project, x, *weights).count("mpmd_map[") == 2  # the products, and the heads
    _, pullback = jax.vjp(project, x, *weights)
    backward = program(pullback, project(x, *weights))
    assert backward.count("mpmd_map[") == 1
    assert backward.count("dot_general[") == 4  # one for each weight, and one for x


def test_a_scale_after_the_rounding_of_heads(seed):
    x, identity = normal(seed, (40, 128), jnp.bfloat16), jnp.eye(128, dtype=jnp.bfloat16)
    scale = (1 + 0.3 * normal(seed + 1, (128,))).astype(x.dtype)
    norms = {f"{name}_norm": Norm(scale, rounds_before_scale=name == "q") for name in "qk"}
    query, key, _ = qkv_projection(x, *[identity] * 3, head_size=128, **norms, implementation="mosaic")
    for heads, rounds in ((query, True), (key, False)):  # the product is x as it is
        expected = rms_norm_reference(x, scale, rounds_before_scale=rounds)
        assert np.mean(np.asarray(heads[:, 0] == expected)) > 0.99, f"seed={seed}"
    assert np.mean(np.asarray(query == key)) < 0.9
