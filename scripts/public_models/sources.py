"""The public models of scripts/public_models, and where their code comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from language_models import flax_gemma, haiku_transformer, lm1b, mamba2, qwen3, transformers_program
from other_models import equinox_gru, graph_net, haiku_rnn, unet
from programs import Program, PublicModel


def _of(build: Callable[..., Program], *more: Any) -> Callable[[Path, Any, bool], Program]:
    return lambda folder, dtype, small: build(folder, dtype, small, *more)


_HF, _FLAX = "transformers 4.48.3", "google/flax 18f8f311"
_BONSAI, _HAIKU = "jax-ml/bonsai 36284254", "dm-haiku 0.0.17"
MODELS = (
    PublicModel(name="gemma", source=f"{_FLAX}, examples/gemma, Gemma 3, NNX", build=flax_gemma),
    PublicModel(name="lm1b", source=f"{_FLAX}, examples/lm1b, Linen", build=lm1b),
    PublicModel(name="qwen3", source=f"{_BONSAI}, NNX", build=qwen3),
    PublicModel(name="gpt2", source=f"{_HF}, FlaxGPT2LMHeadModule", build=_of(transformers_program, "gpt2")),
    PublicModel(name="llama", source=f"{_HF}, FlaxLlamaForCausalLMModule", build=_of(transformers_program, "llama")),
    PublicModel(name="bert", source=f"{_HF}, FlaxBertForMaskedLMModule", build=_of(transformers_program, "bert")),
    PublicModel(name="vit", source=f"{_HF}, FlaxViTForImageClassification", build=_of(transformers_program, "vit")),
    PublicModel(name="haiku_lm", source=f"{_HAIKU}, examples/transformer", build=haiku_transformer),
    PublicModel(name="mamba2", source=f"{_BONSAI}, NNX", build=mamba2),
    PublicModel(name="unet", source="diffusers 0.32.2, FlaxUNet2DConditionModel", build=unet),
    PublicModel(name="graphnet", source=f"{_FLAX}, examples/ogbg_molpcba, jraph 0.0.6.dev0", build=graph_net),
    PublicModel(name="lstm", source=f"{_HAIKU}, examples/rnn", build=haiku_rnn),
    PublicModel(name="gru", source="equinox 0.13.8, GRUCell and Linear in a scan", build=equinox_gru),
)
