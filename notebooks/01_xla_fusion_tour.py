# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What XLA fuses in a transformer block, and what it does not
#
# XLA decides which operations of a JAX program share a GPU kernel. This notebook asks it, for one layer of Llama 3 8B
# on an H200, and needs no GPU: the compiler runs here, for a device that is not here, and the choices that depend on
# measurements (which matrix-product kernel is fastest) are replayed from a recording made on a real H200.
#
# Three words are kept apart. **Counted** is read off the compiled program: launches, bytes, FLOPs. **Estimated** comes
# from a model: our roofline, or XLA's own cost model. **Measured** means that a GPU ran it; nothing
# in this notebook was.

# %%
import os
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import matplotlib.pyplot as plt

import xlafuse
from hlo_analysis import analyze, capture
from hlo_analysis.report import show
from xlafuse.models import block_function

GB = 1e9
COLOURS = {
    "triton_gemm": "#4269d0",
    "cublaslt": "#6cc5b0",
    "triton": "#9c6b4e",
    "loop": "#efb118",
    "reduction": "#ff725c",
    "transpose": "#97bbf5",
    "mosaic": "#a463f2",
    "concatenate": "#9498a0",
    "copy": "#c3c7cd",
}
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Capture
#
# `capture` lowers the function here, compiles it in a process of its own, and keeps everything XLA wrote on the way:
# the program before and after each fusion pass, the log of the fusion pass's decisions, and the list of launches.

# %%
function, arguments = block_function("llama3-8b", (2, 4096))
captured = capture(function, *arguments, target="h200", label="xla")
analysis = analyze(captured)

provenance = analysis.provenance
print(f"{provenance.function} for {analysis.device.description}, compiled in {provenance.compile_seconds:.1f} s")
print(f"matrix-product kernels: {provenance.gemm_choice}, {provenance.autotune_hits} of {provenance.autotune_lookups}")

# %% [markdown]
# ## What it fused
#
# One row is one launch. `HBM` is what the launch reads and writes, each buffer once; `unfused` is what the same
# operations would move if each were a launch of its own.

# %%
print(f"{'#':>2}  {'kind':12} {'scope':28} {'HBM MB':>8} {'unfused':>8} {'roofline µs':>11}  operations")
for launch in analysis.launches:
    moved = (launch.bytes_read + launch.bytes_written) / 1e6
    operations = ", ".join(f"{name}" + (f"×{count}" if count > 1 else "") for name, count in launch.opcodes[:4])
    print(
        f"{launch.index:2}  {launch.kind:12} {launch.scope:28} {moved:8.0f} {launch.unfused_bytes / 1e6:8.0f} "
        f"{launch.roofline_us:11.0f}  {operations}"
    )

# %%
traffic = analysis.traffic
figure, axes = plt.subplots(figsize=(7, 1.7))
parts = [
    ("arguments and results", traffic.bytes - traffic.intermediate_bytes, "#4269d0"),
    ("between launches", traffic.intermediate_bytes, "#ff725c"),
    ("saved by fusion", traffic.saved_bytes, "#d9dde3"),
]
left = 0.0
for label, size, colour in parts:
    axes.barh(0, size / GB, left=left, color=colour, label=f"{label}: {size / GB:.1f} GB")
    left += size / GB
axes.set(yticks=[], xlabel="HBM traffic of one forward pass, GB (counted)")
axes.spines["left"].set_visible(False)
axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
plt.show()

# %% [markdown]
# ## What it left apart, and why
#
# Every value that one launch hands to another through HBM has an edge, and every edge has a verdict: *ineligible* (a
# rule forbade the fusion), *rejected* (XLA's cost model expected a loss) or *unrecorded* (no pass spoke of it).

# %%
apart = [decision for decision in analysis.decisions if decision.verdict != "fused"]
groups: dict[str, list] = {}
for decision in apart:
    groups.setdefault(decision.category, []).append(decision)
for category, members in sorted(groups.items(), key=lambda item: -sum(d.bytes for d in item[1])):
    print(f"{len(members):3} edges {sum(d.bytes for d in members) / GB:7.2f} GB  {category}")
    print(f"{'':15}e.g. {members[0].producer} → {members[0].consumer}: {members[0].reason}")

# %% [markdown]
# The same, ranked by what it costs: a missed fusion is a value that need not have reached HBM.

# %%
for missed in analysis.missed[:8]:
    print(
        f"{missed.rank}. {missed.bytes_at_stake / GB:6.2f} GB, about {missed.time_at_stake_us:5.0f} µs   {missed.shape}"
    )
    print(f"   {missed.scope}: {missed.reason}")
    print(f"   {missed.remedy_kind}: {missed.remedy}")

# %% [markdown]
# ## Another plan: `xla` beside `pallas`
#
# A strategy is a fusion plan: it says which kernel serves which site of the block. `pallas` gives every site to a
# Mosaic GPU kernel: norms, projections with their rotary embedding, attention, the gated layer, products with their
# residual sum. `xla_cudnn` gives attention alone to cuDNN, and `pallas_cudnn` does both. XLA cannot see the products
# inside those kernels: their FLOPs are those that the operations state beside them. Measured times are in the README
# and in the next notebook.

# %%
plans = ["unfused", "xla", "xla_cudnn", "pallas", "pallas_cudnn"]
comparison = xlafuse.compare("llama3-8b", (2, 4096), strategies=plans)
for result in comparison.strategies:
    made = result.analysis
    if made is None:
        print(f"{result.name:12} {result.error}")
        continue
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.launches_by_kind.items())
    print(
        f"{result.name:12} {made.launch_count:3} launches  {made.traffic.bytes / GB:6.2f} GB  "
        f"{made.roofline_us / 1e3:6.2f} ms estimated  ({kinds})"
    )

# %% [markdown]
# Attention's scores dwarf everything else, and only a fused attention removes them. Leave that scope out, and the
# rest of the block comes into view.

# %%
shown = {result.name: result.analysis for result in comparison.strategies if result.name != "unfused"}
traffic_of = {name: Counter() for name in shown}
for name, made in shown.items():
    for launch in made.launches:
        if launch.scope != "block/attention":
            traffic_of[name][launch.kind] += (launch.bytes_read + launch.bytes_written) * launch.repeat

figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * len(shown)))
left = [0.0] * len(shown)
for kind, colour in COLOURS.items():
    widths = [traffic_of[name][kind] / GB for name in shown]
    if any(widths):
        axes.barh(list(shown), widths, left=left, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
axes.invert_yaxis()
axes.set_xlabel("HBM traffic outside attention, GB (counted), by kind of launch")
axes.legend(ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
plt.show()

# %% [markdown]
# The scopes where `xla` and `pallas` differ:

# %%
pair = {"xla": comparison["xla"].analysis, "pallas": comparison["pallas"].analysis}
print(f"{'scope':30}" + "".join(f"{name + ' launches':>18} {'MB':>7}" for name in pair))
for row in comparison.rows:
    cells = {cell.strategy: cell for cell in row.cells}
    chosen = [cells.get(name) for name in pair]
    counts = [(len(cell.launches), cell.bytes) if cell else (0, 0) for cell in chosen]
    if counts[0] != counts[1]:
        print(f"{row.scope:30}" + "".join(f"{count:18} {size / 1e6:7.0f}" for count, size in counts))

# %% [markdown]
# ## The gradient
#
# Training reads every activation again. The same question for the gradient with respect to weights and input:

# %%
gradient = xlafuse.compare("llama3-8b", (2, 4096), mode="grad", strategies=plans[1:])
for result in gradient.strategies:
    made = result.analysis
    print(
        f"{result.name:12} {made.launch_count:3} launches  {made.traffic.bytes / GB:6.2f} GB  "
        f"{made.roofline_us / 1e3:6.2f} ms estimated, peak memory {made.memory.peak_bytes / GB:.1f} GB"
    )

# %% [markdown]
# ## The whole report
#
# `show` is the short form of the page that `xlafuse report` writes, with every launch, decision and missed fusion.

# %%
show(comparison)
