"""Liger-Kernel's Triton kernels, for the operations that it has.

Its gated activations and cross-entropy overwrite their inputs, so that a repeated call works on the previous
result. That moves the same bytes. Results are checked on the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liger_kernel import ops  # pyright: ignore[reportMissingImports]

from pallas_kernels.testing import Case
from xlafuse.bench.peers import is_joint, tensors
from xlafuse.bench.timing import Candidate


def rms_norm(x, scale, residual=None, epsilon=1e-6):
    """RMS norm, computed in float32 like ours ("gemma"), not in place."""
    if residual is None:
        return (ops.LigerRMSNormFunction.apply(x, scale, epsilon, 0.0, "gemma", False),)
    return ops.LigerFusedAddRMSNormFunction.apply(x, residual, scale, epsilon, 0.0, "gemma", False)


def layer_norm(x, scale, bias, residual=None, epsilon=1e-6):
    """Layer norm with scale and bias; PyTorch adds the residual."""
    total = x if residual is None else x + residual
    y = ops.LigerLayerNormFunction.apply(total, scale, bias, epsilon)
    return (y,) if residual is None else (y, total)


def softmax(x):
    """Softmax along the last axis."""
    return (ops.LigerSoftmaxFunction.apply(x),)


def gated_activation(gate, up, activation="silu"):
    """SwiGLU, and GEGLU with tanh; gate and up are separate arrays."""
    functions = {"silu": ops.LigerSiLUMulFunction, "gelu_tanh": ops.LigerGELUMulFunction}
    if activation not in functions:
        raise NotImplementedError(f"Liger has no gate with {activation}, only {', '.join(functions)}")
    return (functions[activation].apply(gate, up),)


def cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.0, z_loss=0.0, reduction="none"):
    """Cross-entropy; the forward pass writes the gradient over the logits."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses, *_ = ops.LigerCrossEntropyFunction.apply(
        rows, targets, None, ignore_index, z_loss, label_smoothing, reduction, None, False
    )
    return (losses.reshape(labels.shape) if reduction == "none" else losses,)


def linear_cross_entropy(hidden, w, labels, ignore_index=-1, label_smoothing=0.0, z_loss=0.0, reduction="none"):
    """Linear cross-entropy; the forward pass computes the gradients, too.

    w is (features, vocabulary), which Liger takes as a transposed view.
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    losses, *_ = ops.LigerFusedLinearCrossEntropyFunction.apply(
        rows, w.t(), targets, None, None, ignore_index, z_loss, label_smoothing, reduction
    )
    return (losses.reshape(labels.shape) if reduction == "none" else losses,)


def with_long_labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with int64 labels, as PyTorch requires."""
    return {**arguments, "labels": arguments["labels"].long()}


FUNCTIONS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "gated_activation": gated_activation,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}


PREPARE = {"cross_entropy": with_long_labels, "linear_cross_entropy": with_long_labels}


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation not in FUNCTIONS:
        raise NotImplementedError(f"Liger has no {operation}, only {', '.join(FUNCTIONS)}")
    if operation in ("cross_entropy", "linear_cross_entropy") and phase == "backward" and not is_joint(cases[0]):
        raise NotImplementedError("Liger's cross-entropy does the backward pass's work in the forward pass")
    return tensors.candidate(name, phase, FUNCTIONS[operation], cases, PREPARE.get(operation, tensors.unchanged))
