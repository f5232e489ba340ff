"""quack's CuTe kernels of rows, from PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import quack  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from quack.rmsnorm import layernorm_bwd, layernorm_fwd  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers import tensors
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


def layer_norm(x, scale, bias, residual=None, epsilon=1e-6):
    """See `pallas_kernels.layer_norm`; PyTorch adds the residual."""
    total = x if residual is None else x + residual
    y = _LayerNorm.apply(_rows(total), scale, bias, epsilon).reshape(x.shape)
    return (y,) if residual is None else (y, total)


def with_float32_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Casts layer norm's scale and bias to float32, which quack requires."""
    return {name: value.float() if name in ("scale", "bias") else value for name, value in arguments.items()}


def softmax(x):
    """Softmax along the last axis."""
    return (quack.softmax(_rows(x)).reshape(x.shape),)


def cross_entropy(logits, labels, ignore_index=-1, reduction="none"):
    """See `pallas_kernels.cross_entropy`."""
    loss = quack.cross_entropy(_rows(logits), labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return (loss.reshape(labels.shape) if reduction == "none" else loss,)


FUNCTIONS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
}


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation not in FUNCTIONS:
        raise NotImplementedError(f"quack is compared on rows, not by {operation}, but by {', '.join(FUNCTIONS)}")
    prepare = with_float32_parameters if operation == "layer_norm" else tensors.unchanged
    return tensors.candidate(name, phase, FUNCTIONS[operation], cases, prepare)
