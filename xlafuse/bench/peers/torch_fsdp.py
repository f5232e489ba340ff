"""A training step of transformers' Llama under PyTorch's FSDP2, compiled: run by `torch.distributed.run` as a script.

    python -m torch.distributed.run --standalone --nproc-per-node 4 torch_fsdp.py REQUEST.json RESULT.json

It imports nothing of this package, so that its processes do not start JAX. Weights, AdamW's state and updates are
float32; products, gathers of weights and sums of gradients bfloat16. Layers and loss are compiled each, as torchtitan
does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch.distributed.elastic.multiprocessing.errors import record  # pyright: ignore[reportMissingImports]
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # pyright: ignore[reportMissingImports]


class Loss(torch.nn.Module):
    """The head, and the mean cross-entropy of its logits."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Any, labels: Any) -> Any:
        """Returns the loss of hidden states (batch, tokens, hidden)."""
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


class Model(torch.nn.Module):
    """Llama's body and its loss."""

    def __init__(self, body: Any, loss: Any) -> None:
        super().__init__()
        self.body = body
        self.loss = loss

    def forward(self, tokens: Any) -> Any:
        """Returns the mean next-token loss of tokens (batch, tokens + 1)."""
        hidden = self.body(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        return self.loss(hidden, tokens[:, 1:])


def sharded_model(sizes: dict[str, Any], device: str) -> Any:
    """Returns the model with each layer, and the loss, compiled and sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    with torch.device(device):
        llama = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False))
    layers = llama.model.layers
    for place, layer in enumerate(layers):
        layers[place] = torch.compile(layer)
    model = Model(llama.model, torch.compile(Loss(llama.lm_head))).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*layers, model.loss):
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


@record
def main(request: dict[str, Any], result: Path) -> None:
    """Times the step and writes milliseconds of each, by the slowest process, and the loss before the first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    started = time.perf_counter()
    model = sharded_model(request["model"], device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-4, fused=True)
    shape = (request["batch"] // dist.get_world_size(), request["tokens"] + 1)
    tokens = torch.randint(0, request["model"]["vocab_size"], shape, device=device)

    def step() -> Any:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    first = float(step())
    if dist.get_rank() == 0:
        print(f"PyTorch's first step is done after {time.perf_counter() - started:.0f} s", flush=True)
    for _ in range(3):
        step()
    wait()
    prepared = time.perf_counter() - started
    times = []
    for _ in range(request["rounds"]):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(request["calls"]):
            step()
        wait()
        spent = torch.tensor((time.perf_counter() - start) / request["calls"], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(float(spent) * 1e6)
    if dist.get_rank() == 0:
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        found = {"microseconds": times, "loss": first, "seconds": prepared, "peak_bytes": peak}
        result.write_text(json.dumps(found))
        print(f"PyTorch {torch.__version__}: {statistics.median(times) / 1e3:.2f} ms, ready in {prepared:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
