"""The operations on matrix products in plain PyTorch, as its users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def linear(x, w, bias=None, activation=None, residual=None, out_dtype=None):
    """See `pallas_kernels.linear`; results of x's dtype only."""
    if out_dtype is not None:
        raise NotImplementedError("PyTorch's product has its operands' dtype")
    y = x @ w
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = ACTIVATIONS[activation](y.float()).to(x.dtype)
    return (y if residual is None else y + residual,)


def normalised(x, norm=None, norm_scale=None, norm_bias=None, mean_square=None, epsilon=1e-6):
    """The norm of x, as the operations that fuse one have it among their arguments."""
    if norm is None:
        return x
    scale = None if norm_scale is None else norm_scale.float()
    value, features = x.float(), (x.shape[-1],)
    if norm == "layer":
        bias = None if norm_bias is None else norm_bias.float()
        return F.layer_norm(value, features, scale, bias, epsilon).to(x.dtype)
    if mean_square is None:
        return F.rms_norm(value, features, scale, epsilon).to(x.dtype)
    value = value * torch.rsqrt(mean_square + epsilon)[..., None]
    return (value if scale is None else value * scale).to(x.dtype)


def gated_linear(x, w_gate, w_up, activation="silu", **norm):
    """See `pallas_kernels.gated_linear`."""
    x = normalised(x, **norm)
    return ((ACTIVATIONS[activation]((x @ w_gate).float()) * (x @ w_up).float()).to(x.dtype),)


def norm_linear(x, w, bias=None, activation=None, **norm):
    """See `pallas_kernels.norm_linear`."""
    return linear(normalised(x, **norm), w, bias, activation)


def linear_residual_norm(x, w, residual, bias=None):
    """See `pallas_kernels.linear_residual_norm`."""
    (total,) = linear(x, w, bias, residual=residual)
    return total, total.float().square().mean(-1)


def qkv_projection(
    x,
    w_q,
    w_k,
    w_v,
    head_size,
    cosine=None,
    sine=None,
    b_q=None,
    b_k=None,
    b_v=None,
    q_scale=None,
    k_scale=None,
    **norm,
):
    """See `pallas_kernels.qkv_projection`. For the angles see `with_angles`."""
    x = normalised(x, **norm)
    q, k, v = (
        (x @ w if b is None else x @ w + b).unflatten(-1, (-1, head_size))
        for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v))
    )
    if q_scale is not None:
        q, k = (normalised(y, "rms", scale) for y, scale in ((q, q_scale), (k, k_scale)))

    def rotate(y):
        first, second = y.float().chunk(2, -1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(y.dtype)

    return (q, k, v) if cosine is None else (rotate(q), rotate(k), v)


def with_angles(arguments: dict[str, Any]) -> dict[str, Any]:
    """The projections' arguments with float32 cosines and sines in place of positions: PyTorch's models compute them
    once for all layers."""
    kept = {name: value for name, value in arguments.items() if name not in ("positions", "theta")}
    if "positions" not in arguments:
        return kept
    positions, half = arguments["positions"], arguments["head_size"] // 2
    exponents = -torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions.float()[..., None, None] * arguments.get("theta", 500_000.0) ** exponents
    return {**kept, "cosine": torch.cos(angles), "sine": torch.sin(angles)}


FUNCTIONS = {
    "linear": linear,
    "gated_linear": gated_linear,
    "norm_linear": norm_linear,
    "linear_residual_norm": linear_residual_norm,
    "qkv_projection": qkv_projection,
}
