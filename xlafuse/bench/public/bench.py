"""Benchmark of public models: times them as users call them, at the sizes they are published with.

The main figure is the wall clock of a call. Each strategy's first results are checked against those of the first
strategy. Then all take turns with the same model in PyTorch, which another process runs. Weights and AdamW's state are
float32, computation is in bfloat16 where the model lets it. An NVIDIA GPU must be attached.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from hlo_analysis.capture.worker import gpu_lock
from xlafuse.bench.block import WALL_SECONDS
from xlafuse.bench.candidates import (
    MESSAGE_LENGTH,
    Chain,
    bytes_of,
    checked,
    compile_lowered,
    timed,
    with_shares,
)
from xlafuse.bench.environment import Sampler
from xlafuse.bench.public.flops import product_flops
from xlafuse.bench.public.generation import Generation
from xlafuse.bench.public.phases import PHASES, Phase
from xlafuse.bench.public.programs import Program
from xlafuse.bench.public.sources import MODELS
from xlafuse.bench.public.torch_process import TorchProcess
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.settings import PublicSettings
from xlafuse.bench.timing import Candidate, Timing
from xlafuse.fusion.program import FusedProgram
from xlafuse.fusion.spellings import ALLOWANCES
from xlafuse.strategies import get_strategy

ALLOWED = "fused_allowed"
"""The strategy "fused" with all allowances of `fuse`."""
_TOLERANCE = 0.2
"""Largest error, as a share of the norm, of what all layers compute in bfloat16.

The bound only catches a program that computes something else. Plain XLA's gradients of BERT are themselves 0.107 off
those in float32 (`fuse`'s 0.010): it adds 8192 rows of 16 bits into two.
"""


def bench_public(item: str, settings: PublicSettings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Times a phase of a model, such as "llama train"; yields a str if it is left out."""
    if time.time() > settings.until:
        yield f"{item}: not begun, the time was up"
        return
    name, phase_name = item.split()
    phase = PHASES[phase_name]
    os.environ["USE_TORCH"] = "0"  # transformers and diffusers would import it
    model = next(each for each in MODELS if each.name == name)
    with ExitStack() as stack:
        try:
            with gpu_lock({"kind": "attached"}, alone=False):
                torch: Any = settings.peers and _started(TorchProcess, *item.split(), settings.size, settings.layers)
                if isinstance(torch, TorchProcess):  # loads its model meanwhile
                    stack.enter_context(torch)
                if settings.packages:
                    sys.path.insert(0, str(settings.packages))
                program = phase.build(model, settings.checkouts, settings.size, settings.layers)
                case = _Case(program, phase)
                programs = case.compiled(settings.strategies)
                peers = {each: _started(_peer, torch, each) for each in settings.peers}
        except Exception as error:
            yield f"{item}: the model cannot be made: {type(error).__name__}: {str(error)[:MESSAGE_LENGTH]}"
            return

        def make(problems: list[Problem]) -> list[Candidate]:
            makers = {each: partial(case.candidate, each, found) for each, found in programs.items()}
            makers |= {each: partial(_given, found) for each, found in peers.items()}
            return checked(makers, problems, tolerance=_TOLERANCE)

        result = ShapeResult(op=name, phase=phase_name, spec=program.size, bytes=case.bytes, unit=model.unit)
        limits = {"baseline": settings.strategies[0], "wall_seconds": WALL_SECONDS}
        with gpu_lock({"kind": "attached"}, alone=True):
            tokens = phase.units(model, settings.size) * phase.steps
            result = timed(result, make, settings, sampler, tokens=tokens, **limits)
    result = with_shares(result, case.flops)
    yield replace(
        result,
        candidates=tuple(replace(each, timing=_of_a_step(each.timing, phase.steps)) for each in result.candidates),
        problems=tuple(replace(each, message=_without_folders(each.message, settings)) for each in result.problems),
    )


def _of_a_step(timing: Timing, steps: int) -> Timing:
    """Returns the times of one step of a call that makes several."""
    names = ("median_us", "p20_us", "p80_us", "wall_us")
    times = {name: getattr(timing, name) / steps for name in names}
    return replace(timing, kernels=timing.kernels[: -(-len(timing.kernels) // steps)], **times)


def _without_folders(message: str, settings: PublicSettings) -> str:
    """Returns a message whose paths begin in this machine's folders of models."""
    for folder in filter(None, (settings.checkouts, settings.packages)):
        message = message.replace(f"{folder.absolute()}/", "").replace(f"{folder}/", "")
    return message


def _started(make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what is made, or the error."""
    try:
        return make(*arguments)
    except Exception as error:
        return error


def _given[T](found: T | Exception) -> T:
    """Returns what was made, or raises the error."""
    if isinstance(found, Exception):
        raise found
    return found


def _peer(torch: TorchProcess | Exception, name: str) -> tuple[Candidate, None]:
    """Returns a candidate of PyTorch; its random weights are others, so that nothing is compared."""
    return _given(torch).candidate(name), None


class _Case:
    """One phase of one model: its compiled strategies, and calls that feed their results back."""

    def __init__(self, program: Program | Generation, phase: Phase) -> None:
        self._phase, self._program = phase, program
        params = jax.eval_shape(program.init, jax.random.key(0))
        self.bytes = bytes_of(params)
        self._shapes = jax.eval_shape(partial(phase.start, program), params)
        self._chain = Chain(self._first, phase.advance)

    def compiled(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns a program and its costs by strategy, or the error; the programs compile at the same time."""
        function = self._phase.function(self._program)
        sites: dict[Any, str] = {}
        with ThreadPoolExecutor(len(names)) as pool:
            # Tracing is Python, which threads do not make faster.
            pending = {name: _started(self._compiling, pool, name, function, sites) for name in names}
            self.flops = product_flops(self._phase.outer(function), *self._shapes)
            with jax.default_device(jax.devices("cpu")[0]):  # XLA takes minutes to compile umT5's for a GPU
                self._params = jax.jit(self._program.init)(jax.random.key(0))
        return {name: each if isinstance(each, Exception) else _started(each.result) for name, each in pending.items()}

    def _compiling(self, pool: ThreadPoolExecutor, name: str, function: Any, sites: dict[Any, str]) -> Future[Any]:
        """Lowers the function under a strategy and has a thread compile it. sites: those that earlier ones took."""
        strategy = get_strategy("fused" if name == ALLOWED else name)
        if reason := strategy.unmet(is_block=False, kind="attached", compute_capability=(0, 0)):
            raise NotImplementedError(reason)
        fused = FusedProgram(function, allow=ALLOWANCES if name == ALLOWED else ()) if strategy.fuses else None
        step = jax.jit(
            self._phase.outer(fused.function if fused else function),
            donate_argnums=self._phase.donated,
            compiler_options=dict(strategy.compiler_options),
        )
        started = time.perf_counter()
        lowered = step.lower(*self._shapes)
        seconds = time.perf_counter() - started
        if fused:
            taken = tuple(site for site in fused.sites if site.outcome == "taken")
            if taken in sites:
                raise NotImplementedError(f"it takes the same sites as {sites[taken]}: no allowance is needed")
            sites[taken] = name
        return pool.submit(compile_lowered, name, lowered, seconds)

    def candidate(self, name: str, found: tuple[Any, dict[str, Any]] | Exception) -> tuple[Candidate, dict[str, Any]]:
        """Returns a strategy's candidate with the results to compare."""
        program, costs = _given(found)
        if self._phase.donated:
            self._chain.begin_again()
        call = partial(self._chain.call, program)
        result = self._phase.compared(call())
        return Candidate(name=name, kind="strategy", call=call, inputs=[()], costs=costs), result

    def _first(self) -> tuple[Any, ...]:
        """Makes the arguments of a first call."""
        params = jax.device_put(self._params, jax.devices()[0], may_alias=False)
        return self._phase.start(self._program, params)
