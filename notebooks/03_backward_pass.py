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
# # The backward pass
#
# Training computes each layer twice more: for the gradient of its input and for that of its weights. At the end you
# know what the backward pass of a Llama 3 8B layer launches, reads again and keeps in memory, why XLA's fusions fit
# it worse than the forward pass, and where a plan of custom kernels wins, and loses, here.
#
# **Needs** no GPU, and about half a minute. Programs are compiled here for an H200 (**counted**, and their time
# **estimated**); other times are **measured** on one and recorded, or on an H100 where it says so.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import jax
import jax.numpy as jnp
import plots

import xlafuse
from hlo_analysis import analyze, capture
from xlafuse.bench.results import geometric_mean
from xlafuse.bench.rows import grouped, rows
from xlafuse.kernels import layer_norm

# %% [markdown]
# ## One layer, with its gradient
#
# `mode="grad"` compiles the layer and the gradients with respect to its input and all of its weights.

# %%
PLANS = ["xla", "xla_cudnn", "best"]
comparison = xlafuse.compare("llama3-8b", (2, 4096), mode="grad", strategies=PLANS, numerics=False)
blocks = {result.name: result.analysis for result in comparison.strategies}
plots.table(
    ["plan", "launches", "GB", "peak memory, GB", "estimated, ms"],
    (
        (
            plots.label(name),
            block.launch_count,
            block.traffic.bytes / 1e9,
            block.memory.peak_bytes / 1e9,
            block.estimated_us / 1e3,
        )
        for name, block in blocks.items()
    ),
)

# %% [markdown]
# ## Forward and backward
#
# XLA keeps the names of JAX's transformations, so that each launch knows its phase. (A launch that computes for both
# counts where its result belongs.)


# %%
def of_phase(block, phase, value):
    return sum(value(launch) * launch.repeat for launch in block.launches if launch.phase == phase)


plots.grouped_bars(
    {
        phase: {name: of_phase(block, phase, lambda each: each.estimated_us) / 1e3 for name, block in blocks.items()}
        for phase in ("forward", "backward")
    },
    "GPU time, ms (estimated)",
    form="{:.1f}",
    title="The backward pass, beside the forward pass of the same program",
)

# %%
best = blocks["best"]
work = {phase: of_phase(best, phase, lambda each: each.flops) for phase in ("forward", "backward")}
ratios = {
    name: of_phase(block, "backward", lambda each: each.estimated_us)
    / of_phase(block, "forward", lambda each: each.estimated_us)
    for name, block in blocks.items()
}
plots.say(
    f"The backward pass has {work['backward'] / work['forward']:.2f} times the arithmetic: two products "
    "for each product forward, and attention computes its scores again. With `best` it takes "
    f"{ratios['best']:.2f} times as long as the forward pass, with cuDNN's attention "
    f"{ratios['xla_cudnn']:.2f}, with XLA alone {ratios['xla']:.2f}."
)

# %% [markdown]
# ## Attention without a fused kernel
#
# XLA keeps the weights of all heads for the backward pass, and goes over arrays of that size once for each step of
# the softmax's gradient. Its costliest launches:

# %%
costly = sorted(blocks["xla"].launches, key=lambda launch: -launch.measured_us)[:6]
plots.table(
    ["kernel", "scope", "phase", "GB", "measured, ms"],
    (
        (
            each.kind,
            each.scope.removeprefix("block/"),
            each.phase,
            plots.moved(each) / 1e9,
            each.measured_us / 1e3,
        )
        for each in costly
    ),
)

# %% [markdown]
# A fused attention (cuDNN's, or ours) keeps one number for each row of scores and computes the rest again: more
# arithmetic, and next to none of the traffic. *Recomputation pays where bytes cost more than FLOPs.*
#
# ## The rest of the layer
#
# Let attention be fused in both plans, and look at the backward launches alone.

# %%
RIVALS = ["xla_cudnn", "best"]


def backward_time(launch):
    return launch.estimated_us if launch.phase == "backward" else 0.0


times = {name: plots.by_site(blocks[name], backward_time) for name in RIVALS}
plots.grouped_bars(
    {site: {name: times[name][site] for name in RIVALS} for site, time in times["best"].items() if time},
    "GPU time of backward launches, µs (estimated)",
    title="Backward, part by part",
)

# %% [markdown]
# Most of it is matrix products, and both plans leave most of those to cuBLAS: in the backward pass there is little
# beside a product that could ride along. Products take different times even where they are the same calls:

# %%
shared = {
    name: [
        launch.measured_us
        for launch in blocks[name].launches
        if launch.kind == "cublaslt" and launch.phase == "backward" and 9e11 < launch.flops < 1e12
    ]
    for name in ("xla", "xla_cudnn")
}
plots.table(
    ["plan", "backward products of the MLP", "µs each (measured)", "what the recording notes"],
    (
        (plots.label(name), len(each), sum(each) / len(each), " ".join(blocks[name].measured.notes))
        for name, each in shared.items()
    ),
)

# %% [markdown]
# Power again. XLA's plan spends most of its time waiting for memory, which draws less, so that its products run at a
# higher clock. A plan that multiplies nearly all the time lowers the clock: one more reason to compare plans by whole
# times.
#
# ## A norm's gradient
#
# A norm shows what a fusion can and cannot be. Forward, each row needs its own sums. Backward, the gradient of the
# input needs sums along rows, and those of scale and bias need sums along columns. XLA's fusion has one direction of
# reduction, so that it goes over the same arrays several times.


# %%
x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
weight = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)


def norm(implementation):
    def residual_norm(x, residual, scale, bias):
        return layer_norm(x, scale, bias, residual=residual, implementation=implementation)

    return residual_norm


def analysis_of(implementation, mode):
    captured = capture(norm(implementation), x, x, weight, weight, target="h200", mode=mode)
    return analyze(captured, label=f"{implementation}, {mode}")


norms = {
    (implementation, mode): analysis_of(implementation, mode)
    for mode in ("forward", "grad")
    for implementation in ("xla", "mosaic")
}
plots.table(
    ["LayerNorm with a residual sum", "launches", "GB"],
    (
        (f"{plots.label(implementation)}, {mode}", made.launch_count, made.traffic.bytes / 1e9)
        for (implementation, mode), made in norms.items()
    ),
)

# %% [markdown]
# One kernel that keeps the column sums in registers while it walks down the rows reads each array once. (Both
# gradients end with the same copy: x and residual have equal gradients, and two results of a program may not share a
# buffer.)
#
# ## Measured, over all operations
#
# RMSNorm, LayerNorm and the activation with a bias gain more over XLA in the backward pass than in the forward pass:
# they have such sums over columns. The gradients of softmax, rotary embedding and gated activation have none, and
# gain no more. (Batch norm sums over columns in both.) Each bar is the geometric mean over the measured shapes.

# %%
results = plots.kernel_results()
table = [row for row in rows(results) if row.main.is_large and row.main.op not in plots.PRODUCTS]
gains = {}
for op, phase, group in grouped(table):
    gains.setdefault(op, {})[phase] = geometric_mean([row.speed_up("xla") for row in group])
plots.grouped_bars(
    {op: each for op, each in gains.items() if len(each) == 2},
    "speed of xlafuse.kernels, XLA = 1 (measured)",
    form="{:.2f}",
    line=1.0,
    title="Row-wise operations, large shapes",
)

# %% [markdown]
# ## What pays in a gradient, and what does not
#
# The gated layer, `silu(x @ gate) * (x @ up)`, is one kernel in inference and writes only its result. For a gradient it
# must write both products, too, and while it stores three results its tensor cores wait. So `gated_linear` leaves its
# products to XLA where a gradient is taken, and gates them in a kernel of their own. Times on an H100:

# %%
kept = plots.products_of_gradients("gated_linear", "forward, products kept")
ways = ["xla", "one launch", "products by XLA, gating by a kernel"]
plots.table(
    ["rows", *(f"{plots.label(way)}, µs" for way in ways)],
    ([rows, *(us[way] for way in ways)] for rows, us in kept.items()),
)

# %% [markdown]
# Where several weights share an input, the input's gradient is a sum of products. XLA writes each of them and then
# adds them. One launch takes the operands one after another along the depth, and writes only the sum:

# %%
summed = {op: plots.products_of_gradients(op, "gradient of x") for op in ("qkv_projection", "gated_linear")}
plots.grouped_bars(
    {
        f"{op}, {rows} rows": {"one launch": us["xla"] / us["one launch"]}
        for op, each in summed.items()
        for rows, us in each.items()
    },
    "speed of one launch, XLA = 1 (measured)",
    form="{:.2f}",
    line=1.0,
    title="The gradient of x",
)

# %% [markdown]
# Whole gradients, all plans in turns in one run. `best` was measured before it had these two:

# %%
turns = {"2 × 4096": plots.block_results("grad", "2x4096"), "1 × 512": plots.block_results("grad", "1x512")}
names = ["xla", "xla_cudnn", "torch_compile", "best"]
plots.grouped_bars(
    {shape: {name: turn.speed_up(name, "xla") for name in names} for shape, turn in turns.items()},
    "speed of forward and backward, XLA = 1 (measured)",
    form="{:.2f}",
    title="One layer, forward and backward",
)

# %%
forward = plots.block_results("forward", "2x4096").speed_up("best", "xla_cudnn")
plots.say(
    f"At 2 × 4096 `best` is {turns['2 × 4096'].speed_up('best', 'xla_cudnn'):.3f} times as fast as XLA "
    f"with cuDNN's attention; in the forward pass alone it is {forward:.3f} times."
)

# %% [markdown]
# **Next:** [06](06_when_not_to_fuse.ipynb) collects such losses. [04](04_softmax.ipynb) follows one operation,
# forward, from naive to fused.
