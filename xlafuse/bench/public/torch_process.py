"""PyTorch's models as candidates, timed in turns with the others by a process of their own.

That process may have another version of `transformers` than the models of JAX. If it crashes or stalls, the strategies
go on. The peers share it, as their weights would not fit several times.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from xlafuse.bench.timing import Candidate, Timing

MODELS = ("gpt2", "bert", "vit", "llama", "qwen3", "gemma", "mamba2", "unet", "umt5", "whisper", "siglip", "experts")
"""The models that PyTorch has, too: those of `torch_models.MODELS`."""
_SECONDS = 400.0
"""The longest wait for an answer; max-autotune compiles for minutes."""


class TorchError(RuntimeError):
    """The process of PyTorch's models raised, ended or gave no answer in time."""


def _serve(connection: Connection, *model: Any) -> None:
    os.environ["USE_TORCH"] = "1"  # the models of JAX have transformers leave it out
    from xlafuse.bench.public import torch_models

    torch_models.serve(connection, *model)


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
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, phase, size, layers))
        self._process.start()
        theirs.close()
        self._broken = ""
        self._loaded = False

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

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
        if self._broken:
            raise TorchError(self._broken)
        with contextlib.suppress(OSError):  # it has ended, as the missing answer says
            self._connection.send(request)
        return self._answer()

    def _answer(self) -> Any:
        ended = f"gave no answer in {_SECONDS:.0f} s"
        try:
            if self._connection.poll(_SECONDS):
                answer = self._connection.recv()
                if isinstance(answer, RuntimeError):
                    raise TorchError(*answer.args)
                return answer
            self._process.kill()
        except (EOFError, OSError):
            self._process.join()
            ended = f"ended with exit code {self._process.exitcode}; it says why above"
        self._broken = f"PyTorch's process {ended}"
        raise TorchError(self._broken)


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
        return self.process.ask(self.name, "timing")
