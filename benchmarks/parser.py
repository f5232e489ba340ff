"""Speed of the HLO text parser and of the whole analysis on 1 to 64 layers of the transformer block.

    python benchmarks/parser.py [--layers 1,2,4,8,16,32,64] [--modes forward,grad] [--block tiny]

Every program is compiled for an H200 (none is needed). The text that XLA dumps of the module that it hands to the GPU
is parsed, and the capture is analysed. One core, pure Python. Neither the cost per MB nor the analysis' time per
launch should depend on the number of layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from hlo_analysis import analyze
from hlo_analysis.capture import Capture, capture
from hlo_analysis.hlo import parse_module
from xlafuse.catalogue import KERNELS
from xlafuse.models import block_function

LAYERS = (1, 2, 4, 8, 16, 32, 64)
SHAPE = (2, 256)
SECONDS = 2.0


def stack(block: str, layers: int) -> tuple[Callable[..., Any], list[Any]]:
    """`layers` blocks with weights of their own, one after another, and the shapes of weights and input."""
    apply, (weights, x, *positions) = block_function(block, SHAPE)

    def forward(params: list[Any], x: jax.Array, *positions: jax.Array) -> jax.Array:
        for layer, layer_params in enumerate(params):
            with jax.named_scope(f"layer_{layer}"):
                x = apply(layer_params, x, *positions)
        return x

    return forward, [[weights] * layers, x, *positions]


def parse_seconds(text: str) -> tuple[float, int]:
    """The best of many parses, which together take `SECONDS` or longer, and the number of instructions."""
    best, total, instructions = float("inf"), 0.0, 0
    while total < SECONDS:
        start = time.process_time()
        module = parse_module(text)
        elapsed = time.process_time() - start
        best, total = min(best, elapsed), total + elapsed
        instructions = sum(len(computation.instructions) for computation in module.computations.values())
    return best, instructions


def analysis_seconds(recorded: Capture) -> tuple[float, int]:
    """The best of three analyses of a capture, and the number of launches."""
    best, launches = float("inf"), 0
    for _ in range(3):
        start = time.process_time()
        launches = len(analyze(recorded, catalogue=KERNELS).launches)
        best = min(best, time.process_time() - start)
    return best, launches


def main() -> None:
    """Compile, parse, analyse and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="comma-separated numbers of layers")
    parser.add_argument("--modes", default="forward,grad", help="forward, grad or both")
    parser.add_argument("--block", default="tiny", help="a preset of xlafuse.models; sizes hardly change the text")
    arguments = parser.parse_args()

    table = Table(title=f"parse_module on the final HLO of the {arguments.block} block on an H200, and analyze")
    columns = ("program", "layers", "instructions", "MB", "seconds", "MB/s", "launches", "analyze s", "ms/launch")
    for column in columns:
        table.add_column(column, justify="left" if column == "program" else "right")
    console = Console()
    with console.status("compiling") as status:
        for mode in arguments.modes.split(","):
            for layers in map(int, arguments.layers.split(",")):
                status.update(f"compiling {mode}, {layers} layers")
                function, shapes = stack(arguments.block, layers)
                recorded = capture(function, *shapes, target="h200", mode=mode, autotune=None, timeout=900)
                text = recorded.text("final_hlo")
                assert text is not None, "this capture has no final module: is the extra 'deviceless' installed?"
                status.update(f"parsing {mode}, {layers} layers")
                seconds, instructions = parse_seconds(text)
                status.update(f"analysing {mode}, {layers} layers")
                whole, launches = analysis_seconds(recorded)
                megabytes = len(text) / 1e6
                table.add_row(
                    mode,
                    str(layers),
                    str(instructions),
                    f"{megabytes:.2f}",
                    f"{seconds:.3f}",
                    f"{megabytes / seconds:.1f}",
                    str(launches),
                    f"{whole:.3f}",
                    f"{whole / launches * 1e3:.2f}",
                )
    console.print(table)


if __name__ == "__main__":
    main()
