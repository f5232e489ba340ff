"""Configuration of a transformer block, and the presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xlafuse.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes, kinds of norm and MLP, and dtypes of a pre-norm transformer block.

    Sizes count elements. Matrix products compute in `dtype`; weights are stored in `param_dtype`. Norms, softmax and
    RoPE compute in at least float32.
    """

    name: str
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    rope_theta: float | None = 500_000.0
    """Base of the rotary embedding's wavelengths; None disables the rotary embedding."""
    use_bias: bool = False
    is_causal: bool = True
    epsilon: float = 1e-5
    num_experts: int = 0
    """The number of MLPs, of which each token goes through `experts_per_token`; 0: one MLP without a router."""
    experts_per_token: int = 0
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"

    def __post_init__(self):
        for name in ("hidden_size", "mlp_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}."
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"RoPE rotates pairs: head_dim must be even, got {self.head_dim}.")
        if not min(self.num_experts, 1) <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                "experts_per_token must be between 1 and num_experts, or both 0, got "
                f"{self.experts_per_token} and {self.num_experts}."
            )
        if self.num_experts and (self.mlp != "swiglu" or self.use_bias):
            raise ValueError("experts are SwiGLU MLPs without biases: mlp must be 'swiglu' and use_bias False.")
        if self.norm not in ("rms_norm", "layer_norm"):
            raise UnknownNameError("norm", self.norm, ("rms_norm", "layer_norm"))
        if self.mlp not in ("swiglu", "gelu"):
            raise UnknownNameError("mlp", self.mlp, ("swiglu", "gelu"))


PRESETS: dict[str, BlockConfig] = {
    config.name: config
    for config in (
        # arXiv:2407.21783, table 3, and the released configuration of Llama 3 8B.
        BlockConfig(name="llama3-8b", hidden_size=4096, mlp_size=14336, num_heads=32, num_kv_heads=8, head_dim=128),
        # The released configuration of GPT-2 medium. Its learned positions are added before the first block.
        BlockConfig(
            name="gpt2-medium",
            hidden_size=1024,
            mlp_size=4096,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            norm="layer_norm",
            mlp="gelu",
            rope_theta=None,
            use_bias=True,
        ),
        # arXiv:2401.04088, table 1.
        BlockConfig(
            name="mixtral-8x7b",
            hidden_size=4096,
            mlp_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            num_experts=8,
            experts_per_token=2,
            rope_theta=1e6,
        ),
        # The released configuration of Qwen3-30B-A3B, without its norms of query and key.
        BlockConfig(
            name="qwen3-30b-a3b",
            hidden_size=2048,
            mlp_size=768,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            num_experts=128,
            experts_per_token=8,
            rope_theta=1e6,
            epsilon=1e-6,
        ),
        # Llama's structure, small enough for a CPU and for Pallas' interpret mode.
        BlockConfig(name="tiny", hidden_size=256, mlp_size=512, num_heads=8, num_kv_heads=4, head_dim=64),
    )
}
"""Presets by name."""


def get_preset(name: str) -> BlockConfig:
    """Returns the preset called `name`; raises `UnknownNameError` with the nearest names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UnknownNameError("preset", name, PRESETS) from None
