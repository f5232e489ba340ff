"""The operations in plain PyTorch, as its users write them: what torch.compile is given. float32 between the casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from xlafuse.bench.peers.tensors import Function, Prepare, unchanged


def _without_residual(arguments: dict[str, Any]) -> dict[str, Any]:
    """The benchmark's backward pass takes x for the saved sum."""
    residual = arguments.get("residual")
    return arguments if residual is None else {**arguments, "residual": torch.zeros_like(residual)}


@dataclass(frozen=True, kw_only=True)
class TorchOperation:
    """An operation in PyTorch.

    gradients: the arguments with gradients, in the order that `OpSpec.backward` gives them.
    prepare_backward: changes the arguments of the forward pass whose gradient is timed.
    """

    function: Function
    gradients: tuple[str, ...]
    prepare_backward: Prepare = unchanged


def rms_norm(x, scale, residual=None, epsilon=1e-6):
    """See `pallas_kernels.rms_norm`."""
    total = x if residual is None else x + residual
    y = F.rms_norm(total.float(), (x.shape[-1],), scale.float(), epsilon).to(x.dtype)
    return (y,) if residual is None else (y, total)


def layer_norm(x, scale=None, bias=None, residual=None, epsilon=1e-6):
    """See `pallas_kernels.layer_norm`."""
    total = x if residual is None else x + residual
    scale = None if scale is None else scale.float()
    bias = None if bias is None else bias.float()
    y = F.layer_norm(total.float(), (x.shape[-1],), scale, bias, epsilon).to(x.dtype)
    return (y,) if residual is None else (y, total)


def softmax(x, axis=-1, scale=None, mask=None, is_causal=False):
    """See `pallas_kernels.softmax`."""
    value = x.float() if scale is None else x.float() * scale
    if mask is not None:
        value = value.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else value + mask.float()
    if is_causal:
        rows, columns = x.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows)
        value = value.masked_fill(~allowed, float("-inf"))
    return (torch.softmax(value, axis).to(x.dtype),)


ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def bias_activation(x, bias=None, activation="gelu_tanh", residual=None):
    """See `pallas_kernels.bias_activation`."""
    value = x.float() if bias is None else x.float() + bias.float()
    value = ACTIVATIONS[activation](value)
    return ((value if residual is None else value + residual.float()).to(x.dtype),)


def gated_activation(gate, up, activation="silu"):
    """See `pallas_kernels.gated_activation`."""
    return ((ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype),)


def rope(query, key, positions, theta=10000.0, interleaved=False):
    """See `pallas_kernels.rope`. query and key: (batch, length, heads, features)."""
    half = query.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=query.device, dtype=torch.float32) / half)
    angles = positions.float()[..., None, None] * frequencies  # (batch, length, 1, half)
    cosine, sine = torch.cos(angles), torch.sin(angles)

    def rotate(x):
        if interleaved:
            first, second = x.float().unflatten(-1, (half, 2)).unbind(-1)
        else:
            first, second = x.float().chunk(2, -1)
        pair = (first * cosine - second * sine, second * cosine + first * sine)
        return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)

    return rotate(query), rotate(key)


TORCH_OPERATIONS: Mapping[str, TorchOperation] = {
    "rms_norm": TorchOperation(function=rms_norm, gradients=("x", "scale"), prepare_backward=_without_residual),
    "layer_norm": TorchOperation(
        function=layer_norm, gradients=("x", "scale", "bias"), prepare_backward=_without_residual
    ),
    "softmax": TorchOperation(function=softmax, gradients=("x",)),
    "bias_activation": TorchOperation(function=bias_activation, gradients=("x", "bias")),
    "gated_activation": TorchOperation(function=gated_activation, gradients=("gate", "up")),
    "rope": TorchOperation(function=rope, gradients=("query", "key")),
}


def get_operation(name: str) -> TorchOperation:
    """The operation called `name`; NotImplementedError where it is not written in PyTorch here."""
    if name not in TORCH_OPERATIONS:
        raise NotImplementedError(f"no {name} in PyTorch here, only {', '.join(TORCH_OPERATIONS)}")
    return TORCH_OPERATIONS[name]
