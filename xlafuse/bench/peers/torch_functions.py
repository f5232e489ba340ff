"""The operations in plain PyTorch, as users write them, run eagerly or by torch.compile; float32 between the casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch._dynamo  # pyright: ignore[reportMissingImports]
import torch._functorch.config  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers import tensors
from xlafuse.bench.peers.tensors import Function, Prepare, unchanged
from xlafuse.bench.timing import Candidate

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * F.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def linear(x, w, bias=None, activation=None, residual=None):
    """See `pallas_kernels.linear`; the result has x's dtype."""
    y = x @ w
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = ACTIVATIONS[activation](y.float()).to(x.dtype)
    return (y if residual is None else y + residual,)


def normalised(x, norm=None, norm_scale=None, norm_bias=None, mean_square=None, epsilon=1e-6):
    """Returns the norm of x, or x itself; operations that fuse a norm take its parameters as arguments."""
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
    """See `pallas_kernels.qkv_projection`. For the angles see `with_projection_angles`."""
    x = normalised(x, **norm)
    q, k, v = (
        (x @ w if b is None else x @ w + b).unflatten(-1, (-1, head_size))
        for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v))
    )
    if q_scale is not None:
        q, k = (normalised(y, "rms", scale) for y, scale in ((q, q_scale), (k, k_scale)))

    return (q, k, v) if cosine is None else (rotated(q, cosine, sine), rotated(k, cosine, sine), v)


def with_projection_angles(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the projections' arguments with float32 cosines and sines in place of positions.

    PyTorch models compute them once for all layers.
    """
    kept = {name: value for name, value in arguments.items() if name not in ("positions", "theta")}
    if "positions" not in arguments:
        return kept
    tables = angles(arguments["positions"], arguments["head_size"], arguments.get("theta", 500_000.0))
    return {**kept, **dict(zip(("cosine", "sine"), tables, strict=True))}


def angles(positions, size: int, theta: float) -> tuple[Any, Any]:
    """Returns float32 cosines and sines of positions (..., length), shape (..., length, 1, size / 2)."""
    exponents = -torch.arange(size // 2, device=positions.device, dtype=torch.float32) / (size // 2)
    angle = positions.float()[..., None, None] * theta**exponents
    return torch.cos(angle), torch.sin(angle)


def rotated(x, cosine, sine):
    """Rotates pairs half a head apart, in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)


def rms_norm(x, scale=None, residual=None, epsilon=1e-6):
    """See `pallas_kernels.rms_norm`."""
    total = x if residual is None else x + residual
    y = normalised(total, "rms", scale, epsilon=epsilon)
    return (y,) if residual is None else (y, total)


def layer_norm(x, scale=None, bias=None, residual=None, epsilon=1e-6):
    """See `pallas_kernels.layer_norm`."""
    total = x if residual is None else x + residual
    y = normalised(total, "layer", scale, bias, epsilon=epsilon)
    return (y,) if residual is None else (y, total)


def dropout_residual_norm(x, scale=None, bias=None, *, residual, rate=0.0, norm="rms_norm", epsilon=1e-6):
    """See `pallas_kernels.dropout_residual_norm`. PyTorch draws dropout's mask itself."""
    dropped = F.dropout(x.float(), rate) if rate else x.float()
    total = (dropped + residual.float()).to(x.dtype)
    if norm == "rms_norm":
        return rms_norm(total, scale, epsilon=epsilon)[0], total
    return layer_norm(total, scale, bias, epsilon=epsilon)[0], total


def softmax(x, axis=-1, scale=None, mask=None, is_causal=False):
    """See `pallas_kernels.softmax`."""
    value = x.float() if scale is None else x.float() * scale
    if mask is not None:
        value = value.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else value + mask.float()
    if is_causal:
        rows, columns = x.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril()
        value = value.masked_fill(~allowed, float("-inf"))
    return (torch.softmax(value, axis).to(x.dtype),)


def bias_activation(x, bias=None, activation="gelu_tanh", residual=None, dropout_rate=0.0):
    """See `pallas_kernels.bias_activation`. PyTorch draws dropout's mask itself."""
    value = x.float() if bias is None else x.float() + bias.float()
    value = ACTIVATIONS[activation](value)
    value = F.dropout(value, dropout_rate) if dropout_rate else value
    return ((value if residual is None else value + residual.float()).to(x.dtype),)


def gated_activation(gate, up=None, activation="silu"):
    """See `pallas_kernels.gated_activation`."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return ((ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype),)


def batch_norm(x, scale, bias, epsilon=1e-5):
    """See `pallas_kernels.batch_norm`."""
    rows = x.float().reshape(-1, x.shape[-1])
    variance, mean = torch.var_mean(rows, 0, correction=0)
    y = (rows - mean) * torch.rsqrt(variance + epsilon) * scale.float() + bias.float()
    return y.to(x.dtype).reshape(x.shape), mean, variance


def cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.0, reduction="none"):
    """See `pallas_kernels.cross_entropy`."""
    rows, targets = logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    loss = F.cross_entropy(
        rows, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return (loss.reshape(labels.shape) if reduction == "none" else loss,)


def lora_linear(x, w, a, b, alpha=1.0, bias=None):
    """See `pallas_kernels.lora_linear`."""
    y = x @ w + alpha * ((x @ a) @ b)
    return (y if bias is None else y + bias,)


def attention(query, key, value, is_causal=False, dropout_rate=0.0):
    """See `pallas_kernels.attention`. PyTorch chooses the fused kernel and draws dropout's mask itself."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(*operands, dropout_p=dropout_rate, is_causal=is_causal, enable_gqa=True)
    return (out.transpose(1, 2),)


FUNCTIONS: Mapping[str, Function] = {
    "attention": attention,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "dropout_residual_norm": dropout_residual_norm,
    "softmax": softmax,
    "bias_activation": bias_activation,
    "gated_activation": gated_activation,
    "cross_entropy": cross_entropy,
    "batch_norm": batch_norm,
    "lora_linear": lora_linear,
    "linear": linear,
    "gated_linear": gated_linear,
    "norm_linear": norm_linear,
    "linear_residual_norm": linear_residual_norm,
    "qkv_projection": qkv_projection,
}


PREPARE: Mapping[str, Prepare] = {"qkv_projection": with_projection_angles}
"""Changes to the arguments, made outside the timing."""


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation not in FUNCTIONS:
        raise NotImplementedError(f"no {operation} in PyTorch here, only {', '.join(FUNCTIONS)}")
    function, prepare = FUNCTIONS[operation], PREPARE.get(operation, unchanged)
    if name == "torch_compile":
        # Makes shapes compile-time constants, as in XLA; a second shape of the same function would become dynamic.
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False, fullgraph=True)
    # The graph of one forward pass runs backward many times, so that its buffers must not be donated.
    with torch._functorch.config.patch(donated_buffer=False):
        return tensors.candidate(name, phase, function, cases, prepare)
