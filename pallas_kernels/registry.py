"""The table of operations that the tests, the benchmark, the tuner, the command line and the report read.

To add an operation, add a folder to `ops` and its name here; `specs.py` has the entry, in capitals.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from pallas_kernels.specs import OpSpec

_NAMES = (
    *("rms_norm", "layer_norm", "dropout_residual_norm", "gated_activation", "bias_activation", "softmax", "rope"),
    *("cross_entropy", "batch_norm", "linear", "gated_linear", "norm_linear", "qkv_projection"),
    *("linear_residual_norm", "quantized_linear", "lora_linear", "grouped_linear", "grouped_gated_linear"),
    *("linear_cross_entropy", "attention", "decode_attention", "embedding", "dot_interaction"),
)


_FOLDERS = {
    **dict.fromkeys(("rms_norm", "layer_norm", "dropout_residual_norm"), "norms"),
    **dict.fromkeys(("norm_linear", "linear_residual_norm"), "linear"),
    "grouped_gated_linear": "grouped_linear",
}
"""Folders of several operations' entries."""


def _entry(name: str) -> OpSpec:
    return getattr(import_module(f"pallas_kernels.ops.{_FOLDERS.get(name, name)}.specs"), name.upper())


REGISTRY: Mapping[str, OpSpec] = MappingProxyType({name: _entry(name) for name in _NAMES})


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
