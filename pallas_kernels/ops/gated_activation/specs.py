"""The gated activation's registry entry."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.gated_activation.api import gated_activation
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import array_call, backward_passes, calls, gradients_of, traffic
from pallas_kernels.specs import Arguments, OpSpec, array_bytes


@array_call
def _call(y, *, activation="silu", packed=False):
    gate = replace(y, shape=(*y.shape[:-1], 2 * y.shape[-1]) if packed else y.shape, deviation=2.0)
    arguments = {"gate": gate, "up": not packed and gate, "activation": activation}
    return arguments, activation, packed and "packed"


def _result_bytes(arguments: Arguments) -> int:
    return array_bytes(arguments["gate"]) // (2 if arguments.get("up") is None else 1)


def _operands(gate, up):
    """Returns gate and up as the kernels take them: rows if packed, else one row."""
    return (gate.reshape(-1, 2, gate.shape[-1] // 2), None) if up is None else (gate.reshape(1, -1), up.reshape(1, -1))


def _backward(*, gate, up=None, activation, cotangents):
    function, operands = get_activation("gated_activation", activation), _operands(gate, up)
    dy = cotangents[0].reshape(operands[0].shape[0], operands[0].shape[-1])
    gradients = gated_activation_backward(*operands, dy, activation=function)
    return tuple(gradient.reshape(gate.shape) for gradient in gradients if gradient is not None)


GATED_ACTIVATION = OpSpec(
    name="gated_activation",
    function=gated_activation,
    reference=gated_activation_reference,
    differentiable=("gate", "up"),
    batched=("gate", "up"),
    arg_specs=(
        _call(3, 1024),
        _call(2, 3, 1000, activation="gelu_tanh"),
        _call(5, 999, dtype="float32", activation="gelu"),
        _call(2, 3000, dtype="float16", activation="relu"),
        _call(3, 1024, packed=True, activation="gelu"),
        _call(2, 2, 1001, packed=True),
        _call(2, 512, activation="relu_squared", dtype="float32"),
        _call(1, 127, tags="test ragged"),
        _call(300, 5, packed=True, tags="test ragged"),
        _call(2, 512, fill="extreme", tags="test extreme"),
        _call(2, 512, fill="zeros", activation="gelu", tags="test extreme"),
        _call(0, 512, tags="test empty"),
        _call(333, 8192, activation="gelu", tags="gpu"),
        _call(333, 8192, activation="gelu_tanh", dtype="float32", tags="gpu"),
        _call(300, 4099, activation="relu", dtype="float16", tags="gpu"),
        _call(700, 14336, packed=True, tags="gpu"),
        _call(700, 4100, packed=True, activation="gelu", tags="gpu"),
        _call(301, 4097, packed=True, activation="relu_squared", dtype="float32", tags="gpu"),
        _call(8192, 14336, tags="gpu bench block"),
        *calls(_call, (32768, 4096), (8192, 8192), (1, 4096), (64, 4096), tags="gpu bench"),
        _call(8192, 8192, activation="gelu_tanh", tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("gate", "up"), written=("y",), y=_result_bytes),
    backward_traffic=traffic(read=("gate", "up", "y"), written=("gate", "up"), y=_result_bytes),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(gated_activation_reference, "gate", "up")),
)
