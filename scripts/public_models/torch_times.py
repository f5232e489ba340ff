"""Times the same models through torch.compile on the attached GPU, for docs/public-models.md.

    python scripts/public_models/torch_times.py [MODEL ...] --layers 8 [--parts step forward] [--mode default]

As a user of PyTorch would train them: the models of `transformers`, float32 weights under bfloat16 autocast, fused
AdamW, attention by `scaled_dot_product_attention`, experts by `grouped_mm`. Sizes are those of sizes.py. Forward passes
return logits, and draw dropout's masks. Needs PyTorch and transformers.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import configs
import sizes
import torch
import transformers

RESULTS = Path(__file__).resolve().parents[2] / "notebooks/results/public_models.json"
PARTS = ("step", "forward")
UNSEEN = -100  # a label that has no loss


def _tokens(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, stack.vocabulary, (stack.batch, stack.length), device="cuda")
    return {"input_ids": tokens, "labels": tokens}


def _masked(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    batch = _tokens(stack)
    seen = torch.rand(batch["labels"].shape, device="cuda") < 1 / 7
    return {**batch, "labels": torch.where(seen, batch["labels"], UNSEEN)}


def _images(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    pixels = torch.randn(stack.batch, 3, stack.length, stack.length, device="cuda")
    return {"pixel_values": pixels, "labels": torch.randint(stack.vocabulary, (stack.batch,), device="cuda")}


def _qwen3(stack: sizes.Stack) -> Any:
    return transformers.Qwen3Config(tie_word_embeddings=True, **configs.decoder(stack))


def _gemma(stack: sizes.Stack) -> Any:
    return transformers.Gemma3TextConfig(sliding_window=stack.window, **configs.decoder(stack))


def _umt5(stack: sizes.Stack) -> Any:
    """Makes umT5, whose table, decoder's table and head are three, as in the model of JAX."""
    widths = {"d_model": stack.width, "d_kv": stack.head_width, "d_ff": stack.hidden, "num_heads": stack.heads}
    sized = {"vocab_size": stack.vocabulary, "num_layers": stack.layers, "dropout_rate": 0.0, "use_cache": False}
    model = _of("UMT5ForConditionalGeneration", transformers.UMT5Config(**sized, **widths))
    model.decoder.embed_tokens = copy.deepcopy(model.decoder.embed_tokens)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _targets(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    targets = torch.randint(1, stack.vocabulary, (stack.batch, stack.targets), device="cuda")
    return {"decoder_input_ids": targets, "labels": targets}


def _spans(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(stack)["input_ids"], **_targets(stack)}


def _sounds(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(stack.batch, 80, 2 * stack.length, device="cuda"), **_targets(stack)}


def _siglip(stack: sizes.Stack) -> Any:
    text = {"vocab_size": stack.vocabulary, "max_position_embeddings": stack.targets, **configs.encoder(stack)}
    vision = {"image_size": stack.length, "patch_size": 16, **configs.encoder(stack)}
    return transformers.SiglipConfig(text_config=text, vision_config=vision)


def _pairs(stack: sizes.Stack) -> dict[str, Any]:
    words = torch.randint(1, stack.vocabulary, (stack.batch, stack.targets), device="cuda")
    return {"input_ids": words, "pixel_values": _images(stack)["pixel_values"], "return_loss": True}


class _Experts(torch.nn.Module):
    """Qwen 3's experts, each layer after its norm and added to the rest, as those of Gemma 4 in sequence_models.py."""

    def __init__(self, stack: sizes.Stack):
        super().__init__()
        library = transformers.models.qwen3_moe.modeling_qwen3_moe
        numbers = {"num_experts": stack.experts, "num_experts_per_tok": stack.chosen, "norm_topk_prob": True}
        widths = {"hidden_size": stack.width, "moe_intermediate_size": stack.hidden}
        config = transformers.Qwen3MoeConfig(hidden_act="gelu_pytorch_tanh", **widths, **numbers)
        config._experts_implementation = "grouped_mm"
        norms = [library.Qwen3MoeRMSNorm(stack.width) for _ in range(2 * stack.layers)]
        blocks = [library.Qwen3MoeSparseMoeBlock(config) for _ in range(stack.layers)]
        for each in (parameter for block in blocks for parameter in block.parameters()):
            torch.nn.init.normal_(each, std=0.02)
        self.norms, self.blocks = torch.nn.ModuleList(norms), torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        """Returns the loss, or the result where there are no labels."""
        for place, block in enumerate(self.blocks):
            narrow = {name: each.bfloat16() for name, each in block.named_parameters()}  # autocast leaves grouped_mm
            y = torch.func.functional_call(block, narrow, (self.norms[2 * place](x).bfloat16(),))
            x = x + self.norms[2 * place + 1](y).bfloat16()
        return (x if labels is None else (x - labels).float().square().mean(),)


def _rows(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    shape = (stack.batch, stack.length, stack.width)
    return {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in ("x", "labels")}


def _of(kind: str, config: Any) -> Any:
    """Makes a model of transformers."""
    return getattr(transformers, kind)._from_config(config, attn_implementation="sdpa")


def _as(kind: str, config_of: Callable[[sizes.Stack], Any]) -> Callable[[sizes.Stack], Any]:
    return lambda stack: _of(kind, config_of(stack))


MODELS: dict[str, tuple[dict[Any, sizes.Stack], Callable[[sizes.Stack], Any], Callable[[sizes.Stack], Any]]] = {
    "gpt2": (sizes.GPT2, _as("GPT2LMHeadModel", configs.gpt2), _tokens),
    "bert": (sizes.BERT, _as("BertForMaskedLM", configs.bert), _masked),
    "vit": (sizes.VIT, _as("ViTForImageClassification", configs.vit), _images),
    "llama": (sizes.LLAMA, _as("LlamaForCausalLM", configs.llama), _tokens),
    "qwen3": (sizes.QWEN3, _as("Qwen3ForCausalLM", _qwen3), _tokens),
    "gemma": (sizes.GEMMA, _as("Gemma3ForCausalLM", _gemma), _tokens),
    "umt5": (sizes.UMT5, _umt5, _spans),
    "whisper": (sizes.WHISPER, _as("WhisperForConditionalGeneration", configs.whisper), _sounds),
    "siglip": (sizes.SIGLIP, _as("SiglipModel", _siglip), _pairs),
    "experts": (sizes.GEMMA4_EXPERTS, _Experts, _rows),
}
"""By name: sizes, what makes the model, and what makes its batch."""


def part_ms(name: str, part: str, layers: int, mode: str, rounds: int = 7, calls: int = 3) -> float:
    """Returns the wall clock of a part of a model among several in flight, in ms: the median of the rounds."""
    table, make, batch_of = MODELS[name]
    stack = sizes.resolve(table, "real", layers)
    model, batch = make(stack).to("cuda").train(), batch_of(stack)
    if part == "forward":
        batch = {key: each for key, each in batch.items() if key not in ("labels", "return_loss")}

    def first_of(batch: dict[str, Any]) -> torch.Tensor:
        """Returns the loss, or the logits of a batch without labels."""
        with torch.autocast("cuda", torch.bfloat16):
            return model(**batch)[0]

    compiled = torch.compile(first_of, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) if part == "step" else None

    def run(count: int) -> float:
        began = time.perf_counter()
        with torch.set_grad_enabled(optimizer is not None):
            for _ in range(count):
                result = compiled(batch)
                if optimizer is not None:
                    result.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count * 1e3

    run(calls)
    return statistics.median(run(calls) for _ in range(rounds))


def main() -> int:
    """Times the models and adds them to the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, required=True, help="at most so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:1], help="what to time; default: step")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to complete")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    failed = 0
    for name, part in ((name, part) for name in options.models for part in options.parts):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            ms = part_ms(name, part, options.layers, options.mode)
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        stack = sizes.resolve(MODELS[name][0], "real", options.layers)
        found = {"size": str(stack), "gpu": torch.cuda.get_device_name(), "mode": options.mode, "wall_us": ms * 1e3}
        print(f"{name} {part}: {found}", flush=True)
        results.setdefault(name, {}).setdefault(part, {})["torch"] = found
        options.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
