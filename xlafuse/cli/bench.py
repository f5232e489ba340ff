"""Implements `xlafuse bench kernels|block|model|public|mesh|choice|compare` and `xlafuse tune`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.bench.settings import (
    MODES,
    PHASES,
    TORCH_MODES,
    BlockSettings,
    ChoiceSettings,
    Match,
    MeshSettings,
    ModelSettings,
    PublicSettings,
    Rounds,
    Seconds,
    Settings,
)
from xlafuse.cli.errors import InputError, cli_errors
from xlafuse.cli.options import names, with_options

if TYPE_CHECKING:
    from xlafuse.bench.results import Results

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")]
Operations = Annotated[
    list[str] | None, typer.Option("--op", metavar="NAME", help="An operation; repeat for several. Default: all.")
]

bench = typer.Typer(no_args_is_help=True, help="Measure on an attached NVIDIA GPU.")


def _kernels(settings: Settings, output: Output, op: Operations = None) -> None:
    """Measure kernels against XLA, other libraries and the copy ceiling.

    Needs an NVIDIA GPU. Exits with 0 if all of our kernels were measured, 1 if something failed, 2 on bad input or no
    GPU.
    """
    from pallas_kernels import REGISTRY
    from xlafuse.bench import peers
    from xlafuse.bench.kernels import check_match

    operations = _checked("operation", op or REGISTRY, REGISTRY)
    _checked("phase", settings.phases, PHASES)
    peers.check_names(settings.peers)
    check_match(operations, settings.match)
    results = _measured("kernels", operations, settings, output)
    raise typer.Exit(0 if _is_complete(results, {"xla", "mosaic", "triton"}) else 1)


def _block(
    settings: BlockSettings,
    output: Output,
    shapes: Annotated[
        str, typer.Option(metavar="A,B,C", help="BATCHxLENGTH, separated by commas.")
    ] = "2x4096,1x512,16x1,1x1",
    modes: Annotated[
        str, typer.Option(metavar="A,B", help="forward, or grad: forward and backward pass.")
    ] = "forward,grad",
) -> None:
    """Measure a whole transformer block under the fusion strategies, forward only and with the backward pass.

    Needs an NVIDIA GPU. Exits with 0 if every strategy was measured, 1 if one failed, 2 on bad input or no GPU.
    """
    from xlafuse.bench.block import PEERS
    from xlafuse.models import get_preset
    from xlafuse.strategies import resolve_strategies

    get_preset(settings.preset)
    strategies = settings.strategies or tuple(each.name for each in resolve_strategies(None))
    settings = replace(settings, strategies=strategies)
    cases = _cases(shapes, _checked("mode", names(modes), MODES))
    _under_strategies("block", cases, settings, output, PEERS, stall_seconds=200.0)


def _model(
    settings: ModelSettings,
    output: Output,
    shapes: Annotated[str, typer.Option(metavar="A,B,C", help="SEQUENCESxTOKENS, separated by commas.")] = "8x1024",
    phases: Annotated[
        str, typer.Option(metavar="A,B", help="Which parts of training and generation.")
    ] = "forward,train,prefill,decode",
) -> None:
    """Measure a whole language model under the fusion strategies: wall clock, tokens a second, compile time, memory.

    Decoding appends one token to each sequence, in a donated cache. Needs an NVIDIA GPU. Exits with 0 if every strategy
    was measured, 1 if one failed, 2 on bad input or no GPU.
    """
    from xlafuse.bench import model
    from xlafuse.models.decoder import get_decoder

    get_decoder(settings.model)
    cases = _cases(shapes, _checked("phase", names(phases), model.PHASES))
    _under_strategies("model", cases, settings, output, TORCH_MODES, stall_seconds=560.0)


def _public(settings: PublicSettings, output: Output) -> None:
    """Measure public models as published: wall clock, tokens or images a second, MFU, compile time, memory, errors.

    Needs the packages and repositories that docs/public-models.md names, and an NVIDIA GPU. Exits with 0 if every
    strategy was measured, 1 if one failed or a model could not be imported, 2 on bad input or no GPU.
    """
    from xlafuse.bench.public.bench import ALLOWED
    from xlafuse.bench.public.phases import PHASES
    from xlafuse.bench.public.sources import MODELS

    if not settings.strategies:
        raise InputError("--strategies names none; its first is what the others are compared with, as in xla,fused")
    known = [model.name for model in MODELS]
    models = _checked("model", settings.models or known, known)
    phases = _checked("phase", settings.phases, PHASES)
    cases = [f"{model} {phase}" for model in models for phase in phases if PHASES[phase].has(model)]
    for phase in phases:
        if left_out := [model for model in models if not PHASES[phase].has(model)]:
            print(f"{phase}: {', '.join(PHASES[phase].models)}; left out: {', '.join(left_out)}")
    if not cases:
        raise InputError(
            f"no model of --models has a phase of --phases; decode has {', '.join(PHASES['decode'].models)}"
        )
    _under_strategies("public", cases, settings, output, TORCH_MODES, more=(ALLOWED,), stall_seconds=560.0)


def _mesh(
    settings: MeshSettings,
    output: Output,
    shapes: Annotated[
        str, typer.Option(metavar="A,B,C", help="SEQUENCESxTOKENS of all GPUs, separated by commas.")
    ] = "4x4096",
    parallel: Annotated[
        str, typer.Option(metavar="A,B", help="dp: data, fsdp: fully sharded, tp: tensor, sp: sequence, ep: expert.")
    ] = "dp,fsdp,tp,sp",
    phases: Annotated[
        str, typer.Option(metavar="A,B", help="gradient: of a stack of layers; train: a step of the model, with fsdp.")
    ] = "gradient,train",
) -> None:
    """Measure layers and a training step on several GPUs: wall clock, tokens a second a GPU, share of the peak.

    Needs NVIDIA GPUs of one host. Exits with 0 if every strategy was measured, 1 if one failed, 2 on bad input or no
    GPU.
    """
    from xlafuse.bench import mesh
    from xlafuse.models.decoder import get_decoder
    from xlafuse.models.shardings import PARALLEL, layout_of, parse_mesh

    get_decoder(settings.model)
    parallels = _checked("kind of parallel", names(parallel), PARALLEL)
    for kind in parallels if settings.mesh else ():
        layout_of(parse_mesh(settings.mesh), kind)
    kinds = [f"{phase} {kind}" for phase in _checked("phase", names(phases), mesh.PHASES) for kind in parallels]
    cases = _cases(shapes, [each for each in kinds if not each.startswith("train") or each == "train fsdp"])
    _under_strategies("mesh", cases, settings, output, mesh.PEERS, stall_seconds=400.0)


def _choice(
    settings: ChoiceSettings,
    output: Output,
    op: Operations = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of calls to draw for each operation.")] = 20,
) -> None:
    """Measure whether calls that name no implementation take the fastest one, at random sizes.

    Needs an NVIDIA GPU. Exits with 0 if no call is more than 3 % and 0.5 µs slower than the operation's best
    implementation, 1 if one is or something failed, 2 on bad input or no GPU.
    """
    from pallas_kernels import REGISTRY
    from xlafuse.bench.choice import is_kept

    _checked("mode", settings.modes, MODES)
    operations = _checked("operation", op or REGISTRY, REGISTRY)
    calls = [f"{name} {number}" for name in operations for number in range(count)]
    results = _measured("choice", calls, settings, output)
    raise typer.Exit(0 if is_kept(results) else 1)


bench.command("kernels")(with_options(_kernels, Settings))
bench.command("block")(with_options(_block, BlockSettings))
bench.command("model")(with_options(_model, ModelSettings))
bench.command("public")(with_options(_public, PublicSettings))
bench.command("mesh")(with_options(_mesh, MeshSettings))
bench.command("choice")(with_options(_choice, ChoiceSettings))


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
    match: Match = "",
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
    seconds: Seconds = float("inf"),
) -> None:
    """Time kernel configurations on the attached NVIDIA GPU and keep the fastest for dispatch.

    Writes the table after every shape; an interrupted run continues where it ended. Exits with 2 on bad input or no
    GPU.
    """
    with cli_errors():
        from pallas_kernels import tuning
        from xlafuse.bench import tune as tuner
        from xlafuse.bench.environment import gpu_state
        from xlafuse.bench.kernels import NoGpuError
        from xlafuse.bench.results import load

        operations = _checked("tuned operation", op or tuner.tunable(), tuner.tunable())
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


def _checked(what: str, given: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names, each once; raises `UnknownNameError` for one that is not known."""
    from xlafuse.errors import UnknownNameError

    for name in given:
        if name not in known:
            raise UnknownNameError(what, name, known)
    return tuple(dict.fromkeys(given))


def _cases(shapes: str, modes: Iterable[str]) -> list[str]:
    """Pairs each mode with each shape, as "forward 2x4096"; raises `InputError` for a malformed shape."""
    from xlafuse.cli.inputs import block_shape

    return [f"{mode} {'x'.join(map(str, block_shape((text,))))}" for text in names(shapes) for mode in modes]


def _under_strategies(
    benchmark: str,
    cases: Sequence[str],
    settings: Any,
    output: Path,
    peers: Iterable[str],
    more: Sequence[str] = (),
    **options: Any,
) -> None:
    """Runs a benchmark's cases under the chosen strategies; exits with 1 if a strategy failed.

    more: strategies of this benchmark alone.
    """
    from xlafuse.strategies import STRATEGIES

    _checked("strategy", settings.strategies, (*STRATEGIES, *more))
    _checked("peer", settings.peers, peers)
    results = _measured(benchmark, cases, settings, output, **options)
    raise typer.Exit(0 if _is_complete(results, settings.strategies) else 1)


def _measured(
    benchmark: str,
    items: Sequence[str],
    settings: Any,
    output: Path,
    **options: Any,
) -> Results:
    from xlafuse.bench import supervisor
    from xlafuse.bench.text import summary

    results = supervisor.run(items, settings, output, benchmark=benchmark, **options)
    for line in summary(results):
        print(line)
    print(f"wrote {output}")
    return results


def _is_complete(results: Results, ours: Collection[str]) -> bool:
    """Tells whether all of our candidates were measured."""
    failed = [p for shape in results.shapes for p in shape.problems if p.kind == "failed" and p.candidate in ours]
    return not failed and not any(run.left_out for run in results.runs)
