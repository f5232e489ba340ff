"""What is measured of a public model: by phase, what is compiled and how its calls follow one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.bench.public.generation import GENERATIONS, Generation
from xlafuse.bench.public.programs import OPTIMIZER, Program, PublicModel, step_of
from xlafuse.bench.public.sizes import ROOM, Size, decoding, resolve


def _program(model: PublicModel, folder: Path, size: Size, layers: int | None) -> Program:
    return model.build(folder, jnp.bfloat16, size, layers)


def _generation(model: PublicModel, folder: Path, size: Size, layers: int | None) -> Generation:
    return GENERATIONS[model.name](folder, jnp.bfloat16, decoding(resolve(model.sizes, size, layers)))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a model.

    models: the names of the models that have it; empty: all.
    build: makes the program of a model, the folder of checkouts, a size and a number of layers.
    units: counts a step's tokens, images or others, of a model and a size.
    function: what a strategy rewrites of the program.
    outer: makes of that the function to compile.
    start: makes the arguments of the first call of program and parameters.
    donated: the arguments whose memory the results take.
    advance: makes the next call's arguments of the last call's arguments and results.
    compared: what of the first results is compared with plain XLA's, by name.
    steps: steps of a call; times are of one.
    """

    function: Callable[[Any], Callable[..., Any]]
    outer: Callable[[Callable[..., Any]], Callable[..., Any]]
    start: Callable[[Any, Any], tuple[Any, ...]]
    donated: tuple[int, ...]
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    compared: Callable[[Any], dict[str, Any]]
    build: Callable[[PublicModel, Path, Size, int | None], Program | Generation] = _program
    units: Callable[[PublicModel, Size], int] = PublicModel.units
    models: tuple[str, ...] = ()
    steps: int = 1

    def has(self, model: str) -> bool:
        """Tells whether a model has the phase."""
        return not self.models or model in self.models


def _written(result: tuple[jax.Array, Any]) -> dict[str, Any]:
    """Returns what the first step after the prompt writes into the caches, (sequences, heads, head size) each."""
    _, cache = result
    return {"written": [each[:, -ROOM] for each in jax.tree.leaves(cache) if jnp.issubdtype(each.dtype, jnp.floating)]}


PHASES = {
    "forward": Phase(
        function=lambda program: program.forward,
        outer=lambda forward: forward,
        start=lambda program, params: (params, *program.batch),
        donated=(),
        advance=lambda arguments, _: arguments,
        compared=lambda result: {"result": result},
    ),
    "train": Phase(
        function=lambda program: program.loss,
        outer=step_of,
        start=lambda program, params: (params, OPTIMIZER.init(params), *program.batch),
        donated=(0, 1),
        advance=lambda arguments, result: (*result[:2], *arguments[2:]),
        # AdamW hides the sizes of the gradients; its first moments are a tenth of them.
        compared=lambda result: {"loss": result[2], "gradients": result[1][0].mu},
    ),
    "decode": Phase(
        models=tuple(GENERATIONS),
        build=_generation,
        units=lambda model, size: decoding(model.sizes[size]).batch,
        function=lambda generation: generation.step,
        outer=Generation.generating,
        start=lambda generation, params: (params, *generation.prompted(params)),
        donated=(2,),
        advance=lambda arguments, result: (*arguments[:2], result[1]),
        compared=_written,
        steps=ROOM,
    ),
}
