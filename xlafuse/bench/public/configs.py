"""Configurations at the sizes of sizes.py that the models of JAX and those of PyTorch share."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from xlafuse.bench.public.sizes import Levels, Stack


def encoder(stack: Stack) -> dict[str, int]:
    """Returns the arguments that most configurations share."""
    return {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.hidden,
    }


def decoder(stack: Stack) -> dict[str, Any]:
    """Returns the arguments that causal language models share."""
    heads = {"num_key_value_heads": stack.key_heads, "head_dim": stack.head_width}
    sized = {"vocab_size": stack.vocabulary, "max_position_embeddings": stack.length}
    return {"use_cache": False, **sized, **heads, **encoder(stack)}


def gpt2(stack: Stack) -> Any:
    """Returns GPT-2's configuration."""
    from transformers import GPT2Config

    widths = {"n_positions": stack.length, "n_embd": stack.width, "n_layer": stack.layers, "n_head": stack.heads}
    return GPT2Config(vocab_size=stack.vocabulary, use_cache=False, **widths)


def bert(stack: Stack) -> Any:
    """Returns BERT's configuration."""
    from transformers import BertConfig

    return BertConfig(vocab_size=stack.vocabulary, max_position_embeddings=stack.length, **encoder(stack))


def vit(stack: Stack) -> Any:
    """Returns the configuration of a vision transformer that classifies."""
    from transformers import ViTConfig

    patch = 8 if stack.length < 224 else 16
    return ViTConfig(image_size=stack.length, patch_size=patch, num_labels=stack.vocabulary, **encoder(stack))


def llama(stack: Stack) -> Any:
    """Returns Llama's configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(**decoder(stack))


def whisper(stack: Stack) -> Any:
    """Returns Whisper's configuration."""
    from transformers import WhisperConfig

    halves = ("encoder", "decoder")
    layers, heads, hidden = (
        {f"{half}_{name}": size for half in halves}
        for name, size in (("layers", stack.layers), ("attention_heads", stack.heads), ("ffn_dim", stack.hidden))
    )
    positions = {"max_source_positions": stack.length, "max_target_positions": stack.targets}
    sized = {"vocab_size": stack.vocabulary, "d_model": stack.width, "use_cache": False, "pad_token_id": 0}
    return WhisperConfig(**sized, **positions, **layers, **heads, **hidden)


def mamba2(stack: Stack) -> dict[str, int]:
    """Returns the arguments of Mamba 2's configuration, Bonsai's or that of `transformers`."""
    width = stack.head_width
    sized = {"vocab_size": stack.vocabulary, "hidden_size": stack.width, "num_hidden_layers": stack.layers}
    return {**sized, "head_dim": width, "state_size": 2 * width, "chunk_size": 4 * width}


def unet(levels: Levels) -> dict[str, Any]:
    """Returns the arguments of diffusers' U-Net, as Stable Diffusion's attends: at all levels but the deepest."""
    deeper = len(levels.widths) - 1
    return {
        "sample_size": levels.side,
        "block_out_channels": levels.widths,
        "layers_per_block": levels.blocks,
        "down_block_types": ("CrossAttnDownBlock2D",) * deeper + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * deeper,
        "cross_attention_dim": levels.context,
        "attention_head_dim": levels.heads,  # diffusers takes it as the number of heads
    }
