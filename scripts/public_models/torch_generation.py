"""Generates with the same decoders in PyTorch on the attached GPU, in CUDA graphs, as generation.py does.

    python scripts/public_models/torch_generation.py [MODEL ...] --layers 100 --results FILE

As a user of `transformers` would write it: a `StaticCache`, a whole prompt, then one call of
`torch.compile(mode="reduce-overhead")` a token. Weights are in bfloat16. Needs PyTorch and transformers.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import sizes
import torch
import transformers
from torch_times import MODELS, RESULTS

DECODERS = ("llama", "gpt2", "qwen3", "gemma")


def token_us(name: str, layers: int, *, fullgraph: bool, rounds: int = 7) -> float:
    """Returns the wall clock of a token, of `ROOM` in a row, in microseconds: the median of the rounds."""
    table, make, _ = MODELS[name]
    stack = sizes.decoding(sizes.resolve(table, "real", layers))
    model = make(stack).to("cuda", torch.bfloat16).eval()
    room = {"max_batch_size": stack.batch, "max_cache_len": stack.length}
    cache = transformers.StaticCache(config=model.config, device="cuda", dtype=torch.bfloat16, **room)
    takes_places = "cache_position" in inspect.signature(model.forward).parameters
    prompt = torch.randint(1, stack.vocabulary, (stack.batch, stack.length - sizes.ROOM), device="cuda")

    def next_of(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"cache_position": places} if takes_places else {}
        given |= {"position_ids": places[None], "past_key_values": cache, "use_cache": True, "return_dict": False}
        return model(tokens, **given)[0][:, -1:].argmax(-1)

    step = torch.compile(next_of, mode="reduce-overhead", fullgraph=fullgraph)

    def run() -> float:
        cache.reset()
        places = torch.arange(prompt.shape[1], device="cuda")
        token, places = next_of(prompt, places), places[-1:] + 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(sizes.ROOM):
            token = step(token, places).clone()  # the graph's next run writes over its result
            places = places + 1
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / sizes.ROOM * 1e6

    with torch.no_grad():
        run()
        return statistics.median(run() for _ in range(rounds))


def main() -> int:
    """Times the models and adds them to the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DECODERS, metavar="MODEL", help=", ".join(DECODERS))
    parser.add_argument("--layers", type=int, required=True, help="at most so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to complete")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    failed = 0
    for name in options.models:
        for fullgraph in (True, False):
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            try:
                us = token_us(name, options.layers, fullgraph=fullgraph)
            except Exception:
                traceback.print_exc()
                failed += not fullgraph
                continue
            stack = sizes.decoding(sizes.resolve(MODELS[name][0], "real", options.layers))
            mode = "reduce-overhead, fullgraph" if fullgraph else "reduce-overhead"
            found = {"size": str(stack), "gpu": torch.cuda.get_device_name(), "mode": mode, "wall_us": us}
            print(f"{name} decode: {found}", flush=True)
            results.setdefault(name, {}).setdefault("decode", {})["torch"] = found
            options.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            break
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
