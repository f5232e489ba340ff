"""The commands of `xlafuse bench`, and their options. What they do is in `bench.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xlafuse.cli.errors import cli_errors

bench = typer.Typer(no_args_is_help=True, help="Measure on an attached NVIDIA GPU.")


@bench.command()
def kernels(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")],
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", help="An operation, several by several options. All by default."),
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", metavar="PHASE", help="forward or backward. Both by default.")
    ] = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="A,B,C", help="Only shapes whose name holds one of these, as 8192x4096, or is one, as =8x8."
        ),
    ] = "",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Timed beside XLA in the same run, where they have the operation: torch_compile, torch_max_autotune, "
            "torch_eager, liger, jax_triton, jla, jax_mosaic, cudnn, cudnn_dense_mask.",
        ),
    ] = None,
    peer_megabytes: Annotated[
        float, typer.Option(metavar="MB", help="Peers only on shapes that move so much; compiling them takes a while.")
    ] = 0.0,
    variants: Annotated[bool, typer.Option("--variants", help="Time every kernel configuration, too.")] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")] = 10,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Begin no new shape of an operation after so many seconds.")
    ] = float("inf"),
) -> None:
    """Measure kernels against XLA, other libraries and the copy ceiling.

    Needs an NVIDIA GPU. Exits with 0 when all of ours was measured, 1 when something failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.cli.bench import KernelRequest, run_kernels

        is_complete = run_kernels(
            KernelRequest(
                operations=tuple(op or ()),
                phases=tuple(phase or ()),
                match=match,
                peers=names(peers) or (),
                peer_bytes=int(peer_megabytes * 1e6),
                variants=variants,
                rounds=rounds,
                seconds=seconds,
                output=output,
            )
        )
    raise typer.Exit(0 if is_complete else 1)


@bench.command()
def block(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")],
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="A transformer block: llama3-8b, gpt2-medium, tiny.")
    ] = "llama3-8b",
    shapes: Annotated[
        str, typer.Option(metavar="A,B,C", help="BATCHxLENGTH, several with commas between.")
    ] = "2x4096,1x512,16x1,1x1",
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Which strategies: see `xlafuse strategies`. All by default.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="forward, grad: the latter with the forward pass. Both by default."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="The same block in PyTorch: torch_compile, torch_max_autotune, torch_eager."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")] = 8,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Begin no new mode of a shape after so many seconds.")
    ] = float("inf"),
) -> None:
    """Measure a whole transformer block under the fusion strategies, forward and as a training step has it.

    Needs an NVIDIA GPU. Exits with 0 when every strategy was measured, 1 when one failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.cli.bench import BlockRequest, run_block

        is_complete = run_block(
            BlockRequest(
                preset=preset,
                shapes=names(shapes) or (),
                strategies=names(strategies) or (),
                modes=names(modes) or (),
                peers=names(peers) or (),
                rounds=rounds,
                seconds=seconds,
                output=output,
            )
        )
    raise typer.Exit(0 if is_complete else 1)


@bench.command()
def choice(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")],
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", help="An operation, several by several options. All by default."),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="forward, grad: the latter with the forward pass. Both by default."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many calls of each operation are drawn.")] = 20,
    numbers: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Only these of the drawn calls, numbered from 0: 7 of the call 0.7."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Draws other calls; the same for the same seed.")] = 0,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")] = 8,
    seconds: Annotated[float, typer.Option(metavar="S", help="Begin no new call after so many seconds.")] = float(
        "inf"
    ),
) -> None:
    """Measure whether calls that name no implementation take the fastest, at sizes that nobody chose.

    Needs an NVIDIA GPU. Exits with 0 when none is more than 2 % behind the best of the operation's implementations, 1
    when one is or something failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.cli.bench import ChoiceRequest, run_choice

        is_kept = run_choice(
            ChoiceRequest(
                operations=tuple(op or ()),
                modes=names(modes) or (),
                count=count,
                numbers=names(numbers) or (),
                seed=seed,
                rounds=rounds,
                seconds=seconds,
                output=output,
            )
        )
    raise typer.Exit(0 if is_kept else 1)


def names(text: str | None) -> tuple[str, ...] | None:
    """'a,b' → ('a', 'b'); nothing typed: None."""
    return tuple(name for part in text.split(",") if (name := part.strip())) if text else None
