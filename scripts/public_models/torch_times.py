"""Times torch.compile training steps of the same models on the attached GPU, for docs/public-models.md.

    python scripts/public_models/torch_times.py [MODEL ...] --layers 8 [--mode default] [--results FILE]

As a user of PyTorch would train them: the models of `transformers`, float32 weights under bfloat16 autocast, fused
AdamW, and attention by `scaled_dot_product_attention`. Sizes are those of sizes.py. Needs PyTorch and transformers.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sizes
import torch
import transformers

RESULTS = Path(__file__).resolve().parents[2] / "notebooks/results/public_models.json"
UNSEEN = -100  # a label that has no loss


def _encoder(stack: sizes.Stack) -> dict[str, Any]:
    return {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.hidden,
    }


def _decoder(stack: sizes.Stack) -> dict[str, Any]:
    heads = {"num_key_value_heads": stack.key_heads, "head_dim": stack.head_width}
    return {"vocab_size": stack.vocabulary, "max_position_embeddings": stack.length, **heads, **_encoder(stack)}


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


def _gpt2(stack: sizes.Stack) -> Any:
    widths = {"n_positions": stack.length, "n_embd": stack.width, "n_layer": stack.layers, "n_head": stack.heads}
    return transformers.GPT2Config(vocab_size=stack.vocabulary, use_cache=False, **widths)


def _bert(stack: sizes.Stack) -> Any:
    sized = {"vocab_size": stack.vocabulary, "max_position_embeddings": stack.length}
    return transformers.BertConfig(**sized, **_encoder(stack))


def _vit(stack: sizes.Stack) -> Any:
    return transformers.ViTConfig(image_size=stack.length, num_labels=stack.vocabulary, **_encoder(stack))


def _llama(stack: sizes.Stack) -> Any:
    return transformers.LlamaConfig(use_cache=False, **_decoder(stack))


def _qwen3(stack: sizes.Stack) -> Any:
    return transformers.Qwen3Config(tie_word_embeddings=True, use_cache=False, **_decoder(stack))


def _gemma(stack: sizes.Stack) -> Any:
    return transformers.Gemma3TextConfig(sliding_window=stack.window, use_cache=False, **_decoder(stack))


MODELS: dict[str, tuple[str, dict[Any, sizes.Stack], Callable[..., Any], Callable[..., Any]]] = {
    "gpt2": ("GPT2LMHeadModel", sizes.GPT2, _gpt2, _tokens),
    "bert": ("BertForMaskedLM", sizes.BERT, _bert, _masked),
    "vit": ("ViTForImageClassification", sizes.VIT, _vit, _images),
    "llama": ("LlamaForCausalLM", sizes.LLAMA, _llama, _tokens),
    "qwen3": ("Qwen3ForCausalLM", sizes.QWEN3, _qwen3, _tokens),
    "gemma": ("Gemma3ForCausalLM", sizes.GEMMA, _gemma, _tokens),
}


def step_ms(name: str, layers: int, mode: str, rounds: int = 7, calls: int = 3) -> float:
    """Returns the wall clock of a training step among several in flight, in ms: the median of the rounds."""
    kind, table, config_of, batch_of = MODELS[name]
    stack = sizes.resolve(table, "real", layers)
    model = getattr(transformers, kind)._from_config(config_of(stack), attn_implementation="sdpa").to("cuda").train()
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batch_of(stack)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(**batch).loss

    compiled = torch.compile(loss_of, mode=mode)

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count * 1e3

    run(calls)
    return statistics.median(run(calls) for _ in range(rounds))


def main() -> int:
    """Times the models and adds their steps to the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, required=True, help="at most so many")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to complete")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    for name in options.models:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        ms = step_ms(name, options.layers, options.mode)
        stack = sizes.resolve(MODELS[name][1], "real", options.layers)
        found = {"size": str(stack), "gpu": torch.cuda.get_device_name(), "mode": options.mode, "wall_us": ms * 1e3}
        print(f"{name}: {found}", flush=True)
        results.setdefault(name, {}).setdefault("step", {})["torch"] = found
        options.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
