"""Draws docs/images/block-h200.svg: the transformer block's speed under the strategies, from notebooks/results."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from xlafuse.bench.results import load

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "xla": ("XLA", "#c3c7cd"),
    "xla_cudnn": ("XLA, cuDNN attention", "#9498a0"),
    "torch_compile": ("torch.compile", "#efb118"),
    "best": ("xlafuse: best", "#4269d0"),
}
CASES = {
    ("forward", "2x4096"): "forward\n2 × 4096",
    ("forward", "1x512"): "forward\n1 × 512",
    ("forward", "16x1"): "decode\n16 × 1",
    ("forward", "1x1"): "decode\n1 × 1",
    ("grad", "2x4096"): "training\n2 × 4096",
    ("grad", "1x512"): "training\n1 × 512",
}


def main() -> None:
    """Draws one group of bars a shape; a bar is the speed over plain XLA's, both kernel times of one run."""
    plt.rcParams.update({"svg.hashsalt": "xlafuse", "svg.fonttype": "none", "font.size": 9})
    results = load(ROOT / "notebooks/results/block-h200.json")
    shapes = {(shape.phase, shape.spec): shape for shape in results.shapes if shape.op == "llama3-8b"}
    figure, axes = plt.subplots(figsize=(8, 2.9))
    width = 0.2
    for offset, (name, (label, colour)) in enumerate(SHOWN.items()):
        for position, case in enumerate(CASES):
            ratio = shapes[case].speed_up(name, "xla") if name != "xla" else 1.0
            bar = axes.bar(
                position + (offset - 1.5) * width,
                ratio,
                width * 0.92,
                color=colour,
                label=label if not position else None,
            )
            if name in ("best", "torch_compile") or ratio > 1.5:
                axes.bar_label(bar, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(CASES)), list(CASES.values()))
    axes.set_ylabel("speed, XLA = 1")
    axes.set_title("One Llama 3 8B layer on an H200, batch × length; measured kernel time", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 2.8)
    axes.legend(ncols=4, frameon=False, loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/images/block-h200.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
