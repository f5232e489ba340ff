"""The table of operations that the tests, the benchmark, the tuner, the command line and the report read.

To add an operation, add a folder to `ops` and one entry here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from pallas_kernels.ops.attention.specs import ATTENTION
from pallas_kernels.ops.batch_norm.specs import BATCH_NORM
from pallas_kernels.ops.bias_activation.specs import BIAS_ACTIVATION
from pallas_kernels.ops.cross_entropy.specs import CROSS_ENTROPY
from pallas_kernels.ops.decode_attention.specs import DECODE_ATTENTION
from pallas_kernels.ops.dot_interaction.specs import DOT_INTERACTION
from pallas_kernels.ops.dropout_residual_norm.specs import DROPOUT_RESIDUAL_NORM
from pallas_kernels.ops.embedding.specs import EMBEDDING
from pallas_kernels.ops.gated_activation.specs import GATED_ACTIVATION
from pallas_kernels.ops.gated_linear.specs import GATED_LINEAR
from pallas_kernels.ops.grouped_linear.specs import GROUPED_GATED_LINEAR, GROUPED_LINEAR
from pallas_kernels.ops.layer_norm.specs import LAYER_NORM
from pallas_kernels.ops.linear.specs import LINEAR
from pallas_kernels.ops.linear_cross_entropy.specs import LINEAR_CROSS_ENTROPY
from pallas_kernels.ops.linear_residual_norm.specs import LINEAR_RESIDUAL_NORM
from pallas_kernels.ops.lora_linear.specs import LORA_LINEAR
from pallas_kernels.ops.norm_linear.specs import NORM_LINEAR
from pallas_kernels.ops.qkv_projection.specs import QKV_PROJECTION
from pallas_kernels.ops.quantized_linear.specs import QUANTIZED_LINEAR
from pallas_kernels.ops.rms_norm.specs import RMS_NORM
from pallas_kernels.ops.rope.specs import ROPE
from pallas_kernels.ops.softmax.specs import SOFTMAX
from pallas_kernels.specs import OpSpec

REGISTRY: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            RMS_NORM,
            LAYER_NORM,
            DROPOUT_RESIDUAL_NORM,
            GATED_ACTIVATION,
            BIAS_ACTIVATION,
            SOFTMAX,
            ROPE,
            CROSS_ENTROPY,
            BATCH_NORM,
            LINEAR,
            GATED_LINEAR,
            NORM_LINEAR,
            QKV_PROJECTION,
            LINEAR_RESIDUAL_NORM,
            QUANTIZED_LINEAR,
            LORA_LINEAR,
            GROUPED_LINEAR,
            GROUPED_GATED_LINEAR,
            LINEAR_CROSS_ENTROPY,
            ATTENTION,
            DECODE_ATTENTION,
            EMBEDDING,
            DOT_INTERACTION,
        )
    }
)


def get_op(name: str) -> OpSpec:
    """Returns the registry entry of the operation `name`.

    Raises:
        ValueError: there is no such operation; the message has the closest names.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    close = difflib.get_close_matches(name, REGISTRY, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"unknown operation {name!r}.{hint} There are {', '.join(map(repr, REGISTRY))}.")
