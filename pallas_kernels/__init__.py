"""Fused transformer operations for JAX on NVIDIA GPUs."""

from pallas_kernels.ops.batch_norm.api import batch_norm
from pallas_kernels.ops.bias_activation.api import bias_activation
from pallas_kernels.ops.cross_entropy.api import cross_entropy
from pallas_kernels.ops.dropout_residual_norm.api import dropout_residual_norm
from pallas_kernels.ops.gated_activation.api import gated_activation
from pallas_kernels.ops.gated_linear.api import gated_linear
from pallas_kernels.ops.layer_norm.api import layer_norm
from pallas_kernels.ops.linear.api import linear
from pallas_kernels.ops.rms_norm.api import rms_norm
from pallas_kernels.ops.rope.api import rope
from pallas_kernels.ops.softmax.api import softmax
from pallas_kernels.registry import REGISTRY, get_op
from pallas_kernels.specs import ArgSpec, ArraySpec, ErrorBound, OpSpec, Traffic

__all__ = [
    "REGISTRY",
    "ArgSpec",
    "ArraySpec",
    "ErrorBound",
    "OpSpec",
    "Traffic",
    "batch_norm",
    "bias_activation",
    "cross_entropy",
    "dropout_residual_norm",
    "gated_activation",
    "gated_linear",
    "get_op",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "softmax",
]
