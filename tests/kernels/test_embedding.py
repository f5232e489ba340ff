"""What is particular to embeddings: indices out of range, long runs of equal ones, and the gradient's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

from pallas_kernels import embedding, recorded_choices
from pallas_kernels.ops.embedding.api import one_hot_gradient
from pallas_kernels.ops.embedding.config import EmbeddingConfig
from pallas_kernels.ops.embedding.mosaic_gpu_vjp import _sorted, table_gradient

MODES = ("fill", "clip", "promise_in_bounds")


def exact_sums(dy, ids, rows):
    """The table's gradient in float64; indices outside the table add nothing."""
    ids, inside = np.asarray(ids), (np.asarray(ids) >= 0) & (np.asarray(ids) < rows)
    sums = np.zeros((rows, dy.shape[-1]))
    np.add.at(sums, ids[inside], np.asarray(dy, np.float64)[inside])
    return sums


def as_written(table, ids, mode):
    return table[ids] if mode == "promise_in_bounds" else jnp.take(table, ids, axis=0, mode=mode)


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("rows", [4, 17], ids=["product", "kernels"])
@pytest.mark.parametrize("mode", MODES)
def test_indices_out_of_range_mean_what_they_mean_in_jax(seed, mode, rows, implementation):
    table, dy = normal(seed, (rows, 128)), normal(seed + 1, (7, 128))
    ids = jnp.array([0, -1, rows, -rows - 1, 2**31 - 1, -(2**31), 2])
    want, pull = jax.vjp(lambda table: as_written(table, ids, mode), table)
    got, pull_ours = jax.vjp(lambda table: embedding(table, ids, mode=mode, implementation=implementation), table)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(pull_ours(dy)[0], pull(dy)[0], rtol=1e-6, atol=1e-6, err_msg=f"seed={seed}")


SECTION = EmbeddingConfig().section
RUNS = {
    "all equal": lambda n, rng: np.full(n, 1),
    "two, at random": lambda n, rng: rng.integers(0, 2, n),
    "one run a section": lambda n, rng: np.arange(n) // SECTION % 5,
    "runs from the middle of a section to the middle of another": lambda n, rng: (np.arange(n) + 7) // 45 % 5,
    "all different but for one": lambda n, rng: np.minimum(np.arange(n), 4),
    "all outside": lambda n, rng: np.full(n, 5),
    "some outside": lambda n, rng: rng.integers(0, 6, n),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("entries", [1, SECTION, 5 * SECTION, 5 * SECTION + 3])
@pytest.mark.parametrize("kind", RUNS)
def test_runs_of_any_length_and_place(seed, entries, kind):
    ids = np.random.default_rng(seed).permutation(RUNS[kind](entries, np.random.default_rng(seed)))
    dy = normal(seed, (entries, 128))
    got = jax.jit(table_gradient, static_argnums=(2, 3))(dy, jnp.asarray(ids, jnp.int32), 5, jnp.float32)
    np.testing.assert_allclose(got, exact_sums(dy, ids, 5), rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "config",
    [
        EmbeddingConfig(section=4, rows=3),
        EmbeddingConfig(section=8, columns=128, bytes_at_once=1),
        EmbeddingConfig(rows=2, columns=256),
    ],
)
def test_configurations_agree(seed, config):
    """Strips of columns, the last of which overlap, and several rows of the table a block."""
    ids, dy = integers(seed, (50,), 0, 8), normal(seed, (50, 384), jnp.bfloat16)
    got = table_gradient(dy, ids, 7, jnp.float32, config=config)
    np.testing.assert_allclose(got, exact_sums(dy, ids, 7), rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rows", [2, 257], ids=["product", "kernels"])
def test_sums_are_float32(rows):
    """300 ones, which in bfloat16 add up to 256."""
    ids, dy = jnp.ones(300, jnp.int32), jnp.ones((300, 128), jnp.bfloat16)
    _, pull = jax.vjp(lambda table: embedding(table, ids, implementation="mosaic"), jnp.ones((rows, 128), jnp.bfloat16))
    gradient = np.asarray(pull(dy)[0], np.float32)
    np.testing.assert_array_equal(gradient[:3, 0], [0, 300, 0][:rows])
    assert not gradient[2:].any()


@pytest.mark.usefixtures("interpreter")
def test_the_order_of_a_sum_is_fixed(seed):
    """The same bits, whatever else is summed, also if index and place do not fit into 32 bits."""
    dy, ids = normal(seed, (100, 128)), jnp.zeros(100, jnp.int32)
    first = table_gradient(dy, ids, 1, jnp.float32)[0]
    np.testing.assert_array_equal(table_gradient(dy, ids, 3, jnp.float32)[0], first)
    for rows in (2**32 // 100 - 1, 2**32 // 100):
        given = integers(seed, (100,), rows - 3, rows)
        (keys, order), expected = _sorted(given, rows), np.argsort(given, stable=True)
        np.testing.assert_array_equal(order, expected, err_msg=f"seed={seed}")
        np.testing.assert_array_equal(keys, given[expected], err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_rows_by_a_product_are_what_the_kernels_compute(seed, dtype):
    dy, ids = normal(seed, (90, 128), dtype), integers(seed, (90,), 0, 4)
    narrow = jax.vjp(lambda table: embedding(table, ids, implementation="mosaic"), jnp.ones((3, 12), dtype))[1]
    np.testing.assert_allclose(
        np.float32(narrow(dy[:, :12])[0]), exact_sums(dy[:, :12], ids, 3), rtol=1e-2, atol=1e-2, err_msg=f"seed={seed}"
    )
    sums = [each(dy, ids, 3, jnp.float32) for each in (one_hot_gradient, table_gradient)]
    np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_rows_of_another_dtype_have_gradients_of_the_tables(seed, implementation):
    """A float32 table read in bfloat16: sums of bfloat16 rows, which are never rounded to it."""
    table, ids = normal(seed, (3, 128)), integers(seed, (4, 20), 0, 3)
    dy = normal(seed + 1, (4, 20, 128), jnp.bfloat16)
    y, pull = jax.vjp(lambda table: embedding(table, ids, dtype="bfloat16", implementation=implementation), table)
    np.testing.assert_array_equal(y, table.astype(jnp.bfloat16)[ids])
    (gradient,) = pull(dy)
    assert gradient.dtype == jnp.float32
    exact = exact_sums(dy.reshape(-1, 128), ids.reshape(-1), 3)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_indices_of_any_integer_dtype(dtype):
    """Of 8 bits for a table of 300 rows; of more than int32 holds, which are out of range as others are."""
    with jax.enable_x64(True):
        table, most = jnp.arange(300.0, dtype="float32")[:, None], jnp.iinfo(dtype).max
        np.testing.assert_array_equal(embedding(table, jnp.array([0, 100], dtype)), [[0], [100]])
        if most > 300:
            assert np.isnan(embedding(table, jnp.array([most, 2**31], dtype))).all()
        if jnp.iinfo(dtype).min < 0:
            np.testing.assert_array_equal(embedding(table, jnp.array([-1], dtype)), [[299]])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("rows", "features", "entries", "dtype", "taken"),
    [
        (9000, 512, 512, "bfloat16", "mosaic"),
        (9000, 512, 511, "bfloat16", "xla"),
        (9000, 64, 8192, "bfloat16", "xla"),
        (32, 12, 262144, "bfloat16", "mosaic"),
        (9000, 512, 8192, "float32", "xla"),
        (16, 512, 8192, "float32", "mosaic"),
        (17, 512, 8192, "float32", "xla"),
    ],
)
def test_many_values_of_16_bits_and_few_rows_take_the_kernels_or_a_product(rows, features, entries, dtype, taken):
    with recorded_choices() as choices:
        jax.eval_shape(embedding, jnp.ones((rows, features), dtype), jnp.zeros(entries, jnp.int32))
    assert choices[0].taken == taken


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ids": jnp.ones(3)}, TypeError, "ids must be integers, got float32"),
        ({"table": jnp.ones((0, 2))}, ValueError, r"with a row, got \(0, 2\)"),
        ({"table": jnp.ones(4)}, ValueError, r"\(rows, features\) with a row, got \(4,\)"),
        ({"table": jnp.ones((4, 2), "int32")}, TypeError, "table must be floating, got int32"),
        ({"mode": "wrap"}, ValueError, "mode must be one of 'fill', 'clip', 'promise_in_bounds', got 'wrap'"),
        ({"dtype": "int32"}, TypeError, "dtype must be floating, got int32"),
        (
            {"table": jnp.ones((17, 2)), "implementation": "mosaic"},
            NotImplementedError,
            "rows have 2 features, a warpgroup shares at least 128",
        ),
    ],
)
@pytest.mark.usefixtures("interpreter")
def test_arguments_that_do_not_belong_together(arguments, error, message):
    with pytest.raises(error, match=message):
        embedding(**{"table": jnp.ones((4, 2)), "ids": jnp.zeros(3, jnp.int32), **arguments})
