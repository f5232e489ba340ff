"""What is particular to embeddings: indices out of range, long runs of equal ones, and the gradient's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

from pallas_kernels import embedding, recorded_choices
from pallas_kernels.ops.embedding.config import EmbeddingConfig
from pallas_kernels.ops.embedding.mosaic_gpu_vjp import table_gradient

MODES = ("fill", "clip", "promise_in_bounds")


def exact_sums(dy, ids, rows):
    """The table's gradient in float64; indices outside the table add nothing."""
    ids, inside = np.asarray(ids), (np.asarray(ids) >= 0) & (np.asarray(ids) < rows)
    sums = np.zeros((rows, dy.shape[-1]))
    np.add.at(sums, ids[inside], np.asarray(dy, np.float64)[inside])
    return sums


def as_written(table, ids, mode):
    return table[ids] if mode == "promise_in_bounds" else jnp.take(table, ids, axis=0, mode=mode)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("mode", MODES)
def test_indices_out_of_range_mean_what_they_mean_in_jax(seed, mode, implementation):
    table, dy = normal(seed, (4, 128)), normal(seed + 1, (7, 128))
    ids = jnp.array([0, -1, 4, -5, 2**31 - 1, -(2**31), 2])
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
        EmbeddingConfig(section=8, section_columns=128, row_columns=256, bytes_at_once=1),
        EmbeddingConfig(rows=2, section_columns=256, row_columns=128),
    ],
)
def test_configurations_agree(seed, config):
    """Strips of columns, the last of which overlap, and several rows of the table a block."""
    ids, dy = integers(seed, (50,), 0, 8), normal(seed, (50, 384), jnp.bfloat16)
    got = table_gradient(dy, ids, 7, jnp.float32, config=config)
    np.testing.assert_allclose(got, exact_sums(dy, ids, 7), rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_sums_are_float32_in_a_fixed_order(seed):
    """Sums of 600 ones, which in bfloat16 stop at 256; and the same bits whatever else is summed."""
    ids = jnp.zeros(600, jnp.int32)
    _, pull = jax.vjp(lambda table: embedding(table, ids, implementation="mosaic"), jnp.ones((2, 128), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(pull(jnp.ones((600, 128), jnp.bfloat16))[0], np.float32)[:, 0], [600, 0])
    dy = normal(seed, (100, 128))
    first = table_gradient(dy, jnp.zeros(100, jnp.int32), 1, jnp.float32)
    np.testing.assert_array_equal(table_gradient(dy, jnp.zeros(100, jnp.int32), 3, jnp.float32)[0], first[0])


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
    ("shape", "entries", "taken"), [((9, 512), 512, "mosaic"), ((9, 512), 3, "xla"), ((9, 64), 8192, "xla")]
)
def test_many_values_take_the_kernels(shape, entries, taken):
    with recorded_choices() as choices:
        jax.eval_shape(embedding, jnp.ones(shape), jnp.zeros(entries, jnp.int32))
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
        ({"implementation": "mosaic"}, NotImplementedError, "rows have 2 features, a warpgroup shares at least 128"),
    ],
)
@pytest.mark.usefixtures("interpreter")
def test_arguments_that_do_not_belong_together(arguments, error, message):
    with pytest.raises(error, match=message):
        embedding(**{"table": jnp.ones((4, 2)), "ids": jnp.zeros(3, jnp.int32), **arguments})
