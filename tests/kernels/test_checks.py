"""What is said of arguments that no operation takes, in the words that all share."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

OPS: Any = pallas_kernels
"""Not typed: the arguments are wrong on purpose."""
X, W, SCALE = jnp.ones((2, 8)), jnp.ones((8, 8)), jnp.ones(8)
HEADS, LENGTHS = jnp.ones((1, 2, 1, 8)), jnp.ones(1, "int32")
POSITIONS, LABELS = jnp.arange(2), jnp.zeros(2, "int32")
KEY = jax.random.key(0)

STATIC = {
    "epsilon": lambda value: OPS.rms_norm(X, SCALE, epsilon=value),
    "the norm's epsilon": lambda value: OPS.norm_linear(X, W, norm=OPS.Norm(SCALE, epsilon=value)),
    "theta": lambda value: OPS.rope(HEADS, HEADS, POSITIONS, theta=value),
    "alpha": lambda value: OPS.lora_linear(X, W, W, W, alpha=value),
    "label_smoothing": lambda value: OPS.cross_entropy(X, LABELS, label_smoothing=value),
    "z_loss": lambda value: OPS.cross_entropy(X, LABELS, z_loss=value),
    "dropout_rate": lambda value: OPS.attention(HEADS, HEADS, HEADS, dropout_rate=value, dropout_key=KEY),
    "softcap": lambda value: OPS.decode_attention(HEADS, HEADS, HEADS, LENGTHS, softcap=value),
}


@pytest.mark.parametrize("name", STATIC)
def test_numbers_are_not_traced(name):
    with pytest.raises(TypeError, match=f"{name} must be a Python number, got a traced array. .* static_argnames"):
        jax.eval_shape(STATIC[name], 0.5)
    for value in ("small", 1j, np.ones(2)):
        with pytest.raises(TypeError, match=re.escape(f"{name} must be a number, got {value!r}")):
            STATIC[name](value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("is_causal", lambda value: OPS.softmax(X, is_causal=value)),
        ("is_causal", lambda value: OPS.attention(HEADS, HEADS, HEADS, is_causal=value)),
        ("interleaved", lambda value: OPS.rope(HEADS, HEADS, POSITIONS, interleaved=value)),
    ],
)
def test_flags_are_not_traced(name, call):
    with pytest.raises(TypeError, match=f"{name} must be a Python boolean, got a traced array"):
        jax.eval_shape(call, True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(OPS.rms_norm, X, None), TypeError, "rms_norm: scale must be an array, got None"),
        (partial(OPS.softmax, X.astype("float8_e4m3fn")), TypeError, "softmax: x is float8_e4m3fn; cast it to a float"),
        (partial(OPS.batch_norm, X, SCALE, None), TypeError, "batch_norm: bias must be an array, got None"),
        (partial(OPS.linear, X, W, bias="none"), TypeError, "linear: bias must be an array, got str"),
        (
            partial(OPS.linear, X, W, bias=SCALE.astype("float8_e4m3fn")),
            TypeError,
            "linear: bias is float8_e4m3fn; cast it",
        ),
        (partial(OPS.linear, X, W, out_dtype="float8_e4m3fn"), TypeError, "linear: out_dtype is float8_e4m3fn; cast"),
        (partial(OPS.linear, X, W, activation=["relu"]), ValueError, "linear: unknown activation"),
        (
            partial(OPS.qkv_projection, X, W, W, W, bias=(SCALE, None, SCALE)),
            TypeError,
            "the bias of w_k must be an array, got None",
        ),
        (
            partial(OPS.qkv_projection, X, W, W, W, head_size=2, rope=OPS.Rope(None)),
            TypeError,
            "rope must have positions, or both cos and sin",
        ),
        (
            partial(OPS.rope, HEADS[..., :0], HEADS[..., :0], POSITIONS),
            ValueError,
            r"even head size\), got \(1, 2, 1, 0\)",
        ),
        (partial(OPS.rope, HEADS, HEADS, POSITIONS, theta=0), ValueError, "theta must be positive and finite, got 0"),
        (
            partial(OPS.decode_attention, HEADS, HEADS, HEADS, LENGTHS, softcap=float("nan")),
            ValueError,
            "softcap must be positive and finite, got nan",
        ),
        (
            partial(OPS.decode_attention, HEADS[..., :0], HEADS[..., :0], HEADS[..., :0], LENGTHS),
            ValueError,
            "with a head size D",
        ),
        (
            partial(OPS.decode_attention, HEADS, HEADS[:0], HEADS[:0], LENGTHS, page_table=jnp.zeros((1, 1), int)),
            ValueError,
            "key_cache must have a page",
        ),
        (
            partial(OPS.cross_entropy, X, LABELS, ignore_index=2**40),
            ValueError,
            "ignore_index must be one of labels' int32, got 1099511627776",
        ),
        (
            partial(OPS.attention, HEADS, HEADS, HEADS, segment_ids=(None, LENGTHS)),
            TypeError,
            "attention: segment_ids must be an array, got None",
        ),
        (partial(OPS.softmax, X, axis=(0, 1)), TypeError, r"axis must be an integer, got \(0, 1\)"),
        (
            partial(OPS.cross_entropy, X, LABELS, ignore_index=0.5),
            TypeError,
            "ignore_index must be an integer, got 0.5",
        ),
        (partial(OPS.qkv_projection, X, W, W, W, head_size=8 / 2), TypeError, "head_size must be an integer, got 4.0"),
        (
            partial(OPS.decode_attention, HEADS, HEADS, HEADS, LENGTHS, window=2.5),
            TypeError,
            "window must be an integer, got 2.5",
        ),
        (
            partial(OPS.bias_activation, X, None, dropout_rate=0.1, dropout_key=jax.random.split(KEY)),
            ValueError,
            "bias_activation: dropout_key: expected one key",
        ),
        (
            partial(OPS.attention, HEADS, HEADS, HEADS, dropout_rate=2),
            ValueError,
            "attention: dropout_rate is 2; .* < 1",
        ),
        (
            partial(OPS.norm_linear, X, W, norm=OPS.Norm([1.0] * 8)),
            TypeError,
            "the norm's scale must be an array, got list",
        ),
        (partial(OPS.fold_scale, SCALE, W), TypeError, "must be a pallas_kernels.Norm"),
        (
            partial(OPS.fold_scale, OPS.Norm(X), W),
            ValueError,
            r"scale must be floating, \(features,\), got float32\[2, 8",
        ),
        (partial(OPS.fold_scale, OPS.Norm(SCALE), W, None), TypeError, "weight 1 must be an array, got None"),
        (
            partial(OPS.linear, X, W, out_dtype="real"),
            TypeError,
            "out_dtype must be a floating dtype or None, got 'real'",
        ),
        (partial(OPS.qkv_projection, X, W, W, W, bias=1), TypeError, "bias must be three arrays, .* got int"),
        (partial(OPS.quantize, jnp.ones((0, 8)), group_size=64), ValueError, "divide the 0 features"),
        (partial(OPS.softmax, X, mask=KEY), TypeError, "softmax: mask must be an array of numbers, got a key key<fry>"),
        (partial(OPS.linear, X, W, out_dtype="real"), TypeError, "linear: out_dtype must be"),
        (
            partial(OPS.bias_activation, X, None, dropout_rate=0.1, dropout_key=10**30),
            ValueError,
            "bias_activation: dropout_key: ",
        ),
        (partial(OPS.rms_norm, X, SCALE, implementation=1), TypeError, "a name, a sequence of names or None, got 1"),
        (partial(OPS.rms_norm, X, SCALE, implementation="XLA"), ValueError, "Did you mean 'xla'"),
    ],
)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-6])
def test_nothing_else_is_added_to_squares(value):
    """A root of it would be NaN, or every result zero."""
    calls = (
        partial(OPS.rms_norm, X, SCALE),
        partial(OPS.layer_norm, X),
        partial(OPS.batch_norm, X, SCALE, SCALE),
        partial(OPS.dropout_residual_norm, X, residual=X, rate=0.0, key=None),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"epsilon must be finite and not negative, got {value}"):
            call(epsilon=value)
    with pytest.raises(ValueError, match=f"the norm's epsilon must be finite and not negative, got {value}"):
        OPS.norm_linear(X, W, norm=OPS.Norm(SCALE, epsilon=value))
    assert jnp.array_equal(OPS.rms_norm(X, SCALE, epsilon=0), OPS.rms_norm(X, SCALE, epsilon=0.0))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("scale", lambda value: OPS.softmax(X, scale=value)),
        ("scale", lambda value: OPS.decode_attention(HEADS, HEADS, HEADS, LENGTHS, scale=value)),
        ("z_loss", lambda value: OPS.cross_entropy(X, LABELS, z_loss=value)),
        ("alpha", lambda value: OPS.lora_linear(X, W, W, W, alpha=value)),
    ],
)
def test_factors_are_finite(name, call):
    for value in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match=f"{name} must be finite, got {value}"):
            call(value)
    with pytest.raises(TypeError, match=f"{name} must be a number, got 1000"):
        call(10**400)
    call(-2)


@pytest.mark.parametrize(
    ("value", "told"),
    [(jnp.ones((2, 2), bool), r"bool\[2, 2\]"), ("no", "'no'"), (None, "None"), (0.0, "0.0"), ([], r"\[\]")],
)
def test_flags_are_true_or_false(value, told):
    """A mask in the place of a flag was JAX's error, and "no" was true."""
    with pytest.raises(TypeError, match=f"softmax: is_causal must be True or False, got {told}"):
        OPS.softmax(X, is_causal=value)
    for true in (True, 1, np.bool_(True), np.asarray(True), jnp.asarray(True)):
        assert jnp.array_equal(OPS.softmax(X, is_causal=true), OPS.softmax(X, is_causal=True))


def test_integers_and_arrays_of_numpy_are_taken():
    window, ids = np.int64(1), np.zeros((1, 2), np.int32)
    got = OPS.attention(HEADS, HEADS, HEADS, window=window, segment_ids=ids.tolist())
    assert jnp.array_equal(got, OPS.attention(HEADS, HEADS, HEADS, window=1, segment_ids=ids))
    assert OPS.softmax(X, axis=np.int64(0), scale=np.float32(2)).shape == X.shape


def test_numbers_of_numpy_leave_the_precision_as_it_is():
    with jax.enable_x64(True):
        heads = jnp.ones((1, 2, 1, 8), "float32")
        numbers = {"scale": np.float64(0.5), "softcap": np.float64(9), "dropout_rate": np.float64(0.5)}
        _, lse = OPS.attention(heads, heads, heads, **numbers, dropout_key=KEY, return_residuals=True)
    assert lse.dtype == jnp.float32


def test_weakly_typed_arguments_give_results_that_are_not():
    x = jnp.broadcast_to(jnp.asarray(2.0), (2, 8))
    assert x.weak_type
    assert not any(y.weak_type for y in OPS.rms_norm(x, SCALE, residual=x))


def test_a_single_number_may_be_dropped():
    y = OPS.bias_activation(jnp.float32(1), None, activation="relu", dropout_rate=0.5, dropout_key=KEY)
    assert float(y) in (0.0, 2.0)


def test_a_result_of_64_bits_has_32_where_there_are_no_others():
    assert OPS.linear(X, W, residual=X, out_dtype=float).dtype == jnp.float32
