"""`xlafuse bench kernels|block|model|choice|compare` and `xlafuse tune`: checks options, measures, prints a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError, cli_errors

if TYPE_CHECKING:
    from xlafuse.bench.results import Results

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
        from pallas_kernels import REGISTRY
        from xlafuse.bench import peers as known_peers
        from xlafuse.bench.kernels import Settings, check_match
        from xlafuse.bench.results import PHASES
        from xlafuse.bench.text import kernel_summary

        operations, wanted = tuple(op or REGISTRY), names(peers)
        _check("operation", operations, REGISTRY)
        _check("phase", phase or (), PHASES)
        known_peers.check_names(wanted)
        check_match(operations, match)
        settings = Settings(
            phases=tuple(phase or PHASES),
            match=match,
            peers=tuple(name for name in wanted if name != "xla"),
            peer_bytes=int(peer_megabytes * 1e6),
            variants=variants,
            rounds=rounds,
            seconds=seconds,
        )
        results = _measured("kernels", operations, settings, output, kernel_summary)
    raise typer.Exit(0 if _is_complete(results, {"xla", "mosaic", "triton"}) else 1)


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
        from xlafuse.bench.block import MODES, PEERS, BlockSettings
        from xlafuse.bench.text import block_summary
        from xlafuse.cli.inputs import block_shape
        from xlafuse.models import get_preset
        from xlafuse.strategies import STRATEGIES, get_strategy

        get_preset(preset)
        chosen = names(strategies) or tuple(STRATEGIES)
        for name in chosen:
            get_strategy(name)
        _check("mode", names(modes), MODES)
        _check("peer", names(peers), PEERS)
        settings = BlockSettings(
            preset=preset,
            strategies=chosen,
            modes=names(modes) or MODES,
            peers=names(peers),
            rounds=rounds,
            seconds=seconds,
        )
        cases = ["x".join(map(str, block_shape((text,)))) for text in names(shapes)]
        results = _measured("block", cases, settings, output, block_summary, stall_seconds=200.0)
    raise typer.Exit(0 if _is_complete(results, chosen) else 1)


@bench.command()
def model(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")],
    preset: Annotated[str, typer.Option(metavar="NAME", help="A model: llama3-8b, gpt2-medium, tiny.")] = "llama3-8b",
    shapes: Annotated[
        str, typer.Option(metavar="A,B,C", help="SEQUENCESxTOKENS, several with commas between.")
    ] = "8x1024",
    strategies: Annotated[
        str, typer.Option(metavar="A,B,C", help="Which strategies: see `xlafuse strategies`.")
    ] = "xla,xla_cudnn,best",
    phases: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="forward, train, prefill, decode. All by default."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="In place of the model's own number of layers.")
    ] = None,
    scan: Annotated[bool, typer.Option("--scan", help="Compile one layer, in a loop over all of them.")] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")] = 5,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Begin no new phase of a shape after so many seconds.")
    ] = float("inf"),
) -> None:
    """Measure a whole language model under the fusion strategies: wall clock, tokens a second, compile time, memory.

    Decoding appends one token to each sequence, in a cache that is donated. Needs an NVIDIA GPU. Exits with 0 when
    every strategy was measured, 1 when one failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.bench.model import PHASES, ModelSettings, model_summary
        from xlafuse.cli.inputs import block_shape
        from xlafuse.models.decoder import get_decoder
        from xlafuse.strategies import get_strategy

        get_decoder(preset)
        for name in names(strategies):
            get_strategy(name)
        _check("phase", names(phases), PHASES)
        settings = ModelSettings(
            model=preset,
            strategies=names(strategies),
            phases=names(phases) or PHASES,
            layers=layers,
            is_scanned=scan,
            rounds=rounds,
            seconds=seconds,
        )
        cases = ["x".join(map(str, block_shape((text,)))) for text in names(shapes)]
        results = _measured("model", cases, settings, output, model_summary, stall_seconds=300.0)
    raise typer.Exit(0 if _is_complete(results, names(strategies)) else 1)


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
    """Measure whether calls that name no implementation take the fastest, at random sizes.

    Needs an NVIDIA GPU. Exits with 0 when none is more than 2 % slower than the operation's best implementation, 1 when
    one is or something failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from pallas_kernels import REGISTRY
        from xlafuse.bench.choice import MODES, ChoiceSettings, is_kept
        from xlafuse.bench.text import choice_summary

        operations = tuple(op or REGISTRY)
        _check("operation", operations, REGISTRY)
        _check("mode", names(modes), MODES)
        for number in names(numbers):
            if not number.isdecimal():
                raise InputError(f"expected numbers of calls with commas between, as 3,17, got {number!r}")
        drawn = [int(number) for number in names(numbers)] or range(count)
        settings = ChoiceSettings(modes=names(modes) or MODES, rounds=rounds, seed=seed, until=time.time() + seconds)
        calls = tuple(dict.fromkeys(f"{name} {number}" for name in operations for number in drawn))
        results = _measured("choice", calls, settings, output, choice_summary)
    raise typer.Exit(0 if is_kept(results) else 1)


@bench.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A file of results.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later one, of the same GPU.")],
) -> None:
    """Show what moved between two files of results: medians apart by more than noise (p20 to p80) and 2 %.

    Needs no GPU. Exits with 0 when nothing of ours is slower, 1 when something is, 2 on files that cannot be compared.
    """
    with cli_errors():
        from xlafuse.bench.moves import lines, moves
        from xlafuse.bench.results import load

        found, compared = moves(load(old), load(new))
        for line in lines(found, compared):
            typer.echo(line)
    raise typer.Exit(1 if any(move.is_regression for move in found) else 0)


def tune(
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", help="An operation, several by several options. All by default."),
    ] = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="A,B,C", help="Only shapes whose name holds one of these, as 8192-4096, or is one, as =8-8."
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The table. By default the user's own, in the cache folder."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: take what `bench kernels --variants` kept in this file."),
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Time shapes again that the table already has.")] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")] = 8,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Begin no new shape of an operation after so many seconds.")
    ] = float("inf"),
) -> None:
    """Time kernel configurations on the attached NVIDIA GPU and keep the fastest for dispatch.

    Written after every shape: a run that was cut short goes on where it ended. Exits with 2 on bad input or no GPU.
    """
    with cli_errors():
        from pallas_kernels import tuning
        from xlafuse.bench import tune as tuner
        from xlafuse.bench.environment import gpu_state
        from xlafuse.bench.kernels import NoGpuError, Settings
        from xlafuse.bench.results import load

        operations = tuple(op or tuner.tunable())
        _check("tuned operation", operations, tuner.tunable())
        kept = None if results is None else load(results)
        # nvidia-smi and JAX give one name, but asking JAX would take the memory that the worker needs.
        kind = gpu_state().get("gpu") if kept is None else kept.runs[0].environment.device_kind
        if kind is None:
            raise NoGpuError("xlafuse tune measures on an attached NVIDIA GPU, and nvidia-smi names none here.")
        table = output or tuning.cache_folder() / tuning.file_name(kind)
        if kept is not None:
            tuning.add(table, kind, tuner.entries(kept, operations))
        else:
            settings = Settings(match=match, rounds=rounds, seconds=seconds)
            tuner.run(operations, settings, table, table.with_suffix(".log.json"), device_kind=kind, anew=anew)
        for line in tuner.lines(tuning.read(table, kind)):
            typer.echo(line)
        typer.echo(f"wrote {table}")


def names(text: str | None) -> tuple[str, ...]:
    """'a,b' → ('a', 'b')."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def _check(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    from xlafuse.errors import UnknownNameError

    for name in given:
        if name not in known:
            raise UnknownNameError(what, name, known)


def _measured(
    benchmark: str,
    items: Sequence[str],
    settings: Any,
    output: Path,
    summary: Callable[[Results], list[str]],
    **options: Any,
) -> Results:
    """Measures in another process, and prints the summary."""
    from xlafuse.bench import supervisor

    results = supervisor.run(items, settings, output, benchmark=benchmark, **options)
    for line in summary(results):
        typer.echo(line)
    typer.echo(f"wrote {output}")
    return results


def _is_complete(results: Results, ours: Collection[str]) -> bool:
    """Whether nothing of ours failed or was left out."""
    failed = [p for shape in results.shapes for p in shape.problems if p.kind == "failed" and p.candidate in ours]
    return not failed and not any(run.left_out for run in results.runs)
