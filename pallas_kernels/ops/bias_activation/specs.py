"""The registry entry of bias, activation, dropout and residual sum in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pallas_kernels.ops.bias_activation.api import bias_activation
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_backward
from pallas_kernels.ops.bias_activation.reference import bias_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.random import key_words
from pallas_kernels.spec_builders import array_call, backward_passes, calls, gradients_of, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


@array_call
def _call(x, *, activation="gelu_tanh", bias="same", residual=False, rate=0.0):
    """Makes a call. bias: its dtype, "same" for x's, or None."""
    x = replace(x, deviation=2.0)
    which_bias = "no_bias" if bias is None else bias != "same" and f"{bias}_bias"
    dtype = x.dtype if bias == "same" else bias
    arguments = {
        "x": x,
        "bias": None if dtype is None else ArraySpec(shape=x.shape[-1:], dtype=dtype),
        "activation": activation,
        "residual": residual and x,
        "dropout_rate": rate or False,
        "dropout_key": bool(rate) and ArraySpec(shape=(2,), dtype="uint32", fill="bits"),
    }
    return arguments, activation, which_bias, residual and "residual", bool(rate) and f"dropout_{rate}"


def _rows(array: Any, bias: Any) -> Any:
    return None if array is None else array.reshape((1, -1) if bias is None else (-1, array.shape[-1]))


def _backward(*, x, bias, activation, residual=None, dropout_rate=0.0, dropout_key=None, cotangents):
    words = None if dropout_key is None else key_words(dropout_key)
    function = get_activation("bias_activation", activation)
    rows = _rows(x, bias), bias, words, _rows(cotangents[0], bias)
    dx, dbias = bias_activation_backward(*rows, activation=function, rate=dropout_rate)
    return (dx.reshape(x.shape),) if dbias is None else (dx.reshape(x.shape), dbias)


def _xla_backward(*, residual=None, **arguments):
    """Runs XLA's backward pass without the residual, whose gradient is the cotangent itself."""
    return gradients_of(bias_activation_reference, "x", "bias")(**arguments)


BIAS_ACTIVATION = OpSpec(
    name="bias_activation",
    function=bias_activation,
    reference=bias_activation_reference,
    differentiable=("x", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=(
        _call(6, 1024),
        _call(9, 300, activation="gelu", dtype="float32"),
        _call(5, 1152, activation="silu", bias="float32"),
        _call(4, 1001, activation="relu", dtype="float16", residual=True),
        _call(3, 256, activation="relu_squared", dtype="float32", residual=True),
        _call(2, 3, 1024, rate=0.1, residual=True),
        _call(3, 1001, bias=None, rate=0.5, activation="gelu"),
        _call(4, 127, tags="test ragged"),
        _call(16, 100, rate=0.3, residual=True, tags="test ragged"),
        _call(2, 512, fill="extreme", tags="test extreme"),
        _call(2, 512, fill="extreme", bias=None, activation="gelu", tags="test extreme"),
        _call(0, 512, tags="test empty"),
        _call(1000, 4096, activation="gelu", residual=True, tags="gpu"),
        _call(517, 4096, dtype="float32", tags="gpu"),
        _call(517, 4096, dtype="float32", activation="gelu", rate=0.1, tags="gpu"),
        _call(2000, 1152, rate=0.1, residual=True, tags="gpu"),
        _call(1001, 4097, activation="gelu", tags="gpu"),
        _call(4, 262144, tags="gpu"),
        _call(2048, 1001, rate=0.1, residual=True, tags="gpu"),
        _call(8192, 16384, tags="gpu bench block"),
        *calls(_call, (32768, 4096), (8192, 8192), (1, 4096), (64, 4096), tags="gpu bench"),
        _call(8192, 8192, activation="gelu", tags="gpu bench"),
        _call(8192, 8192, bias=None, tags="gpu bench"),
        _call(8192, 8192, rate=0.1, residual=True, tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "residual"), written=("x",)),
    # Reads x and dy; the residual's gradient is dy itself.
    backward_traffic=traffic(read=("x", "x"), written=("x",)),
    backward=backward_passes(mosaic=_backward, xla=_xla_backward),
)
