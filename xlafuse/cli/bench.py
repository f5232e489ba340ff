"""Implements `xlafuse bench kernels|block|model|choice|compare` and `xlafuse tune`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError, cli_errors
from xlafuse.cli.options import names

if TYPE_CHECKING:
    from xlafuse.bench.results import Results

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")]
Operations = Annotated[
    list[str] | None, typer.Option("--op", metavar="NAME", help="An operation; repeat for several. Default: all.")
]
Modes = Annotated[
    str | None, typer.Option(metavar="A,B", help="forward, or grad: forward and backward pass. Default: both.")
]
Rounds = Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")]

bench = typer.Typer(no_args_is_help=True, help="Measure on an attached NVIDIA GPU.")


@bench.command()
def kernels(
    output: Output,
    op: Operations = None,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", metavar="PHASE", help="forward or backward. Default: both.")
    ] = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="Only shapes whose name contains one of these, such as 8192x4096, or equals one, such as =8x8.",
        ),
    ] = "",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Libraries to time in the same run, if they have the operation: torch_compile, "
            "torch_max_autotune, torch_eager, liger, quack, jax_triton, jla, jax_mosaic, cudnn, cudnn_dense_mask, "
            "fa3, fa4, fa4_deterministic.",
        ),
    ] = None,
    peer_megabytes: Annotated[
        float,
        typer.Option(
            metavar="MB", help="Time peers only on shapes that move at least this much; compiling them takes a while."
        ),
    ] = 0.0,
    variants: Annotated[bool, typer.Option("--variants", help="Also time the kernel configurations to tune.")] = False,
    rounds: Rounds = 10,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Start no shape of an operation after this many seconds.")
    ] = float("inf"),
) -> None:
    """Measure kernels against XLA, other libraries and the copy ceiling.

    Needs an NVIDIA GPU. Exits with 0 if all of our kernels were measured, 1 if something failed, 2 on bad input or no
    GPU.
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
    output: Output,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="A transformer block: llama3-8b, gpt2-medium, tiny.")
    ] = "llama3-8b",
    shapes: Annotated[
        str, typer.Option(metavar="A,B,C", help="BATCHxLENGTH, separated by commas.")
    ] = "2x4096,1x512,16x1,1x1",
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Strategies to time; see `xlafuse strategies`. Default: all.")
    ] = None,
    modes: Modes = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="The same block in PyTorch (torch_compile, torch_max_autotune, torch_eager), and in JAX without jit "
            "(jax_eager).",
        ),
    ] = None,
    rounds: Rounds = 8,
    seconds: Annotated[float, typer.Option(metavar="S", help="Start no case after this many seconds.")] = float("inf"),
) -> None:
    """Measure a whole transformer block under the fusion strategies, forward only and with the backward pass.

    Needs an NVIDIA GPU. Exits with 0 if every strategy was measured, 1 if one failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.bench.block import MODES, PEERS, BlockSettings
        from xlafuse.bench.text import block_summary
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
            peers=names(peers),
            rounds=rounds,
            until=time.time() + seconds,
        )
        cases = _cases(names(shapes), names(modes) or MODES)
        results = _measured("block", cases, settings, output, block_summary, stall_seconds=200.0)
    raise typer.Exit(0 if _is_complete(results, chosen) else 1)


@bench.command()
def model(
    output: Output,
    preset: Annotated[str, typer.Option(metavar="NAME", help="A model: llama3-8b, gpt2-medium, tiny.")] = "llama3-8b",
    shapes: Annotated[str, typer.Option(metavar="A,B,C", help="SEQUENCESxTOKENS, separated by commas.")] = "8x1024",
    strategies: Annotated[
        str, typer.Option(metavar="A,B,C", help="Strategies to time; see `xlafuse strategies`.")
    ] = "xla,xla_cudnn,best",
    phases: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="forward, train, prefill, decode. Default: all."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="The same model in PyTorch: torch_eager, torch_compile, torch_reduce_overhead, torch_max_autotune.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of layers, instead of the model's own.")
    ] = None,
    scan: Annotated[bool, typer.Option("--scan", help="Compile one layer in a loop over all of them.")] = False,
    rounds: Rounds = 5,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Start no phase, strategy or peer after this many seconds.")
    ] = float("inf"),
) -> None:
    """Measure a whole language model under the fusion strategies: wall clock, tokens a second, compile time, memory.

    Decoding appends one token to each sequence, in a donated cache. Needs an NVIDIA GPU. Exits with 0 if every strategy
    was measured, 1 if one failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.bench.model import PEERS, PHASES, ModelSettings, model_summary
        from xlafuse.models.decoder import get_decoder
        from xlafuse.strategies import get_strategy

        get_decoder(preset)
        for name in names(strategies):
            get_strategy(name)
        _check("phase", names(phases), PHASES)
        _check("peer", names(peers), PEERS)
        settings = ModelSettings(
            model=preset,
            strategies=names(strategies),
            peers=names(peers),
            layers=layers,
            is_scanned=scan,
            rounds=rounds,
            until=time.time() + seconds,
        )
        cases = _cases(names(shapes), names(phases) or PHASES)
        results = _measured("model", cases, settings, output, model_summary, stall_seconds=300.0)
    raise typer.Exit(0 if _is_complete(results, names(strategies)) else 1)


@bench.command()
def choice(
    output: Output,
    op: Operations = None,
    modes: Modes = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of calls to draw for each operation.")] = 20,
    numbers: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Only these of the drawn calls, counted from 0; call 0.7 has number 7."),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the calls; the same seed draws the same calls.")
    ] = 0,
    rounds: Rounds = 8,
    seconds: Annotated[float, typer.Option(metavar="S", help="Start no call after this many seconds.")] = float("inf"),
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Threads that compile calls ahead.")] = 1,
) -> None:
    """Measure whether calls that name no implementation take the fastest one, at random sizes.

    Needs an NVIDIA GPU. Exits with 0 if no call is more than 2 % slower than the operation's best implementation, 1 if
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
        until = time.time() + seconds
        settings = ChoiceSettings(modes=names(modes) or MODES, rounds=rounds, seed=seed, until=until, jobs=jobs)
        calls = tuple(dict.fromkeys(f"{name} {number}" for name in operations for number in drawn))
        results = _measured("choice", calls, settings, output, choice_summary)
    raise typer.Exit(0 if is_kept(results) else 1)


@bench.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A file of results.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later file, of the same kind of GPU.")],
) -> None:
    """Compare two files of results: list medians that differ by more than 2 % and by more than noise (p20 to p80).

    Needs no GPU. Exits with 0 if none of our candidates is slower, 1 if one is, 2 on files that cannot be compared.
    """
    with cli_errors():
        from xlafuse.bench.compare import compare as compared
        from xlafuse.bench.results import load

        lines, slower = compared(load(old), load(new))
        print("\n".join(lines))
    raise typer.Exit(1 if slower else 0)


def tune(
    op: Operations = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="Only shapes whose name contains one of these, such as 8192-4096, or equals one, such as =8-8.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File of the table. Default: the user's own, in the cache folder."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure nothing; take the results of `bench kernels --variants` in this file."
        ),
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Time shapes again that are already in the table.")] = False,
    rounds: Rounds = 8,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Start no shape of an operation after this many seconds.")
    ] = float("inf"),
) -> None:
    """Time kernel configurations on the attached NVIDIA GPU and keep the fastest for dispatch.

    Writes the table after every shape; an interrupted run continues where it ended. Exits with 2 on bad input or no
    GPU.
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
        # nvidia-smi and JAX use the same name, but asking JAX would take the memory that the worker needs.
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
            print(line)
        print(f"wrote {table}")


def _check(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    from xlafuse.errors import UnknownNameError

    for name in given:
        if name not in known:
            raise UnknownNameError(what, name, known)


def _cases(shapes: Sequence[str], modes: Sequence[str]) -> list[str]:
    """Returns each mode at each shape, as "forward 2x4096".

    Raises:
        InputError: a shape is not two numbers.
    """
    from xlafuse.cli.inputs import block_shape

    return [f"{mode} {'x'.join(map(str, block_shape((text,))))}" for text in shapes for mode in modes]


def _measured(
    benchmark: str,
    items: Sequence[str],
    settings: Any,
    output: Path,
    summary: Callable[[Results], list[str]],
    **options: Any,
) -> Results:
    from xlafuse.bench import supervisor

    results = supervisor.run(items, settings, output, benchmark=benchmark, **options)
    for line in summary(results):
        print(line)
    print(f"wrote {output}")
    return results


def _is_complete(results: Results, ours: Collection[str]) -> bool:
    """Tells whether all of our candidates were measured."""
    failed = [p for shape in results.shapes for p in shape.problems if p.kind == "failed" and p.candidate in ours]
    return not failed and not any(run.left_out for run in results.runs)
