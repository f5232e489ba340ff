"""Fused transformer operations: the public functions of the package `pallas_kernels`, which load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pallas_kernels

if TYPE_CHECKING:
    from pallas_kernels import (
        Choice,
        KernelWarning,
        Norm,
        QuantizedWeight,
        Rope,
        attention,
        batch_norm,
        bias_activation,
        choice,
        cross_entropy,
        decode_attention,
        dot_interaction,
        dropout_residual_norm,
        embedding,
        embedding_bag,
        fold_scale,
        gated_activation,
        gated_linear,
        grouped_gated_linear,
        grouped_linear,
        layer_norm,
        linear,
        linear_cross_entropy,
        linear_residual_norm,
        lora_linear,
        norm_linear,
        qkv_projection,
        quantize,
        quantized_linear,
        recorded_choices,
        rms_norm,
        rope,
        softmax,
    )

__all__ = [
    "Choice",
    "KernelWarning",
    "Norm",
    "QuantizedWeight",
    "Rope",
    "attention",
    "batch_norm",
    "bias_activation",
    "choice",
    "cross_entropy",
    "decode_attention",
    "dot_interaction",
    "dropout_residual_norm",
    "embedding",
    "embedding_bag",
    "fold_scale",
    "gated_activation",
    "gated_linear",
    "grouped_gated_linear",
    "grouped_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_residual_norm",
    "lora_linear",
    "norm_linear",
    "qkv_projection",
    "quantize",
    "quantized_linear",
    "recorded_choices",
    "rms_norm",
    "rope",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(pallas_kernels, name)


def __dir__() -> list[str]:
    return sorted(__all__)
