"""The public models, and where their code comes from."""

from __future__ import annotations

from xlafuse.bench.public import sizes
from xlafuse.bench.public.language_models import flax_gemma, haiku_transformer, lm1b, mamba2, qwen3, umt5
from xlafuse.bench.public.other_models import equinox_gru, graph_net, haiku_rnn, unet
from xlafuse.bench.public.programs import PublicModel
from xlafuse.bench.public.science_models import e3nn, evoformer
from xlafuse.bench.public.sequence_models import gemma4_experts, griffin, s5
from xlafuse.bench.public.transformers_models import bert, gpt2, llama, vit, whisper
from xlafuse.bench.public.vision_models import resnet, siglip

_HF, _FLAX = "transformers 4.48.3", "google/flax 18f8f311"
_BONSAI, _HAIKU = "jax-ml/bonsai 36284254", "dm-haiku 0.0.17"
_DIFFUSERS, _EQUINOX = "diffusers 0.32.2", "equinox 0.13.8"
_ALPHAFOLD = "google-deepmind/alphafold c77e5d2, EvoformerIteration"
_GRAPHS = f"{_FLAX}, examples/ogbg_molpcba, jraph 0.0.6.dev0"

MODELS = (
    PublicModel("gemma", f"{_FLAX}, examples/gemma, Gemma 3, NNX", sizes.GEMMA, flax_gemma),
    PublicModel("lm1b", f"{_FLAX}, examples/lm1b, Linen", sizes.LM1B, lm1b),
    PublicModel("qwen3", f"{_BONSAI}, NNX", sizes.QWEN3, qwen3),
    PublicModel("gpt2", f"{_HF}, FlaxGPT2LMHeadModule", sizes.GPT2, gpt2),
    PublicModel("llama", f"{_HF}, FlaxLlamaForCausalLMModule", sizes.LLAMA, llama),
    PublicModel("bert", f"{_HF}, FlaxBertForMaskedLMModule", sizes.BERT, bert),
    PublicModel("vit", f"{_HF}, FlaxViTForImageClassification", sizes.VIT, vit, "images"),
    PublicModel("haiku_lm", f"{_HAIKU}, examples/transformer", sizes.HAIKU_LM, haiku_transformer),
    PublicModel("mamba2", f"{_BONSAI}, NNX", sizes.MAMBA2, mamba2),
    PublicModel("unet", f"{_DIFFUSERS}, FlaxUNet2DConditionModel", sizes.UNET, unet, "images"),
    PublicModel("graphnet", _GRAPHS, sizes.GRAPH_NET, graph_net, "graphs"),
    PublicModel("lstm", f"{_HAIKU}, examples/rnn", sizes.LSTM, haiku_rnn),
    PublicModel("gru", f"{_EQUINOX}, GRUCell and Linear in a scan", sizes.GRU, equinox_gru, "sequences"),
    PublicModel("umt5", f"{_BONSAI}, NNX", sizes.UMT5, umt5),
    PublicModel("whisper", f"{_HF}, FlaxWhisperForConditionalGenerationModule", sizes.WHISPER, whisper, "clips"),
    PublicModel("siglip", "google-research/big_vision 0127fb6, two_towers", sizes.SIGLIP, siglip, "images"),
    PublicModel("resnet", f"{_FLAX}, examples/imagenet, ResNet-50", sizes.RESNET, resnet, "images"),
    PublicModel("s5", "lindermanlab/S5 3c18fdb, BatchClassificationModel", sizes.S5, s5, "images"),
    PublicModel("griffin", "recurrentgemma 1.0.1, Griffin", sizes.GRIFFIN, griffin),
    PublicModel("experts", "google-deepmind/gemma 7691fd4, Gemma 4, MoERagged", sizes.GEMMA4_EXPERTS, gemma4_experts),
    PublicModel("evoformer", _ALPHAFOLD, sizes.EVOFORMER, evoformer, "sequences"),
    PublicModel("e3nn", "e3nn-jax 0.21.0, e3nn/e3nn-jax 04e761c, examples/tetris_point", sizes.E3NN, e3nn, "molecules"),
)
