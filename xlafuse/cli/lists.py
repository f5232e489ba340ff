"""Implements `xlafuse targets` and `xlafuse strategies`."""

from __future__ import annotations

from dataclasses import asdict

from xlafuse.cli.output import print_json, print_table


def print_targets(*, as_json: bool = False) -> None:
    """Prints the targets with their peak rates and the sources of those."""
    from hlo_analysis.targets import load_target, target_names

    targets = {name: load_target(name) for name in target_names()}
    if as_json:
        print_json([{**asdict(target.device), "name": name} for name, target in targets.items()])
        return
    rows = []
    for name, target in targets.items():
        device = target.device
        peak = dict(device.matrix_flops).get("bf16")
        rows.append(
            (
                name,
                f"{device.memory_bandwidth / 1e12:.2f}" if device.memory_bandwidth else "–",
                f"{peak / 1e12:.0f}" if peak else "–",
                str(target.core_count or "–"),
                "recorded" if target.autotune else {"cuda": "default", "attached": "attached"}.get(target.kind, "–"),
                device.description,
            )
        )
    print_table(("target", "TB/s", "bf16\nTFLOP/s", "SMs", "GEMM\nchoice", "what it is"), rows)


def print_strategies(*, as_json: bool = False) -> None:
    """Prints the strategies with their requirements and XLA options."""
    from xlafuse.strategies import STRATEGIES

    if as_json:
        fields = ("name", "description", "requires", "fuses", "compiler_options")
        print_json([{field: getattr(each, field) for field in fields} for each in STRATEGIES.values()])
        return
    rows = [(name, each.description, ", ".join(each.requires) or "–") for name, each in STRATEGIES.items()]
    print_table(("strategy", "what it does", "needs"), rows)
