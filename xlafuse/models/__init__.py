"""Flax NNX transformer block with presets, used to compare fusion strategies."""

from hlo_analysis.capture import silence_missing_gpu
from xlafuse.models.block import TransformerBlock
from xlafuse.models.config import PRESETS, BlockConfig, get_preset
from xlafuse.models.functional import block_function, initial_params, resolve_config
from xlafuse.models.plan import SITES, FusionPlan
from xlafuse.models.shardings import Layout, ShardingError, layout_of

__all__ = [
    "PRESETS",
    "SITES",
    "BlockConfig",
    "FusionPlan",
    "Layout",
    "ShardingError",
    "TransformerBlock",
    "block_function",
    "get_preset",
    "initial_params",
    "layout_of",
    "resolve_config",
]

# Making weights asks JAX for devices. With the CUDA plugin installed but no GPU, JAX would print a traceback.
silence_missing_gpu()
