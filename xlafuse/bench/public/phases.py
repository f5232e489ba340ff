"""What is measured of a public model: by phase, what is compiled and how its calls follow one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from xlafuse.bench.public.programs import OPTIMIZER, Program, PublicModel, step_of
from xlafuse.bench.public.sizes import Size


def _program(model: PublicModel, folder: Path, size: Size, layers: int | None) -> Program:
    return model.build(folder, jnp.bfloat16, size, layers)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a model.

    build: makes the program of a model, the folder of checkouts, a size and a number of layers.
    units: counts a call's tokens, images or others, of a model and a size.
    function: what a strategy rewrites of the program.
    outer: makes of that the function to compile.
    start: makes the arguments of the first call of program and parameters.
    donated: the arguments whose memory the results take.
    advance: makes the next call's arguments of the last call's arguments and results.
    compared: what of the first results is compared with plain XLA's, by name.
    """

    function: Callable[[Program], Callable[..., Any]]
    outer: Callable[[Callable[..., Any]], Callable[..., Any]]
    start: Callable[[Program, Any], tuple[Any, ...]]
    donated: tuple[int, ...]
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    compared: Callable[[Any], dict[str, Any]]
    build: Callable[[PublicModel, Path, Size, int | None], Program] = _program
    units: Callable[[PublicModel, Size], int] = PublicModel.units


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
}
