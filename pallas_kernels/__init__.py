"""Fused transformer operations for JAX on NVIDIA GPUs.

Names load on first use: a call of one operation imports neither the other kernels nor the test cases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.arguments import Norm, Rope
    from pallas_kernels.dispatch import Choice, choice, recorded_choices
    from pallas_kernels.ops._products.norm import fold_scale
    from pallas_kernels.ops.attention.api import attention
    from pallas_kernels.ops.batch_norm.api import batch_norm
    from pallas_kernels.ops.bias_activation.api import bias_activation
    from pallas_kernels.ops.cross_entropy.api import cross_entropy
    from pallas_kernels.ops.decode_attention.api import decode_attention
    from pallas_kernels.ops.dot_interaction.api import dot_interaction
    from pallas_kernels.ops.embedding.api import embedding
    from pallas_kernels.ops.embedding_bag.api import embedding_bag
    from pallas_kernels.ops.gated_activation.api import gated_activation
    from pallas_kernels.ops.gated_linear.api import gated_linear
    from pallas_kernels.ops.grouped_linear.api import grouped_gated_linear, grouped_linear
    from pallas_kernels.ops.linear.api import linear, linear_residual_norm, norm_linear
    from pallas_kernels.ops.linear_cross_entropy.api import linear_cross_entropy
    from pallas_kernels.ops.lora_linear.api import lora_linear
    from pallas_kernels.ops.norms.api import dropout_residual_norm, layer_norm, rms_norm
    from pallas_kernels.ops.qkv_projection.api import qkv_projection
    from pallas_kernels.ops.quantized_linear.api import quantized_linear
    from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight, quantize
    from pallas_kernels.ops.rope.api import rope
    from pallas_kernels.ops.softmax.api import softmax
    from pallas_kernels.primitives.few_rows.config import MOST_FUSED_NORM_ROWS
    from pallas_kernels.primitives.overlapped import overlapped_collectives
    from pallas_kernels.primitives.partitioned import KernelWarning
    from pallas_kernels.registry import REGISTRY, get_op
    from pallas_kernels.specs import ArgSpec, ArraySpec, ErrorBound, OpSpec, Traffic

__all__ = [
    "BY_COPY_ENGINES",
    "MOST_FUSED_NORM_ROWS",
    "REGISTRY",
    "ArgSpec",
    "ArraySpec",
    "Choice",
    "ErrorBound",
    "KernelWarning",
    "Norm",
    "OpSpec",
    "QuantizedWeight",
    "Rope",
    "Traffic",
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
    "get_op",
    "grouped_gated_linear",
    "grouped_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_residual_norm",
    "lora_linear",
    "norm_linear",
    "overlapped_collectives",
    "qkv_projection",
    "quantize",
    "quantized_linear",
    "recorded_choices",
    "rms_norm",
    "rope",
    "softmax",
]

BY_COPY_ENGINES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Compiler options by which rows travel as copies between the GPUs of one process, without multiprocessors."""

_HOMES = {
    "arguments": ("Norm", "Rope"),
    "dispatch": ("Choice", "choice", "recorded_choices"),
    "ops._products.norm": ("fold_scale",),
    "ops.grouped_linear.api": ("grouped_linear", "grouped_gated_linear"),
    "ops.linear.api": ("linear", "norm_linear", "linear_residual_norm"),
    "ops.norms.api": ("rms_norm", "layer_norm", "dropout_residual_norm"),
    "ops.quantized_linear.weight": ("QuantizedWeight", "quantize"),
    "primitives.few_rows.config": ("MOST_FUSED_NORM_ROWS",),
    "primitives.overlapped": ("overlapped_collectives",),
    "primitives.partitioned": ("KernelWarning",),
    "registry": ("REGISTRY", "get_op"),
    "specs": ("ArgSpec", "ArraySpec", "ErrorBound", "OpSpec", "Traffic"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, f'ops.{name}.api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
