"""Implements `xlafuse targets` and `xlafuse strategies`."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xlafuse.cli.output import print_json


def print_targets(*, as_json: bool = False) -> None:
    """Prints the targets with their peak rates and the sources of those."""
    from hlo_analysis.targets import load_target, target_names

    if as_json:
        devices = {name: asdict(load_target(name).device) for name in target_names()}
        print_json([{**device, "name": name} for name, device in devices.items()])
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("target", no_wrap=True)
    for heading in ("TB/s", "bf16\nTFLOP/s", "SMs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("GEMM\nchoice", no_wrap=True)
    table.add_column("what it is", min_width=22)
    for name in target_names():
        target = load_target(name)
        device = target.device
        peak = dict(device.matrix_flops).get("bf16")
        recorded = "recorded" if target.autotune else {"cuda": "default", "attached": "attached"}.get(target.kind, "–")
        table.add_row(
            name,
            f"{device.memory_bandwidth / 1e12:.2f}" if device.memory_bandwidth else "–",
            f"{peak / 1e12:.0f}" if peak else "–",
            str(target.core_count) if target.core_count else "–",
            recorded,
            escape(device.description),
        )
    _print(table)


def print_strategies(*, as_json: bool = False) -> None:
    """Prints the strategies with their requirements and XLA options."""
    from xlafuse.strategies import STRATEGIES

    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "description": each.description,
                    "requires": each.requires,
                    "fuses": each.fuses,
                    "compiler_options": dict(each.compiler_options),
                }
                for name, each in STRATEGIES.items()
            ]
        )
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("what it does", min_width=30)
    table.add_column("needs", no_wrap=True)
    for name, strategy in STRATEGIES.items():
        table.add_row(name, escape(strategy.description), ", ".join(strategy.requires) or "–")
    _print(table)


def _print(table: Table) -> None:
    from hlo_analysis.report.console import fitted

    console = Console()
    console.print(fitted(console, [lambda: table]))
