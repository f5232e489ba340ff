"""Ways to write operations that public models have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from rewriting import normal

from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.fusion import fuse
from xlafuse.fusion.layouts import RULES
from xlafuse.fusion.plan import Plan, make_plan
from xlafuse.fusion.program import FusedProgram, NothingFusedError
from xlafuse.fusion.spellings import Choices
from xlafuse.models.config import get_preset
from xlafuse.models.functional import block_function

BF16 = jnp.bfloat16
Q, K, V = normal((2, 8, 4, 16), BF16), normal((2, 8, 2, 16), BF16, 1), normal((2, 8, 2, 16), BF16, 2)
SEEN = jnp.tril(jnp.ones((8, 8), bool))
LOGITS, LABELS = 4 * normal((2, 8, 48)), jnp.arange(16, dtype=jnp.int32).reshape(2, 8) * 5 % 48


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def scores_in_float32(q, k, v, seen):
    """The product is in float32, and the query is scaled before it."""
    k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", wide(q) / jnp.sqrt(16).astype(wide(q).dtype), wide(k))
    bias = jnp.where(seen, 0.0, jnp.finfo(q.dtype).min).astype(q.dtype)
    weights = jax.nn.softmax(scores + bias[None, None]).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def test_attention_with_scores_of_widened_arrays(sites):
    told = []
    assert sites(scores_in_float32, Q, K, V, SEEN, told=told.append) == ["attention"]
    (site,) = told[0].taken
    assert site.options == {"scale": 0.25, "mask_value": pytest.approx(float(jnp.finfo(BF16).min))}
    assert site.arrays["query"] == "bfloat16[2,8,4,16]"


def test_attention_is_not_narrowed_where_one_array_is_wide(sites):
    assert "attention" not in sites(scores_in_float32, Q, normal((2, 8, 2, 16)), V, SEEN)


def test_attention_with_16_bit_scores_and_a_wide_softmax(sites):
    def fn(q, k, v, seen):
        grouped = q.reshape(2, 8, 2, 2, 16)
        scores = jnp.einsum("btkgh,bskh->btskg", grouped, k) * 0.25
        scores = jnp.where(seen[None, :, :, None, None], scores, jnp.finfo(BF16).min)
        weights = jax.nn.softmax(wide(scores), axis=2).astype(scores.dtype)
        return jnp.einsum("btskg,bskh->btkgh", weights, v).reshape(q.shape)

    assert sites(fn, Q, K, V, SEEN) == ["attention"]


def test_a_product_behind_grouped_attention_reads_its_result(sites):
    """And not the array in groups inside it, which would be computed as it is written."""

    def fn(q, k, v, w, stream):
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(2, 8, 2, 2, 16), k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * 0.25).astype(v.dtype)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
        return stream + mixed.reshape(2, 8, 64) @ w

    told = []
    w, stream = normal((64, 64), BF16, 3), normal((2, 8, 64), BF16, 4)
    assert sorted(sites(fn, Q, K, V, w, stream, told=told.append)) == ["attention", "linear"]
    assert {site.implementation for site in told[0].taken} == {"xla"}  # on the CPU; not "not computed"


def shifted(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    )
    return loss.mean()


def chosen(labels, count, on=1.0):
    hot = labels[..., None] == jnp.arange(count).reshape(1, 1, -1)
    return jax.lax.select(hot, jnp.full(hot.shape, on, jnp.float32), jnp.full(hot.shape, 0.0, jnp.float32))


LOSSES = {
    "one-hot likelihood": lambda logits, labels: jnp.sum(jax.nn.one_hot(labels, 48) * jax.nn.log_softmax(logits), -1),
    "in one sum": lambda logits, labels: -jnp.sum(jax.nn.one_hot(labels, 48) * jax.nn.log_softmax(logits)) / 16,
    "a selected one": lambda logits, labels: -jnp.sum(chosen(labels, 48) * jax.nn.log_softmax(logits), -1),
    "optax": lambda logits, labels: optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 48)),
    "optax of integers": optax.softmax_cross_entropy_with_integer_labels,
    "shifted and flat": shifted,
}


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(sites, name, dtype):
    assert sites(LOSSES[name], LOGITS.astype(dtype), LABELS) == ["cross_entropy"]
    assert sites(LOSSES[name], LOGITS.astype(dtype), LABELS.at[0, 1].set(48), checks=False) == ["cross_entropy"]


def test_losses_of_one_sequence(sites):
    """Of an axis of length 1 `take_along_axis` takes a slice, and no element for each label."""
    for loss in (optax.softmax_cross_entropy_with_integer_labels, loss_at(0)):
        assert sites(loss, LOGITS[:1], LABELS[:1]) == ["cross_entropy"]
        assert sites(loss, LOGITS[:1, :1], LABELS[:1, :1]) == ["cross_entropy"]


def loss_at(place):
    """The loss of Bonsai's qwen3 and umt5, by optax, takes the label's logit with `take(0)`."""

    def loss(logits, labels):
        found = jnp.take_along_axis(logits, labels[..., None], -1)
        return jax.nn.logsumexp(logits, -1) - jnp.take(found, place, -1)

    return loss


def test_the_logit_of_a_label_may_be_gathered_at_a_constant(sites, monkeypatch):
    assert sites(loss_at(0), LOGITS, LABELS) == ["cross_entropy"]
    assert sites(loss_at(-1), LOGITS, LABELS) == ["cross_entropy"]
    assert sites(loss_at(1), LOGITS, LABELS, checks=False) == []  # out of range: NaN
    at_an_argument = lambda logits, labels, place: loss_at(place)(logits, labels)  # noqa: E731
    assert sites(at_an_argument, LOGITS, LABELS, jnp.int32(0)) == []
    monkeypatch.delitem(RULES, "gather")
    assert sites(loss_at(0), LOGITS[:, 1:], LABELS[:, 1:]) == []  # of another shape: plans are cached


def test_what_is_no_loss(sites):
    def doubled(logits, labels):
        return -jnp.sum(chosen(labels, 48, on=2.0) * jax.nn.log_softmax(logits), -1)

    def of_rows(logits, labels):
        return -jnp.sum(jax.nn.one_hot(labels, 48) * jax.nn.log_softmax(logits), 1)

    assert sites(doubled, LOGITS, LABELS) == []
    assert sites(of_rows, LOGITS, LABELS) == []


def test_rope_by_a_contraction_of_integers(sites):
    def rotated(x, positions):
        frequency = 1.0 / 1e6 ** (jnp.arange(0, 16, 2, dtype=wide(x).dtype) / 16)
        angle = jnp.einsum("bt,f->btf", positions, frequency, precision="highest")[:, :, None]
        a, b = x[..., :8], x[..., 8:]
        halves = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
        return jnp.concatenate(halves, -1).astype(x.dtype)

    positions = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    assert sites(lambda q, k, p: (rotated(q, p), rotated(k, p)), Q, K, positions) == ["rope"]


def test_a_scale_in_float32_after_the_rounding(sites):
    def fn(x, scale, w):
        value = wide(x)
        normed = (value / jnp.sqrt(jnp.mean(value**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)
        return (scale * normed).astype(x.dtype) @ w

    arguments = normal((8, 64), BF16), normal((64,), seed=1), normal((64, 64), BF16, 2) / 8
    assert sites(fn, *arguments) == ["norm_linear"]


def planned(fn, *arguments, ops=None) -> Plan:
    """The plan for the H200."""
    target = load_target("h200")
    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arguments]
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        return make_plan(jax.make_jaxpr(fn)(*structs).jaxpr, Choices(ops and tuple(ops)))


X, SCALE, W = normal((512, 1024), BF16), normal((1024,)), normal((1024, 1024), BF16)


def norm(x, scale):
    value = x.astype(jnp.float32)
    return (value * jax.lax.rsqrt(jnp.mean(value**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


FUSED_BY_XLA = {
    "before": (lambda x, s, w: jax.nn.softmax(jnp.where(x > 0, x, -1.0)), "select_n, which computes x"),
    "behind": (lambda x, s, w: jnp.tanh(norm(x, s)), "reads its result (tanh)"),
    "epilogue": (lambda x, s, w: jax.nn.relu(x.astype(jnp.float32) @ s[:, None] * w[0, 0] @ s[None] + s), "epilogue"),
    "slice": (lambda x, s, w: norm((w @ w)[:, 1:-1], s[1:-1]), "the slice that x is"),
}


@pytest.mark.parametrize("name", FUSED_BY_XLA)
def test_a_site_that_xla_fuses_with_its_neighbours_is_refused(name):
    fn, reason = FUSED_BY_XLA[name]
    x = w = W
    plan = planned(fn, x, SCALE, w)
    assert not [site for site in plan.sites if site.operation in ("rms_norm", "softmax")]
    assert any(reason in refusal.reason for refusal in plan.refusals)
    assert planned(fn, x, SCALE, w, ops=("rms_norm", "softmax", "bias_activation")).sites


def test_a_norm_of_a_sum_with_another_norm_serves_gradients_alone():
    plan = planned(lambda x, s, w: norm(w + norm(x, s), s) @ w, W, SCALE, W)
    norms = [site for site in plan.sites if site.operation == "rms_norm"]
    assert norms
    assert all(site.is_for_gradients for site in norms)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_loss_of_logits_that_xla_computes_on_the_way_is_refused(has_bias):
    def loss(x, s, w, labels):
        logits = x @ w
        logits = logits + s.astype(BF16) if has_bias else logits
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), jax.nn.one_hot(labels, 1024)).mean()

    plan = planned(loss, X, SCALE, W, jnp.zeros(512, jnp.int32))
    assert [site.operation for site in plan.sites] == ([] if has_bias else ["cross_entropy"])


@pytest.mark.parametrize("halves", ["alike", "different"])
def test_projections_are_rotated_by_tables_of_whole_heads(halves):
    """A kernel needs no proof that both halves of the tables are equal."""
    tables = jnp.ones((512, 64 if halves == "alike" else 128))

    def rotated(y, cos, sin):
        y = y.reshape(1, 512, -1, 128)
        turned = jnp.concatenate([-y[..., 64:], y[..., :64]], -1)
        cos, sin = (jnp.concatenate([each] * (128 // each.shape[-1]), -1)[:, None] for each in (cos, sin))
        return (y * cos + turned * sin).astype(y.dtype)

    def fn(x, w, cos, sin):
        q, k = rotated(x @ w, cos, sin), rotated(x @ w[::-1], cos, sin)
        return jax.nn.dot_product_attention(q, k, (x @ w.T).reshape(q.shape), implementation="xla")

    plan = planned(fn, X, W, tables, tables)
    assert sorted(site.operation for site in plan.sites) == ["attention", "qkv_projection"]


def test_a_site_between_products_is_taken():
    plan = planned(lambda x, s, w: norm(x @ w, s), X, SCALE, W)
    assert [site.operation for site in plan.sites] == ["rms_norm"]


STREAMS = {
    "added": (lambda x, s, w: x + norm(x, s) @ w, True),
    "added as float32": (lambda x, s, w: x.astype(jnp.float32) + (norm(x, s) @ w).astype(jnp.float32), True),
    "residual of a kernel": (lambda x, s, w: x + jax.nn.gelu(norm(x, s) @ w) @ w, True),
    "summed for the next norm": (lambda x, s, w: norm(x + norm(x, s) @ w, s) @ w, True),
    "returned": (lambda x, s, w: (norm(x, s) @ w, x), True),
    "not read": (lambda x, s, w: norm(x, s) @ w, False),
    "multiplied": (lambda x, s, w: 2 * x + norm(x, s) @ w, False),
    "in a product": (lambda x, s, w: x + x @ w + norm(x, s) @ w, False),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_norm_returns_the_residual_stream(name):
    """Its cotangent must need no work: where x is not differentiated, it would be computed all the same."""
    fn, expected = STREAMS[name]
    plan = planned(fn, X, SCALE, W)
    (first, *_) = sorted((site for site in plan.sites if "norm" in str(site.arrays.keys()) + site.operation), key=_at)
    assert first.stream is (plan.graph.inputs[0] if expected else None)


def _at(site):
    return site.root.index


def test_what_xla_computes_best_stays_as_written():
    plan = planned(lambda x, s, w: x @ w, X, SCALE, W)
    assert [site.operation for site in plan.written] == ["linear"]
    assert not plan.changes


def test_a_gate_and_its_product_are_left_to_xla_which_makes_one_product_of_them():
    def experts(x, gate, up):
        return jax.nn.silu(jnp.einsum("ecd,edf->ecf", x, gate)) * jnp.einsum("ecd,edf->ecf", x, up)

    x, w = normal((4, 256, 512), BF16), normal((4, 512, 1024), BF16)
    plan = planned(experts, x, w, w)
    assert not plan.changes
    assert [each.operation for each in plan.refusals] == ["gated_activation"]
    assert planned(experts, x, w, w, ops=["gated_activation"]).changes


def test_what_is_left_to_xla_is_told_apart():
    told, target = [], load_target("h200")
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        jax.eval_shape(fuse(lambda x, w: x @ w, report=told.append), X, W)
        program = FusedProgram(lambda x, w: x @ w)
        with pytest.raises(NothingFusedError, match="linear left to XLA"):
            jax.eval_shape(program.function, X, W)
    assert (told[0].taken, [site.operation for site in told[0].left]) == ((), ["linear"])
    assert "0 sites taken, 1 left to XLA, 0 refused" in str(told[0])
    assert [(site.outcome, bool(site.reason)) for site in program.sites] == [("left to XLA", True)]


def test_the_plain_llama_block_takes_kernels_everywhere():
    """The same launches as the strategy `best`, whose kernels are placed by hand."""
    told, target = [], load_target("h200")
    function, arguments = block_function(get_preset("llama3-8b"), (2, 4096))
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        fused = fuse(function, report=told.append)
        gradient = jax.make_jaxpr(jax.grad(lambda *own: fused(*own).astype(jnp.float32).sum(), (0, 1)))(*arguments)
    taken = [(site.operation, site.implementation) for site in told[0].taken]
    operations = ("attention", "gated_linear", "linear", "linear", "qkv_projection")
    assert sorted(taken) == [(operation, "mosaic") for operation in operations]
    assert "add_any" not in str(gradient), "the norms' kernels add the residual stream's cotangents"
