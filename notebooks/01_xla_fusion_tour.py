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
# XLA decides which operations of a JAX program share a GPU kernel. At the end of this notebook you know how to ask it
# what it decided, how to read the answer (launches, bytes, reasons), and which values of a Llama 3 8B layer still
# travel through the GPU's memory though they need not.
#
# **Needs** no GPU, and about half a minute. XLA's compiler runs here, for an H200 that is not here; matrix-product
# kernels, which XLA picks by timing them, are replayed from a recording made on a real one.
#
# Three words are kept apart. **Counted** is read off the compiled program: launches, bytes, FLOPs. **Estimated**
# comes from a model: a roofline, or XLA's own cost model. **Measured** means that a GPU ran it: on an H200, recorded,
# and shown here where the program is still the same.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

from collections import defaultdict

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import plots

import xlafuse
from hlo_analysis import analyze, capture
from hlo_analysis.report import show
from xlafuse.catalogue import KERNELS

# %% [markdown]
# ## A small program first
#
# Every layer of a transformer adds to the residual stream and normalizes it. Written plainly, it is four lines.
# `capture` compiles them in a process of its own and keeps what XLA wrote on the way; `analyze` makes records of
# that.


# %%
def add_norm(x, residual, scale):
    stream = x + residual
    wide = stream.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale).astype(x.dtype), stream


rows = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
scale = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
small = analyze(capture(add_norm, rows, rows, scale, target="h200"), catalogue=KERNELS)
plots.launches(small)

# %% [markdown]
# Two launches. The first writes the sum; the second reads it back to normalize it. A *missed fusion* is such a value:
# one that need not have been read from memory, or not have been written. Each comes with XLA's own reason and with a
# remedy.

# %%
missed = small.missed[0]
plots.say(
    f"`{missed.value}`, {missed.shape}: **{missed.bytes_at_stake / 1e6:.0f} MB** at stake, about "
    f"{missed.time_at_stake_us:.0f} µs.\n\n*XLA's reason:* {missed.reason}\n\n"
    f"*Remedy ({missed.remedy_kind}):* {missed.remedy}"
)

# %% [markdown]
# ## One layer of Llama 3 8B
#
# The same question for a whole layer: two sequences of 4096 tokens, bfloat16. `compare` compiles one program under
# several *strategies*. `unfused` switches XLA's fusion passes off, `xla` is XLA as it comes, `xla_cudnn` gives
# attention to cuDNN, and `best` gives each site of the layer to what was measured fastest there.

# %%
strategies = ["unfused", "xla", "xla_cudnn", "best"]
comparison = xlafuse.compare("llama3-8b", (2, 4096), strategies=strategies, numerics=False)
block = {result.name: result.analysis for result in comparison.strategies}
xla = block["xla"]
plots.launches(xla)

# %% [markdown]
# One row is one launch, in the order in which the GPU runs them. *MB* is what it reads and writes, each buffer once.
# *Roofline* is the least time that the H200's memory and tensor cores allow for it.
#
# ## What fusion saves
#
# Fusion is about bytes. Without it, every operation reads its operands from memory and writes its result there.

# %%
traffic = {name: analysis.traffic.bytes / 1e9 for name, analysis in block.items()}
plots.bars(
    traffic,
    "HBM traffic of one forward pass, GB (counted)",
    form="{:.1f}",
    title="Bytes, by strategy",
)

# %%
plots.say(
    f"XLA's fusions save {traffic['unfused'] - traffic['xla']:.0f} GB of {traffic['unfused']:.0f}: "
    f"{xla.launch_count} launches in place of {block['unfused'].launch_count}. And yet "
    f"{traffic['xla']:.1f} GB remain where `best` has {traffic['best']:.1f}. Of XLA's bytes "
    f"{xla.traffic.intermediate_bytes / xla.traffic.bytes:.0%} are values that one launch writes for "
    "another to read."
)

# %% [markdown]
# ## Where those bytes are
#
# The layer's named scopes say which part of the model a launch belongs to.

# %%
sites = plots.by_site(xla, plots.moved)
figure, axes = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
drawn = axes.barh(list(sites), [value / 1e9 for value in sites.values()], color=plots.colour("xla"))
axes.bar_label(drawn, [f" {value / 1e9:.1f}" for value in sites.values()], fontsize=8)
axes.invert_yaxis()
axes.margins(x=0.1)
axes.set(xlabel="HBM traffic, GB (counted)", title="XLA's launches, by part of the layer")
plt.show()

# %% [markdown]
# Attention, by far: its scores are 32 heads of 4096 × 4096 values for each sequence, and XLA writes and reads them
# several times. No fusion pass of XLA joins two matrix products with the softmax between them.
#
# ## Why XLA left values apart
#
# Each value between two launches is an *edge*, and each edge has a verdict. *Ineligible*: a rule forbade the fusion.
# *Rejected*: XLA's cost model expected it to be slower. *Unrecorded*: no pass spoke of it.

# %%
groups = defaultdict(list)
for decision in xla.decisions:
    if decision.verdict != "fused":
        groups[decision.verdict, decision.category].append(decision)
costliest = sorted(groups.items(), key=lambda item: -sum(each.bytes for each in item[1]))
plots.table(
    ["verdict: category", "edges", "GB"],
    (
        [f"{verdict}: {category}", len(edges), f"{sum(each.bytes for each in edges) / 1e9:.2f}"]
        for (verdict, category), edges in costliest
    ),
)

# %% [markdown]
# ## What would be worth changing
#
# The list of missed fusions is ranked by the time at stake, and so it is the place to begin with. A remedy is an XLA
# option, a rewrite of the program, or a kernel; where one begins with a name, `xlafuse.kernels` has that operation.

# %%
plots.table(
    ["value", "scope", "GB", "µs at stake", "remedy"],
    (
        (
            m.shape,
            m.scope.removeprefix("block/"),
            f"{m.bytes_at_stake / 1e9:.2f}",
            f"{m.time_at_stake_us:.0f}",
            m.remedy,
        )
        for m in xla.missed[:5]
    ),
)

# %% [markdown]
# ## Does it matter? Measured
#
# Bytes are a means. The recordings say what an H200 took for the same programs (where `compare` finds one; `unfused`
# was not recorded).

# %%
times = {result.name: result.measured_us / 1e3 for result in comparison.strategies if result.measured_us}
plots.bars(times, "GPU time of one forward pass, ms (measured)", form="{:.2f}", title="Time, by strategy")

# %% [markdown]
# ## The whole report
#
# `show` is the short form of the page that `xlafuse report --block llama3-8b --shape 2x4096` writes, which has every
# launch, decision and missed fusion, and the HLO text behind them.

# %%
show(comparison)

# %% [markdown]
# **Next:** [02](02_xla_beside_custom_plans.ipynb) takes the last figure apart: where do `xla_cudnn` and `best` gain
# their time? [07](07_fix_and_report_again.ipynb) does what this report advises on a model of one's own.
