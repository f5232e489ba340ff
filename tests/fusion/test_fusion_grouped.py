"""Grouped products, `lax.ragged_dot`, followed by an activation or a gate."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from rewriting import normal

import xlafuse

ROWS, FEATURES, HIDDEN, GROUPS = 48, 128, 192, 3
X = normal((ROWS, FEATURES), seed=1).astype(jnp.bfloat16)
GATE, UP = (normal((GROUPS, FEATURES, HIDDEN), seed=seed).astype(jnp.bfloat16) / 8 for seed in (2, 3))
DOWN = normal((GROUPS, HIDDEN, FEATURES), seed=4).astype(jnp.bfloat16) / 8
SIZES = jnp.asarray([20, 0, 25])


def wide(x):
    return x.astype(jnp.float32)


@pytest.mark.parametrize("is_wide", [True, False])
def test_experts(sites, is_wide):
    def experts(x, gate, up, down, sizes):
        gate, up = lax.ragged_dot(x, gate, sizes), lax.ragged_dot(x, up, sizes)
        hidden = (jax.nn.silu(wide(gate)) * wide(up)).astype(x.dtype) if is_wide else jax.nn.silu(gate) * up
        return lax.ragged_dot(hidden, down, sizes, preferred_element_type=x.dtype)

    assert sites(experts, X, GATE, UP, DOWN, SIZES) == ["grouped_gated_linear", "grouped_linear"]


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.relu])
def test_an_activation(sites, activation):
    told = []
    assert sites(lambda x, w, s: activation(lax.ragged_dot(x, w, s)), X, UP, SIZES, told=told.append) == [
        "grouped_linear"
    ]
    assert told[0].taken[0].options["activation"] in ("gelu_tanh", "relu")


def test_gate_and_up_of_other_groups_are_two_products(sites):
    def apart(x, gate, up, sizes):
        return jax.nn.silu(lax.ragged_dot(x, gate, sizes)) * lax.ragged_dot(x, up, sizes[::-1])

    assert sites(apart, X, GATE, UP, SIZES) == ["grouped_linear", "grouped_linear"]


def test_gate_and_up_of_rows_in_other_orders_are_two_products(sites):
    def apart(x, gate, up, sizes):
        return jax.nn.silu(lax.ragged_dot(x, gate, sizes)) * lax.ragged_dot(x[::-1], up, sizes)

    assert sites(apart, X, GATE, UP, SIZES) == ["grouped_linear", "grouped_linear"]


def test_rows_that_are_not_sorted_are_left(sites):
    """Each row has the weights of its own expert: no group has consecutive rows."""
    experts = jnp.arange(ROWS) % GROUPS

    def each(x, gate, up, experts):
        products = [jnp.einsum("rf,rfo->ro", x, w[experts], preferred_element_type=x.dtype) for w in (gate, up)]
        return jax.nn.silu(products[0]) * products[1]

    def masked(x, gate, experts):
        of_all = jnp.einsum("rf,gfo->gro", x, gate, preferred_element_type=x.dtype)
        return jnp.sum(jnp.where((experts == jnp.arange(GROUPS)[:, None])[..., None], of_all, 0), axis=0)

    assert "grouped_gated_linear" not in sites(each, X, GATE, UP, experts)
    assert "grouped_linear" not in sites(masked, X, GATE, experts)


def test_bias_of_rows_of_no_group_is_not_dropped(sites):
    """`jnp.repeat` gives rows behind the last group the last one's bias; the operation would make them zero."""

    def biased(x, w, bias, sizes):
        return lax.ragged_dot(x, w, sizes) + jnp.repeat(bias, sizes, axis=0, total_repeat_length=ROWS)

    bias = normal((GROUPS, HIDDEN), seed=7).astype(jnp.bfloat16)
    assert sites(biased, X, UP, bias, SIZES) == ["grouped_linear"]


def test_under_vmap_each_call_is_taken():
    told = []
    many = [jnp.stack([each, each]) for each in (X, UP, SIZES)]
    found = jax.vmap(xlafuse.fuse(lax.ragged_dot, report=told.append))(*many)
    assert [each.operation for each in told[0].taken] == ["grouped_linear"]
    assert jnp.array_equal(found[1], lax.ragged_dot(X, UP, SIZES))


@pytest.mark.parametrize(
    "options", [{"precision": "highest"}, {"preferred_element_type": jnp.float32}], ids=["exact", "float32"]
)
def test_what_the_kernels_would_round_is_left(sites, options):
    assert sites(lambda x, w, s: lax.ragged_dot(x, w, s, **options), X, UP, SIZES) == []


def test_groups_of_rows_that_are_contracted_are_left(sites):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    assert sites(lambda x, y, s: lax.ragged_dot_general(x, y, s, numbers), X, X, SIZES) == []


def test_one_product_for_gate_and_up(sites):
    def experts(x, both, sizes):
        gate, up = jnp.split(lax.ragged_dot(x, both, sizes), 2, axis=1)
        return jax.nn.silu(gate) * up

    assert sites(experts, X, jnp.concatenate([GATE, UP], 2), SIZES)[-1] == "grouped_linear"


@pytest.mark.parametrize("loop", ["scan", "remat"])
def test_experts_of_each_layer(sites, loop):
    def layer(x, weights):
        gate, up, down = weights
        hidden = jax.nn.silu(lax.ragged_dot(x, gate, SIZES)) * lax.ragged_dot(x, up, SIZES)
        return x + lax.ragged_dot(hidden, down, SIZES), None

    def layers(x, *weights):
        if loop == "scan":
            return lax.scan(layer, x, [jnp.stack([each, each]) for each in weights])[0]
        return jax.checkpoint(layer)(x, weights)[0]

    assert sites(layers, X, GATE, UP, DOWN) == ["grouped_gated_linear", "grouped_linear"]


def test_weights_contracted_along_their_last_axis(sites):
    """As in the gradient of the rows, and where weights are stored so."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    told = []

    def product(x, w, s):
        return jax.nn.silu(lax.ragged_dot_general(x, w, s, numbers))

    assert sites(product, X, DOWN, SIZES, told=told.append) == ["grouped_linear"]
    assert told[0].taken[0].options["transpose"]


def test_weights_that_are_transposed(sites):
    assert sites(lambda x, w, s: lax.ragged_dot(x, w.swapaxes(1, 2), s), X, DOWN, SIZES) == ["grouped_linear"]


def maxtext(inputs, router, w0, w1, wo, *, chosen=2, tile=64):
    """MaxText's `sparse_matmul` with `ragged_dot`, retold: sorted tokens, padded rows, names for remat."""
    dtype, experts = inputs.dtype, w0.shape[0]
    tokens = inputs.reshape(-1, inputs.shape[-1])
    weights, selected = lax.top_k(tokens @ router, chosen)
    weights = jax.nn.softmax(wide(weights), axis=-1).astype(dtype)
    order = jnp.argsort(jnp.ravel(selected))
    x = jnp.take(tokens, indices=order // chosen, axis=0).astype(dtype)
    sizes = jnp.bincount(jnp.ravel(selected), length=experts)

    def gmm(x, kernel):
        rows = x.shape[0]
        if padding := -rows % tile:
            x = lax.pad(wide(x), 0.0, [(0, padding, 0), (0, 0, 0)])
        y = lax.ragged_dot(x.astype(dtype), kernel.astype(dtype), sizes, preferred_element_type=dtype)
        return y[:rows] if padding else y

    gate, up = checkpoint_name(gmm(x, w0), "mlpwi_0"), checkpoint_name(gmm(x, w1), "mlpwi_1")
    y = checkpoint_name(gmm(jnp.multiply(jax.nn.silu(gate), up), wo), "mlpwo")
    y = jnp.take(y, indices=jnp.argsort(order), axis=0).reshape(-1, chosen, y.shape[-1])
    return jnp.einsum("BKE,BK->BE", wide(y), wide(weights)).reshape(inputs.shape).astype(dtype)


@pytest.mark.parametrize("length", [32, 24], ids=["whole tiles", "padded rows"])
def test_maxtext(sites, length):
    """The names and the padding leave gate and up apart."""
    router = normal((FEATURES, GROUPS), seed=5).astype(jnp.bfloat16)
    x = normal((2, length, FEATURES), seed=6).astype(jnp.bfloat16)
    taken = sites(maxtext, x, router, GATE, UP, DOWN, checks=False)  # rounding may send a token elsewhere
    assert taken.count("grouped_linear") == 3


def repeated(bias, sizes, rows):
    return jnp.repeat(bias, sizes, axis=0, total_repeat_length=rows)


def indexed(bias, sizes, rows):
    return bias[jnp.repeat(jnp.arange(GROUPS), sizes, total_repeat_length=rows)]


def routed(x, scores, *weights, chosen=2, of_rows=repeated, sizes_of=None):
    """Experts with biases, as MaxText and others write them: each token's rows follow those of the expert before."""
    gate, up, down, *biases = weights
    ids = jnp.ravel(lax.top_k(scores, chosen)[1])
    sizes = sizes_of(ids) if sizes_of else jnp.bincount(ids, length=GROUPS)
    rows = jnp.take(x, jnp.argsort(ids) // chosen, axis=0)
    own = [of_rows(bias, sizes, rows.shape[0]) for bias in biases]
    hidden = jax.nn.silu(lax.ragged_dot(rows, gate, sizes) + own[0]) * (lax.ragged_dot(rows, up, sizes) + own[1])
    return lax.ragged_dot(hidden, down, sizes) + own[2]


SCORES = normal((ROWS, GROUPS), seed=5).astype(jnp.bfloat16)
BIASES = [normal((GROUPS, each), seed=6 + i).astype(jnp.bfloat16) for i, each in enumerate((HIDDEN, HIDDEN, FEATURES))]


@pytest.mark.parametrize("of_rows", [repeated, indexed])
def test_biases_of_rows_that_all_have_a_group(sites, of_rows):
    told = []
    found = sites(partial(routed, of_rows=of_rows), X, SCORES, GATE, UP, DOWN, *BIASES, told=told.append)
    assert found == ["grouped_gated_linear", "grouped_linear"]
    gated, plain = map(str, told[0].taken)
    assert "bias_gate=" in gated and "bias_up=" in gated and "bias=" in plain


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    "change",
    [
        {"sizes_of": lambda ids: jnp.bincount(ids + 1, length=GROUPS)},  # one in three is of no group
        {"sizes_of": lambda ids: jnp.bincount(ids[1:], length=GROUPS)},
        {"sizes_of": lambda ids: jnp.bincount(jnp.where(ids < 1, GROUPS, ids), length=GROUPS)},
        {"of_rows": lambda bias, sizes, rows: repeated(bias, sizes[::-1], rows)},
        {"of_rows": lambda bias, sizes, rows: repeated(bias[::-1], sizes, rows)[::-1]},
        {"of_rows": lambda bias, sizes, rows: indexed(jnp.roll(bias, 1, 1), sizes - 1, rows)},
    ],
    ids=["shifted", "one row less", "none for some", "other sizes", "other rows", "smaller sizes"],
)
def test_biases_of_other_rows_are_added_apart(sites, change):
    told = []
    assert "grouped_linear" in sites(partial(routed, **change), X, SCORES, GATE, UP, DOWN, *BIASES, told=told.append)
    assert not any("bias" in str(each) for each in told[0].taken)


def test_scores_of_more_experts_than_groups_leave_rows_of_no_group(sites):
    scores = jnp.concatenate([SCORES, SCORES[:, :1] + 4], axis=1)
    told = []
    sites(routed, X, scores, GATE, UP, DOWN, *BIASES, told=told.append)
    assert not any("bias" in str(each) for each in told[0].taken)
