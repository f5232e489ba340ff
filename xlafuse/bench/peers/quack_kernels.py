"""quack's CuTe kernels from PyTorch, for the operations that it has.

Its matrix products are untuned, since its autotuner compiles dozens of kernels a shape, and compared in the forward
pass. Weights are put into the layout of its `Linear`, (outputs, features), outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import quack  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from quack.rmsnorm import layernorm_bwd, layernorm_fwd  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers.tensors import Prepare, backward_candidate, forward_candidate, unchanged
from xlafuse.bench.timing import Candidate


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def rms_norm(x, scale=None, residual=None, epsilon=1e-6):
    """See `pallas_kernels.rms_norm`."""
    if residual is None:
        return (quack.rmsnorm(x, scale, eps=epsilon),)
    return quack.rmsnorm(x, scale, residual=residual, eps=epsilon, prenorm=True)


class _LayerNorm(torch.autograd.Function):
    """quack's forward and backward kernels, which it has as two functions of matrices."""

    @staticmethod
    def forward(ctx, x, scale, bias, epsilon):
        y, rstd, mean = layernorm_fwd(x, scale, bias, eps=epsilon, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, scale, rstd, mean)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, scale, rstd, mean = ctx.saved_tensors
        return *layernorm_bwd(x, scale, dy.contiguous(), rstd, mean), None


def layer_norm(x, scale=None, bias=None, residual=None, epsilon=1e-6):
    """See `pallas_kernels.layer_norm`; PyTorch adds the residual."""
    if scale is None or bias is None:
        raise NotImplementedError("quack's layer norm is compared with a scale and a bias")
    total = x if residual is None else x + residual
    y = _LayerNorm.apply(_rows(total), scale, bias, epsilon).reshape(x.shape)
    return (y,) if residual is None else (y, total)


def with_float32_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Casts layer norm's scale and bias to float32, which quack requires."""
    return {name: value.float() if name in ("scale", "bias") else value for name, value in arguments.items()}


def softmax(x, axis=-1, scale=None, mask=None, is_causal=False):
    """Softmax along the last axis, without a mask."""
    if axis not in (-1, x.ndim - 1) or mask is not None or is_causal or scale not in (None, 1.0):
        raise NotImplementedError("quack's softmax has no scale, no mask, and no axis but the last")
    return (quack.softmax(_rows(x)).reshape(x.shape),)


def cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.0, z_loss=0.0, reduction="none"):
    """See `pallas_kernels.cross_entropy`."""
    if label_smoothing or z_loss:
        raise NotImplementedError("quack's cross-entropy has no label smoothing and no z-loss")
    loss = quack.cross_entropy(_rows(logits), labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return (loss.reshape(labels.shape) if reduction == "none" else loss,)


def linear_cross_entropy(hidden, w, labels, ignore_index=-1, reduction="none", **others):
    """See `pallas_kernels.linear_cross_entropy`; w is (vocabulary, features).

    The loss alone writes no logits. With gradients, chunks of 4096 tokens have their logits' exponentials in memory.
    """
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # pyright: ignore[reportMissingImports]

    if reduction == "none" or any(others.values()):
        raise NotImplementedError("quack's linear cross-entropy is a sum or mean, without label smoothing and z-loss")
    options = {"ignore_index": ignore_index, "reduction": reduction, "tuned": False}
    return (chunked_linear_cross_entropy(_rows(hidden), w, labels.reshape(-1), **options),)


_ACTIVATIONS = {"gelu_tanh": "gelu_tanh_approx", "silu": "silu", "relu": "relu", "relu_squared": "relu_sq"}
_GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}


def linear(x, w, bias=None, activation=None, residual=None, out_dtype=None):
    """See `pallas_kernels.linear`; w is (outputs, features)."""
    from quack import gemm_interface as gemms  # pyright: ignore[reportMissingImports]

    if out_dtype is not None or activation not in (None, *_ACTIVATIONS) or (activation and residual is not None):
        raise NotImplementedError(
            "quack has no exact gelu, no residual after an activation, and is compared in x's type"
        )
    operands = (_rows(x), w.transpose(0, 1))
    if activation:
        options = {"activation": _ACTIVATIONS[activation], "store_preact": False, "tuned": False}
        _, y = gemms.gemm_act(*operands, bias=bias, **options)
    elif residual is not None:
        y = gemms.gemm_add(*operands, _rows(residual), bias=bias, tuned=False)
    else:
        y = gemms.gemm(*operands, bias=bias, tuned=False)
    return (y.reshape(*x.shape[:-1], y.shape[-1]),)


def gated_linear(x, w, activation="silu", **norm):
    """See `pallas_kernels.gated_linear`; w is (outputs of gate and up in turns, features)."""
    from quack.gemm_interface import gemm_act  # pyright: ignore[reportMissingImports]

    if norm or activation not in _GATES:
        raise NotImplementedError(f"quack's gate is compared without a norm, with {', '.join(_GATES)}")
    gate = {"activation": _GATES[activation], "store_preact": False, "tuned": False}
    _, y = gemm_act(_rows(x), w.transpose(0, 1), **gate)
    return (y.reshape(*x.shape[:-1], y.shape[-1]),)


def transposed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with w as (outputs, features)."""
    return {**arguments, "w": arguments["w"].transpose(0, 1).contiguous()}


def interleaved(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with one w, (2 * outputs, features), in place of w_gate and w_up."""
    pair = [arguments[name].transpose(0, 1) for name in ("w_gate", "w_up")]
    others = {name: value for name, value in arguments.items() if name not in ("w_gate", "w_up")}
    return {**others, "w": torch.stack(pair, 1).reshape(-1, pair[0].shape[1])}


FUNCTIONS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "linear": linear,
    "gated_linear": gated_linear,
}
PREPARE: Mapping[str, Prepare] = {
    "layer_norm": with_float32_parameters,
    "linear_cross_entropy": transposed,
    "linear": transposed,
    "gated_linear": interleaved,
}


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation not in FUNCTIONS:
        raise NotImplementedError(f"quack has no {operation}, only {', '.join(FUNCTIONS)}")
    if operation in ("linear", "gated_linear") and phase == "backward":
        raise NotImplementedError("quack's products are compared in the forward pass")
    make = forward_candidate if phase == "forward" else backward_candidate
    made, results = make(name, FUNCTIONS[operation], cases, PREPARE.get(operation, unchanged))
    return made, {key: value.T if key == "gradient of w" else value for key, value in results.items()}
