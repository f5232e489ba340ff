"""Settings of the benchmarks. Each field with an option is one of `xlafuse bench`; this module loads no JAX."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

PHASES = ("forward", "backward")
MODES = ("forward", "grad")
""""grad" computes the outputs and the gradients, as a training step does."""

TORCH_MODES = {
    "torch_eager": None,
    "torch_compile": "default",
    "torch_reduce_overhead": "reduce-overhead",
    "torch_max_autotune": "max-autotune",
}
"""Peers that run a whole model in PyTorch, and torch.compile's mode of each. The last two launch CUDA graphs."""

Match = Annotated[
    str,
    typer.Option(
        metavar="A,B,C",
        help="Only shapes whose name contains one of these, such as 8192x4096, or equals one, such as =8x8.",
    ),
]
Seconds = Annotated[float, typer.Option(metavar="S", help="Start no shape of an operation after this many seconds.")]
Rounds = Annotated[int, typer.Option(metavar="N", help="How often the candidates take turns.")]
_Until = Annotated[
    float,
    typer.Option(
        "--seconds",
        metavar="S",
        help="Start nothing after this many seconds.",
        parser=lambda seconds: time.time() + float(seconds),
        show_default=False,
    ),
]
_Strategies = Annotated[
    tuple[str, ...],
    typer.Option(metavar="A,B,C", help="Strategies to time; see `xlafuse strategies`."),
]
_Preset = Annotated[
    str,
    typer.Option("--preset", metavar="NAME", help="llama3-8b, gpt2-medium, mixtral-8x7b, qwen3-30b-a3b, tiny."),
]


_TorchPeers = Annotated[
    tuple[str, ...], typer.Option(metavar="A,B,C", help=f"The same model in PyTorch: {', '.join(TORCH_MODES)}.")
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the kernel benchmark.

    match: selects the shapes; see `xlafuse.bench.kernels.is_wanted`.
    peers: see `xlafuse.bench.peers.PEERS`.
    seconds: no shape starts after this time.
    only: "operation spec" of the shapes to measure, or empty for all. If given, kernels run with their untuned
        configurations.
    """

    phases: Annotated[tuple[str, ...], typer.Option("--phase", metavar="A,B", help="forward, backward.")] = PHASES
    match: Match = ""
    peers: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="A,B,C",
            help="Libraries to time in the same run, if they have the operation: torch_compile, torch_eager, liger, "
            "quack, jax_triton, jla, jax_mosaic, cudnn, fa3, fa4, fa4_deterministic, xla_bf16.",
        ),
    ] = ()
    variants: Annotated[bool, typer.Option("--variants", help="Also time the kernel configurations to tune.")] = False
    rounds: Rounds = 10
    calls: int = 4
    seconds: Seconds = float("inf")
    seed: int = 0
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """What the other benchmarks share. until: seconds since the epoch after which nothing starts."""

    rounds: Rounds = 8
    calls: int = 3
    until: _Until = float("inf")
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockSettings(_Timed):
    """Settings of the block benchmark; strategies: all if empty; peers: names from `xlafuse.bench.block.PEERS`."""

    preset: _Preset = "llama3-8b"
    strategies: _Strategies = ()
    peers: Annotated[
        tuple[str, ...], typer.Option(metavar="A,B", help="The same block in PyTorch: torch_compile, torch_eager.")
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Timed):
    """Settings of the model benchmark.

    layers: replaces the model's number of layers.
    until: after it no strategy or peer is compiled, either.
    """

    model: _Preset = "llama3-8b"
    strategies: _Strategies = ("xla", "xla_cudnn", "best")
    peers: _TorchPeers = ()
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of layers, instead of the model's own.")
    ] = None
    is_scanned: Annotated[bool, typer.Option("--scan", help="Compile one layer in a loop over all of them.")] = False
    rounds: Rounds = 5
    calls: int = 4


@dataclass(frozen=True, kw_only=True)
class PublicSettings(_Timed):
    """Settings of the benchmark of public models.

    models: all if empty; see `xlafuse.bench.public.sources`.
    layers: all that the published model has if None.
    size: "tiny" for tests.
    """

    checkouts: Annotated[
        Path, typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Folder of the models' repositories.")
    ]
    packages: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Folder of packages that the models of JAX alone import, such as a `transformers` that has them.",
        ),
    ] = None
    models: Annotated[tuple[str, ...], typer.Option(metavar="A,B,C", help="Models. Default: all.")] = ()
    phases: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="A,B,C",
            help="forward; train: a step with AdamW; decode: a token of generation, not in the default.",
        ),
    ] = ("forward", "train")
    strategies: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="A,B,C",
            help="Strategies to time, the first as the baseline; see `xlafuse strategies`. fused_allowed: fused with "
            "all allowances.",
        ),
    ] = ("xla", "fused", "fused_allowed")
    peers: _TorchPeers = ()
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most so many layers. Default: all of the model.")
    ] = None
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Cases that compile at the same time, which may disturb XLA's autotuning."
        ),
    ] = 1
    size: Literal["tiny", "page", "real"] = "real"
    rounds: Rounds = 5
    calls: int = 3


@dataclass(frozen=True, kw_only=True)
class MeshSettings(_Timed):
    """Settings of the mesh benchmark.

    peers: names from `xlafuse.bench.mesh.PEERS`.
    mesh: of all attached GPUs, along the axis that the kind of parallel needs, if empty.
    """

    model: _Preset = "llama3-8b"
    strategies: _Strategies = ("xla", "xla_cudnn", "best")
    peers: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="A,B",
            help="shard_map: the gradient with collectives written by hand; torch_fsdp: the training step under "
            "PyTorch's FSDP.",
        ),
    ] = ()
    mesh: Annotated[
        str, typer.Option(metavar="AXIS=N,...", help="Mesh of the GPUs, as data=2,tensor=2. Default: one axis.")
    ] = ""
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of layers.")] = 2


@dataclass(frozen=True, kw_only=True)
class ChoiceSettings(_Timed):
    """Settings of the choice benchmark.

    seed: seeds both the drawn calls and their values.
    jobs: threads that compile calls before they are timed.
    """

    modes: Annotated[tuple[str, ...], typer.Option(metavar="A,B", help="forward, grad: with the backward pass.")] = (
        MODES
    )
    calls: int = 4
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the calls; the same seed draws the same calls.")
    ] = 0
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Threads that compile calls ahead.")] = 1
