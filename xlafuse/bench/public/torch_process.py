"""PyTorch's models as candidates, timed in turns with the others by a process of their own.

That process may have another version of `transformers` than the models of JAX. If it crashes or stalls, the strategies
go on. The peers share it, as their weights would not fit several times.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from xlafuse.bench.timing import Candidate, Timing

MODELS = ("gpt2", "bert", "vit", "llama", "qwen3", "gemma", "umt5", "whisper", "siglip", "experts")
"""The models that PyTorch has, too: those of `torch_models.MODELS`."""
_SECONDS = 400.0
"""The longest wait for an answer; max-autotune compiles for minutes."""
_MODULE = "xlafuse.bench.public.torch_models"


class TorchError(RuntimeError):
    """The process of PyTorch's models raised, ended or gave no answer in time."""


class TorchProcess:
    """A process with one phase of one model, which loads while this one goes on.

    Raises:
        NotImplementedError: the model is not one of `MODELS`.
        ModuleNotFoundError: PyTorch is not installed.
    """

    def __init__(self, model: str, phase: str, size: str, layers: int | None) -> None:
        if model not in MODELS:
            raise NotImplementedError(f"PyTorch's {model} is not written here; there are {', '.join(MODELS)}")
        if find_spec("torch") is None:
            raise ModuleNotFoundError("PyTorch is not installed")
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "USE_TORCH": "1"},
        )
        self._broken = ""
        self._loaded = False
        self._send(model, phase, size, layers)

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def candidate(self, name: str) -> Candidate:
        """Compiles a peer and calls it; returns it with its costs.

        Raises:
            TorchError: it failed there.
        """
        if not self._loaded:
            self._loaded = True
            try:
                self._answer()
            except TorchError as error:
                self._broken = str(error)
                raise
        costs = self.ask(name, "make")
        print(f"  {name}: first call {costs['compile_seconds']:.1f} s", flush=True)
        return Candidate(name=name, kind="peer", call=lambda: None, inputs=(), costs=costs, turn=TorchTurn(self, name))

    def ask(self, *request: Any) -> Any:
        """Sends a request and waits for the answer; see `torch_models.serve`."""
        self._send(*request)
        return self._answer()

    def _send(self, *request: Any) -> None:
        if self._broken:
            raise TorchError(self._broken)
        with contextlib.suppress(OSError):  # it has ended, as the missing answer says
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def _answer(self) -> Any:
        if self._broken:
            raise TorchError(self._broken)
        ready, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        line = self._process.stdout.readline() if ready else ""
        while line and not line.startswith("{"):  # what a library prints as it is imported
            line = self._process.stdout.readline()
        if not line:
            if not ready:
                self._process.kill()
            code = self._process.wait()
            ended = (
                f"ended with exit code {code}; it says why above" if ready else f"gave no answer in {_SECONDS:.0f} s"
            )
            self._broken = f"PyTorch's process {ended}"
            raise TorchError(self._broken)
        answer = json.loads(line)
        if "error" in answer:
            raise TorchError(": ".join(answer["error"]))
        return answer["result"]


@dataclass(frozen=True)
class TorchTurn:
    """A peer's `xlafuse.bench.timing.Turn`, which is in the process."""

    process: TorchProcess
    name: str

    def run_once(self) -> None:
        """Calls the peer and waits for the result."""
        self.process.ask(self.name, "run_once")

    def measure_wall(self, calls: int, seconds: float) -> None:
        """Adds the wall clock of a call among several in flight."""
        self.process.ask(self.name, "measure_wall", calls, seconds)

    def measure_gpu(self, calls: int) -> None:
        """Adds the sum of the kernel times of each call."""
        self.process.ask(self.name, "measure_gpu", calls)

    def timing(self) -> Timing:
        """Returns the times of a call."""
        found = self.process.ask(self.name, "timing")
        return Timing(**{**found, "kernels": tuple(found["kernels"])})
