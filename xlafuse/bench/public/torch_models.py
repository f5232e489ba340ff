"""The same models in PyTorch, timed by a process that `torch_process.py` starts.

As a user of PyTorch would train them: the models of `transformers`, float32 weights under bfloat16 autocast, fused
AdamW, attention by `scaled_dot_product_attention`, experts by `grouped_mm`. Forward passes return logits, and draw
dropout's masks. Decoding has bfloat16 weights and a `StaticCache`. This process has the `transformers` and, for the
U-Net, the `diffusers` that are installed; the models of JAX may have older ones.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from xlafuse.bench.public import configs, sizes
from xlafuse.bench.settings import TORCH_MODES
from xlafuse.bench.timing import Candidate, Turn

UNSEEN = -100  # a label that has no loss
DEVICE = "cuda"


def _tokens(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, stack.vocabulary, (stack.batch, stack.length), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}


def _masked(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    batch = _tokens(stack)
    seen = torch.rand(batch["labels"].shape, device=DEVICE) < 1 / 7
    return {**batch, "labels": torch.where(seen, batch["labels"], UNSEEN)}


def _images(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    pixels = torch.randn(stack.batch, 3, stack.length, stack.length, device=DEVICE)
    return {"pixel_values": pixels, "labels": torch.randint(stack.vocabulary, (stack.batch,), device=DEVICE)}


def _qwen3(stack: sizes.Stack) -> Any:
    return transformers.Qwen3Config(tie_word_embeddings=True, **configs.decoder(stack))


def _gemma(stack: sizes.Stack) -> Any:
    return transformers.Gemma3TextConfig(sliding_window=stack.window, **configs.decoder(stack))


def _mamba2(stack: sizes.Stack) -> Any:
    """Makes Mamba 2. Without the package mamba_ssm, it scans by operations of PyTorch."""
    given = {"n_groups": 1, "tie_word_embeddings": True, "use_cache": False, **configs.mamba2(stack)}
    heads = 2 * stack.width // stack.head_width
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(num_heads=heads, **given))


def _umt5(stack: sizes.Stack) -> Any:
    """Makes umT5, whose table, decoder's table and head are three, as in the model of JAX."""
    widths = {"d_model": stack.width, "d_kv": stack.head_width, "d_ff": stack.hidden, "num_heads": stack.heads}
    sized = {"vocab_size": stack.vocabulary, "num_layers": stack.layers, "dropout_rate": 0.0, "use_cache": False}
    model = _of("UMT5ForConditionalGeneration", transformers.UMT5Config(**sized, **widths))
    model.decoder.embed_tokens = copy.deepcopy(model.decoder.embed_tokens)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _targets(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    targets = torch.randint(1, stack.vocabulary, (stack.batch, stack.targets), device=DEVICE)
    return {"decoder_input_ids": targets, "labels": targets}


def _spans(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(stack)["input_ids"], **_targets(stack)}


def _sounds(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(stack.batch, 80, 2 * stack.length, device=DEVICE), **_targets(stack)}


def _siglip(stack: sizes.Stack) -> Any:
    text = {"vocab_size": stack.vocabulary, "max_position_embeddings": stack.targets, **configs.encoder(stack)}
    vision = {"image_size": stack.length, "patch_size": 16, **configs.encoder(stack)}
    return transformers.SiglipConfig(text_config=text, vision_config=vision)


def _pairs(stack: sizes.Stack) -> dict[str, Any]:
    words = torch.randint(1, stack.vocabulary, (stack.batch, stack.targets), device=DEVICE)
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
        return _error(x, labels)


class _UNet(torch.nn.Module):
    """The U-Net of diffusers, which predicts the noise in an image."""

    def __init__(self, levels: sizes.Levels):
        super().__init__()
        from diffusers import UNet2DConditionModel

        self.network = UNet2DConditionModel(**configs.unet(levels))

    def forward(self, labels: torch.Tensor | None = None, **batch: torch.Tensor) -> tuple[torch.Tensor]:
        """Returns the loss, or the predicted noise if there are no labels."""
        return _error(self.network(**batch, return_dict=False)[0], labels)


def _noisy(levels: sizes.Levels) -> dict[str, torch.Tensor]:
    draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    noisy, noise = draw(2, levels.batch, 4, levels.side, levels.side)
    words = draw(levels.batch, sizes.WORDS, levels.context)
    times = torch.arange(levels.batch, device=DEVICE)
    return {"sample": noisy, "timestep": times, "encoder_hidden_states": words, "labels": noise}


def _error(result: torch.Tensor, labels: torch.Tensor | None) -> tuple[torch.Tensor]:
    """Returns the mean squared error, or the result if there are no labels."""
    return (result if labels is None else (result - labels).float().square().mean(),)


def _rows(stack: sizes.Stack) -> dict[str, torch.Tensor]:
    shape = (stack.batch, stack.length, stack.width)
    return {name: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for name in ("x", "labels")}


def _of(kind: str, config: Any) -> Any:
    """Makes a model of transformers."""
    return getattr(transformers, kind)._from_config(config, attn_implementation="sdpa")


def _as(kind: str, config_of: Callable[[sizes.Stack], Any]) -> Callable[[sizes.Stack], Any]:
    return lambda stack: _of(kind, config_of(stack))


MODELS: dict[str, tuple[dict[Any, Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "gpt2": (sizes.GPT2, _as("GPT2LMHeadModel", configs.gpt2), _tokens),
    "bert": (sizes.BERT, _as("BertForMaskedLM", configs.bert), _masked),
    "vit": (sizes.VIT, _as("ViTForImageClassification", configs.vit), _images),
    "llama": (sizes.LLAMA, _as("LlamaForCausalLM", configs.llama), _tokens),
    "qwen3": (sizes.QWEN3, _as("Qwen3ForCausalLM", _qwen3), _tokens),
    "gemma": (sizes.GEMMA, _as("Gemma3ForCausalLM", _gemma), _tokens),
    "mamba2": (sizes.MAMBA2, _mamba2, _tokens),
    "unet": (sizes.UNET, _UNet, _noisy),
    "umt5": (sizes.UMT5, _umt5, _spans),
    "whisper": (sizes.WHISPER, _as("WhisperForConditionalGeneration", configs.whisper), _sounds),
    "siglip": (sizes.SIGLIP, _as("SiglipModel", _siglip), _pairs),
    "experts": (sizes.GEMMA4_EXPERTS, _Experts, _rows),
}
"""By name: sizes, what makes the model, and what makes its batch."""


class Model:
    """A phase of a model, whose weights and optimizer its modes share.

    settles: calls after the first, until nothing is compiled or recorded any more: a graph by a program's second call.
    """

    settles = 1

    def __init__(self, name: str, phase: str, size: sizes.Size, layers: int | None) -> None:
        table, make, batch_of = MODELS[name]
        stack = sizes.resolve(table, size, layers)
        self.model, self.batch = make(stack).to(DEVICE).train(), batch_of(stack)
        self.optimizer = None
        if phase == "train":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        else:
            self.batch = {key: each for key, each in self.batch.items() if key not in ("labels", "return_loss")}

    def call_of(self, mode: str | None) -> Callable[[], Any]:
        """Returns a call of the forward pass or of a training step, by torch.compile in a mode or without it."""

        def first_of(batch: dict[str, Any]) -> torch.Tensor:
            """Returns the loss, or the logits of a batch without labels."""
            with torch.autocast(DEVICE, torch.bfloat16):
                return self.model(**batch)[0]

        run = first_of if mode is None else torch.compile(first_of, mode=mode)
        optimizer = self.optimizer

        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # the last call's results may be overwritten
            with torch.set_grad_enabled(optimizer is not None):
                result = run(self.batch)
                if optimizer is not None:
                    result.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            return result.detach()

        return call


class Decoding:
    """A model that generates greedily after a prompt. Its modes share weights and cache, and take turns.

    Gemma's local layers count tokens: the first call compiles and warms up, the second records a graph for each count.
    """

    settles = 2

    def __init__(self, name: str, size: sizes.Size, layers: int | None) -> None:
        table, make, _ = MODELS[name]
        stack = sizes.decoding(sizes.resolve(table, size, layers))
        self.model = make(stack).to(DEVICE, torch.bfloat16).eval()
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=stack.length)
        prompt = torch.randint(1, stack.vocabulary, (stack.batch, stack.length - sizes.ROOM), device=DEVICE)
        places = torch.arange(prompt.shape[1], device=DEVICE)
        with torch.no_grad():
            self._first = self._next_of()(prompt, places), places[-1:] + 1
        counts = torch.int32, torch.int64
        self._kept = [
            {
                key: each.clone() if torch.is_tensor(each) else each
                for key, each in vars(layer).items()
                if not torch.is_tensor(each) or each.dtype in counts
            }
            for layer in self.cache.layers
        ]

    def _next_of(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns what makes of tokens at places, which it adds to the cache, the next ones, (sequences, 1)."""
        model, given = self.model, {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}

        def next_of(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return model(tokens, position_ids=places[None], return_dict=False, **given)[0].argmax(-1)

        return next_of

    def _begin_again(self) -> None:
        """Sets the cache's counts back, in place, as compiled programs know their addresses."""
        for layer, kept in zip(self.cache.layers, self._kept, strict=True):
            for key, each in kept.items():
                if torch.is_tensor(each):
                    getattr(layer, key).copy_(each)
                else:
                    setattr(layer, key, each)

    def call_of(self, mode: str | None) -> Callable[[], Any]:
        """Returns a call that generates `ROOM` tokens, by torch.compile in a mode or without it."""
        next_of = self._next_of()
        run = next_of if mode is None else torch.compile(next_of, mode=mode)

        def call() -> Any:
            self._begin_again()
            token, places = self._first
            found = []
            for _ in range(sizes.ROOM):
                torch.compiler.cudagraph_mark_step_begin()
                with torch.no_grad():
                    token = run(token, places).clone()  # a graph's next run writes over its result
                places = places + 1
                found.append(token)
            return torch.cat(found, dim=1)

        return call


class ProfiledTurn(Turn):
    """A turn whose kernels PyTorch's own profiler times, if it can."""

    def measure_gpu(self, calls: int) -> None:
        """Adds the sum of the kernel times of each call; without them the wall clock stands for it."""
        try:
            super().measure_gpu(calls)
        except Exception as error:
            print(f"{self.candidate.name}: no kernel times: {error}", file=sys.stderr, flush=True)

    def records(self, calls: int) -> list[tuple[str, float]]:
        """Returns name and milliseconds of each kernel of so many calls."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                self.run_once()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profile.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        kernels = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda each: float(each["ts"]))
        return [(each["name"], float(each["dur"]) / 1e3) for each in kernels]


def turn_of(model: Model | Decoding, name: str) -> tuple[ProfiledTurn, dict[str, Any]]:
    """Returns a peer that has run, with the seconds of its first call and its memory."""
    mode = TORCH_MODES[name]
    call = model.call_of(mode)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    call()
    wait()
    seconds = time.perf_counter() - started
    for _ in range(model.settles):
        call()
    wait()
    costs = {"compile_seconds": seconds if mode else 0.0, "peak_bytes": torch.cuda.max_memory_allocated()}
    torch.cuda.empty_cache()  # what other processes need while they compile
    return ProfiledTurn(Candidate(name=name, kind="peer", call=call, inputs=[()], wait=wait)), costs


def wait(_: Any = None) -> None:
    """Waits for the GPU."""
    torch.cuda.synchronize()


def serve(connection: Connection, name: str, phase: str, size: sizes.Size, layers: int | None) -> None:
    """Makes a model and says so by None, then answers requests: (peer, method of `Turn` or "make", *arguments).

    A `RuntimeError` in place of an answer has type and message of what was raised.
    """
    torch.set_float32_matmul_precision("high")
    make = partial(Decoding, name) if phase == "decode" else partial(Model, name, phase)
    model = _attempt(make, size, layers)
    is_made = not isinstance(model, RuntimeError)
    connection.send(None if is_made else model)
    turns: dict[str, ProfiledTurn] = {}

    def answer(peer: str, method: str, *arguments: Any) -> Any:
        if method == "make":
            turns[peer], costs = turn_of(model, peer)
            return costs
        return getattr(turns[peer], method)(*arguments)

    with contextlib.suppress(EOFError):  # the other side has ended
        while True:
            connection.send(_attempt(answer, *connection.recv()))


def _attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except Exception as error:
        torch.cuda.empty_cache()
        return RuntimeError(f"{type(error).__name__}: {error}")
