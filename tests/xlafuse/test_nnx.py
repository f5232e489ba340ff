"""`xlafuse.nnx` beside `flax.nnx`: the same state, and outputs and gradients within rounding."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xlafuse
from pallas_kernels import recorded_choices
from xlafuse.numerics import judge

FEATURES = 24
NORMAL = nnx.initializers.normal(1.0)
NORMS = ["RMSNorm", "LayerNorm", "BatchNorm"]


def normal(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def pair(name: str, *sizes: int, **options):
    """Ours and Flax's, made alike."""
    return tuple(getattr(home, name)(*sizes, **options, rngs=nnx.Rngs(3)) for home in (xlafuse.nnx, nnx))


def results(module, *inputs, **options):
    """The output, the gradients of parameters and inputs, and the state after the call."""
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    def call(parameters, inputs):
        live = nnx.merge(graph, parameters, rest, copy=True)
        y = live(*inputs, **options)
        return y, nnx.state(live, nnx.BatchStat)

    y, pullback, after = jax.vjp(call, parameters, inputs, has_aux=True)
    return y, pullback(normal(*y.shape, seed=7).astype(y.dtype)), after


def check_alike(name: str, sizes, inputs, call=None, **options) -> None:
    ours, theirs = pair(name, *sizes, **options)
    found, expected = (results(module, *inputs, **(call or {})) for module in (ours, theirs))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
    exact = exactly(name, sizes, inputs, call or {}, options)
    error, baseline, passed = judge(found, expected, exact)
    assert passed, (error, baseline)


def exactly(name, sizes, inputs, call, options):
    """Flax's in float64, with parameters that are rounded as those of the call are."""
    _, theirs = pair(name, *sizes, **options)
    with jax.enable_x64(True):
        graph, state = nnx.split(theirs)
        wide = nnx.merge(graph, jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), state))
        if options.get("dtype") is not None:
            wide.dtype = jnp.float64
        wide_inputs = [jnp.asarray(np.asarray(a, np.float64)) for a in inputs]
        return jax.device_get(results(wide, *wide_inputs, **call))


@pytest.mark.parametrize("name", [*NORMS, "Linear"])
def test_state_is_that_of_flax(name):
    sizes = (FEATURES, 16) if name == "Linear" else (FEATURES,)
    inits = {"kernel_init": NORMAL, "bias_init": NORMAL} if name == "Linear" else {"scale_init": NORMAL}
    for options in ({}, inits, {"param_dtype": jnp.bfloat16}):
        ours, theirs = pair(name, *sizes, **options)
        own, other = nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs))
        assert jax.tree.structure(own) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, own, other)
        nnx.update(ours, nnx.state(theirs))  # a checkpoint loads
    assert isinstance(ours, type(theirs))
    assert inspect.signature(type(ours)) == inspect.signature(type(theirs))


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize(("of_x", "dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, of_x, dtype, use_scale):
    inits = {"scale_init": nnx.initializers.constant(1.5), "use_scale": use_scale, "use_fast_variance": False}
    inits |= {} if name == "RMSNorm" else {"bias_init": nnx.initializers.constant(0.5), "use_bias": use_scale}
    check_alike(name, (FEATURES,), [normal(4, 8, FEATURES, dtype=of_x)], dtype=dtype and jnp.dtype(dtype), **inits)


@pytest.mark.parametrize(("of_x", "dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear(of_x, dtype, use_bias):
    check_alike(
        "Linear",
        (FEATURES, 16),
        [normal(4, 8, FEATURES, dtype=of_x)],
        dtype=dtype and jnp.dtype(dtype),
        use_bias=use_bias,
        bias_init=NORMAL,
    )


def taken(fn, *arguments, **options) -> list[str]:
    """The operations that a call takes."""
    with recorded_choices() as choices:
        nnx.eval_shape(functools.partial(fn, **options), *arguments)
    return [choice.operation for choice in choices]


def test_calls_take_the_operations():
    x = normal(4, FEATURES)
    calls = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm", "BatchNorm": "batch_norm"}
    for name, operation in calls.items():
        assert taken(lambda model, x: model(x), pair(name, FEATURES)[0], x) == [operation]
    assert taken(lambda model, x: model(x), pair("Linear", FEATURES, 16)[0], x) == ["linear"]


LEFT_TO_FLAX = {
    "axis": ("RMSNorm", {"reduction_axes": (0, 1)}, {}, "normalizes along the last axis"),
    "layer's axes": ("LayerNorm", {"reduction_axes": (1, 2), "feature_axes": -1}, {}, "normalizes along the last axis"),
    "mask": ("LayerNorm", {}, {"mask": np.arange(4 * 8 * FEATURES).reshape(4, 8, FEATURES) % 3 > 0}, "has no mask"),
    "batch's mask": ("BatchNorm", {}, {"mask": np.arange(4 * 8).reshape(4, 8, 1) % 3 > 0}, "has no mask"),
    "batch's axis": ("BatchNorm", {"axis": 1}, {}, "along the last axis, not along 1"),
}


@pytest.mark.parametrize("case", LEFT_TO_FLAX)
def test_what_the_operation_cannot_do_is_left_to_flax(case):
    name, options, call, reason = LEFT_TO_FLAX[case]
    x = normal(4, 8, FEATURES)
    features = 8 if options.get("axis") == 1 else FEATURES
    ours, theirs = pair(name, features, **options)
    np.testing.assert_array_equal(ours(x, **call), theirs(x, **call))
    assert taken(lambda model, x: model(x, **call), pair(name, features, **options)[0], x) == []
    ours.implementation = "mosaic"
    with pytest.raises(NotImplementedError, match=reason):
        ours(x, **call)
    ours.implementation = ("mosaic", "xla")
    np.testing.assert_allclose(ours(x, **call), theirs(x, **call))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "highest"},
        {"preferred_element_type": jnp.float32},
        {"dot_general": lambda *a, **k: jax.lax.dot_general(*a, **k)},
    ],
)
def test_linear_left_to_flax(options):
    ours, theirs = pair("Linear", FEATURES, 16, **options)
    x = normal(4, FEATURES)
    np.testing.assert_array_equal(ours(x), theirs(x))
    assert taken(lambda model, x: model(x), ours, x) == []
    np.testing.assert_allclose(ours(x, activation="silu", residual=ours(x)), jax.nn.silu(ours(x)) + ours(x), rtol=1e-6)
    ours.implementation = "mosaic"
    with pytest.raises(NotImplementedError, match=f"Linear: .*has no {next(iter(options))}"):
        ours(x)


def test_explicit_kernels_raise_without_a_gpu():
    norm = pair("RMSNorm", 128)[0]
    norm.implementation = "mosaic"
    with pytest.raises(NotImplementedError, match="rms_norm cannot run as asked"):
        norm(normal(4, 128))
    norm.implementation = "xla"
    assert norm(normal(4, 128)).shape == (4, 128)


def test_batch_norm_in_use():
    ours, theirs = pair("BatchNorm", FEATURES)
    x = normal(64, FEATURES)
    for step in range(3):
        np.testing.assert_allclose(ours(x + step), theirs(x + step), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(ours.mean[...], theirs.mean[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.var[...], theirs.var[...], rtol=1e-5)
    ours.implementation = "mosaic"  # is for training
    nnx.update(ours, nnx.state(theirs))
    np.testing.assert_array_equal(ours(x, use_running_average=True), theirs(x, use_running_average=True))
    ours.use_running_average = None
    with pytest.raises(ValueError, match="use_running_average"):
        ours(x)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize(("dtype", "other"), [(jnp.bfloat16, "bfloat16"), (None, "bfloat16"), (None, "float32")])
def test_norm_with_residual(name, dtype, other):
    ours, theirs = pair(name, FEATURES, dtype=dtype, scale_init=NORMAL)
    x, residual = normal(4, FEATURES, dtype=other), normal(4, FEATURES, dtype=other, seed=1)
    y, total = ours(x, residual=residual)
    np.testing.assert_array_equal(total, x + residual)
    expected = theirs(x + residual)
    assert (y.dtype, total.dtype) == (expected.dtype, x.dtype)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (y, expected)), rtol=2e-2, atol=2e-5)
    assert len(taken(lambda model: model(x, residual=residual), ours)) == 1


def test_linear_with_activation_and_residual():
    ours, theirs = pair("Linear", FEATURES, 16, bias_init=NORMAL)
    x, residual = normal(4, FEATURES), normal(4, 16, seed=1)
    expected = jax.nn.gelu(theirs(x), approximate=True) + residual
    np.testing.assert_allclose(ours(x, activation="gelu_tanh", residual=residual), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"unknown activation 'gelo'\. Did you mean 'gelu'"):
        ours(x, activation="gelo")


HEADS, WIDTH = 4, 32


def attentions(**options):
    options = {"num_heads": HEADS, "in_features": WIDTH, "decode": False} | options
    return tuple(
        nnx.MultiHeadAttention(**options, attention_fn=function, rngs=nnx.Rngs(5))
        for function in (xlafuse.nnx.attention_fn, nnx.dot_product_attention)
    )


MASK = np.random.default_rng(1).random((2, 1, 6, 6)) < 0.5
MASK[0, 0, 2] = False
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "mask of numbers": {"mask": MASK.astype(np.float32)},
    "mask of heads": {"mask": np.broadcast_to(MASK, (2, HEADS, 6, 6)), "is_causal": True},
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CALLS)
def test_multi_head_attention(case, dtype):
    call = {name: jnp.asarray(each) if name == "mask" else each for name, each in CALLS[case].items()}
    ours, theirs = attentions(dtype=dtype)
    x = normal(2, 6, WIDTH, dtype=dtype)
    found, expected = (results(module, x, **call) for module in (ours, theirs))
    with jax.enable_x64(True):
        graph, state = nnx.split(attentions()[1])
        wide = nnx.merge(graph, jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), state))
        exact = jax.device_get(results(wide, jnp.asarray(np.asarray(x, np.float64)), **call))
    error, baseline, passed = judge(found, expected, exact)
    assert passed, (error, baseline)
    assert found[0].dtype == dtype
    assert taken(lambda model: model(x, **call), ours) == ["attention"]


def test_attention_of_grouped_heads_and_of_more_batch_axes():
    ours, theirs = attentions(num_kv_heads=2)
    x = normal(2, 3, 6, WIDTH)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=2e-5, atol=2e-6)
    mask = jnp.asarray(np.random.default_rng(2).random((2, 3, 1, 6, 6)) < 0.7)
    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ours(x[0, 0]), theirs(x[0, 0]), rtol=2e-5, atol=2e-6)


def test_decoding_with_a_cache():
    ours, theirs = attentions(decode=True)
    for module in (ours, theirs):
        module.init_cache((2, 5, WIDTH))
    for step in range(5):
        x = normal(2, 1, WIDTH, seed=step)
        np.testing.assert_allclose(ours(x), theirs(x), rtol=2e-5, atol=2e-6)


def test_dropout_of_attention():
    """Of a model of one, equal weights: the sum of what is kept of 4096 keys."""
    query = jnp.zeros((2, 3, HEADS, 8))
    key = value = jnp.ones((2, 4096, HEADS, 8))
    attend = functools.partial(
        xlafuse.nnx.attention_fn, query, key, value, dropout_rate=0.25, dropout_rng=jax.random.key(0)
    )
    out = attend(broadcast_dropout=False)
    assert len(np.unique(np.asarray(out[..., 0]))) > 12  # not the same for batch entries and heads
    np.testing.assert_allclose(out, 1, atol=5 * np.sqrt(0.25 / 0.75 / 4096))
    np.testing.assert_array_equal(out, attend(broadcast_dropout=False))
    np.testing.assert_allclose(attend(deterministic=True), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="pass dropout_rng"):
        attend(dropout_rng=None)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 6)])
@pytest.mark.parametrize("shared", [True, False])
def test_dropout_draws_the_masks_of_flax(shared: bool, shape: tuple[int, ...], mask: Any):
    query, key, value = (normal(*shape, HEADS, 8, seed=seed) for seed in range(3))
    key, value = key[..., ::2, :], value[..., ::2, :]
    mask = mask if mask is None else jnp.asarray(mask).reshape((2,) + (1,) * (len(shape) - 1) + (6, 6))
    found, expected = (
        function(
            query, key, value, mask=mask, broadcast_dropout=shared, dropout_rate=0.25, dropout_rng=jax.random.key(1)
        )
        for function in (xlafuse.nnx.attention_fn, nnx.dot_product_attention)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_kept_weights_are_those_of_flax():
    ours, theirs = attentions()
    x = normal(2, 6, WIDTH)
    np.testing.assert_array_equal(ours(x, sow_weights=True), theirs(x, sow_weights=True))
    found, expected = (nnx.pop(module, nnx.Intermediate) for module in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(found), nnx.to_pure_dict(expected))


def test_signature_of_attention_fn():
    own = dict(inspect.signature(xlafuse.nnx.attention_fn).parameters)
    theirs = inspect.signature(nnx.dot_product_attention).parameters
    own.pop("implementation")
    assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in theirs.values()]


def test_a_model_of_them_trains_and_is_split():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = xlafuse.nnx.Linear(FEATURES, FEATURES, rngs=rngs)
            self.batch_norm = xlafuse.nnx.BatchNorm(FEATURES, rngs=rngs)
            self.norm = xlafuse.nnx.RMSNorm(FEATURES, rngs=rngs)

        def __call__(self, x):
            y, total = self.norm(self.batch_norm(self.layer(x, activation="silu")), residual=x)
            return y + total

    @nnx.jit
    def loss_and_gradients(model, x):
        return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)

    model = Model(nnx.Rngs(0))
    x = normal(16, FEATURES)
    before, gradients = loss_and_gradients(model, x)
    assert model.batch_norm.mean[...].any()
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    assert loss_and_gradients(model, x)[0] < before
