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
# # When not to fuse
#
# Every notebook before this one shows fusion winning. Here are the losses: kernels of `xlafuse.kernels` that are
# slower than XLA or another library, and fusions that cost more than they save. At the end you can tell beforehand:
# from the bytes, from the size of the call, from what bounds it, from the registers, and from what the backward pass
# wants.
#
# **Needs** no GPU, and half a minute. Times are **measured** on an H200 (`xlafuse bench`, all candidates of a shape
# in turns); some programs are compiled here, for launches and registers.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import plots

import xlafuse
from hlo_analysis import analyze, capture
from xlafuse.studies.softmax_forms import softmax_fused
from xlafuse.bench.rows import RIVALS, rows

# %% [markdown]
# ## All measured shapes
#
# Each dot is an operation, forward or backward, at one shape: how many times as fast as XLA is our kernel?

# %%
measured = [row for row in rows(plots.kernel_results()) if row.ours and row.speed_up("xla") > 0]


def ratio(row):
    return row.speed_up("xla")


figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
for is_loss in (False, True):
    shown = [row for row in measured if (ratio(row) < 1) == is_loss]
    axes.scatter(
        [row.main.microseconds("xla") for row in shown],
        list(map(ratio, shown)),
        s=14,
        color="#c8382e" if is_loss else plots.colour("mosaic"),
        label=f"{len(shown)} {'slower' if is_loss else 'faster'}",
    )
axes.axhline(1, color="#43474f", linewidth=0.8, linestyle="--")
axes.set(xscale="log", yscale="log", xlabel="XLA's time, µs (measured)")
axes.set(ylabel="speed, XLA = 1 (measured)", title="Kernels beside XLA")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# Most losses are at the left: calls of a few microseconds. Take them one kind at a time.
#
# ## 1. Where nothing is left to save
#
# A gated activation is elementwise. XLA makes one launch of it that reads and writes each byte once, at the speed of
# a copy. There is nothing for a kernel to win.

# %%
elementwise = [
    row for row in measured if row.main.op == "gated_activation" and row.main.phase == "backward" and row.main.is_large
]
plots.grouped_bars(
    {
        plots.short(row.main.spec): {name: row.main.microseconds(name) for name in ("copy", "xla", "mosaic")}
        for row in elementwise
    },
    "GPU time, µs (measured)",
    title="Gated activation, backward",
)

# %%
slower = [row for row in elementwise if ratio(row) < 1]
plots.say(
    f"Ours is slower than XLA's at {len(slower)} of {len(elementwise)} shapes, by up to "
    f"{1 - min(map(ratio, elementwise)):.1%}. A copy of the bytes is at most "
    f"{max(row.main.speed_up('copy', 'xla') for row in elementwise) - 1:.1%} faster than XLA. **Rule:** compare the "
    "bytes with the least possible; where XLA moves them once, leave it alone."
)

# %% [markdown]
# ## 2. Where a call is small
#
# A kernel has costs of its own: barriers, the first loads, a launch. At one row they are all there is. These are all
# measured calls that take XLA less than 10 µs, and ours longer:

# %%
small = sorted(
    (row for row in measured if row.main.microseconds("xla") < 10 and ratio(row) < 1),
    key=ratio,
)
plots.grouped_bars(
    {
        f"{row.main.op}, {row.main.phase}\n{plots.short(row.main.spec)}": {
            name: row.main.microseconds(name) for name in ("xla", "mosaic")
        }
        for row in small
    },
    "GPU time, µs (measured)",
    form="{:.2f}",
    title="Small calls that lose",
)

# %% [markdown]
# The worst are attention of one query to one key, where the softmax is 1 and XLA reduces the program to next to
# nothing. The kernel does not know. **Rule:** at a few microseconds count launches, not bytes; and let XLA simplify
# what a kernel would hide from it. (`xlafuse.kernels` takes XLA where it was measured to be faster, unless you name
# the kernel.)
#
# ## 3. Where the tensor cores set the time
#
# Does `relu(x @ w + b)` want a fused kernel? First look whether it is fused already:


# %%
def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def relu(x, w, b):
    return jax.nn.relu(x @ w + b)


def gelu(x, w, b):
    return jax.nn.gelu(x @ w + b)


operands = array(8192, 4096), array(4096, 4096), array(4096)
programs = {each.__name__: analyze(capture(each, *operands, target="h200")) for each in (relu, gelu)}
plots.table(
    ["activation", "XLA's launches", "MB", "roofline, µs"],
    (
        (name, ", ".join(each.kind for each in made.launches), made.traffic.bytes / 1e6, made.roofline_us)
        for name, made in programs.items()
    ),
)

# %% [markdown]
# ReLU and bias are part of XLA's product. GELU is not: one launch more, which reads the result and writes it, a tenth
# of the time at this size. The longer the product, the less that is: arithmetic grows with the inner dimension, and
# the bytes saved do not. Measured:

# %%
specs = [
    ("linear", "8192-4096-16384-bfloat16-bias-gelu_tanh"),
    ("linear", "512-4096-16384-bfloat16-bias-gelu_tanh"),
    ("linear", "8192-4096-4096-bfloat16"),
    ("linear", "8192-14336-4096-bfloat16-residual"),
    ("linear", "512-14336-4096-bfloat16-residual"),
    ("linear_residual_norm", "512-14336-4096-bfloat16"),
]
products = [plots.kernel_row(op, "forward", spec) for op, spec in specs]
plots.grouped_bars(
    {
        f"{row.main.op}\n{plots.short(row.main.spec)}": {name: row.speed_up(name) for name in ("xla", "torch_compile")}
        for row in products
    },
    "speed of our kernel, the other = 1 (measured)",
    form="{:.2f}",
    line=1.0,
    title="Matrix products and what rides along",
)

# %%
gelu_row = products[0]
saved = 2 * 8192 * 16384 * 2 / 4.8e12 * 1e6
plots.say(
    f"With a GELU the fused kernel gains {gelu_row.speed_up('xla') - 1:.0%} and more; the bytes it saves there, a read "
    f"and a write of the result, are {saved:.0f} µs of memory time in XLA's {gelu_row.main.microseconds('xla'):,.0f}. "
    "With nothing to ride along, or a residual that XLA's product adds by itself, it gains 1 to 3 % over XLA and "
    "*loses* up to 3 % to torch.compile: what decides is who multiplies better. **Rule:** saved bytes over "
    "bandwidth, as a share of the product's time, is the most that fusing can win."
)

# %% [markdown]
# ## 4. Where the backward pass wants what the fusion hides
#
# The gated layer `silu(x @ gate) * (x @ up)` in one kernel writes one array in place of three. For a gradient the
# other two are wanted as well, and the same kernel would have to write them. Times of 8192 rows, in inference on an
# H200 and in training on an H100:

# %%
inference = plots.kernel_row("gated_linear", "forward", "8192-4096-14336-bfloat16-silu").main
training = plots.products_of_gradients("gated_linear", "forward, products kept")[8192]
ways = ["xla", "one launch", "products by XLA, gating by a kernel"]
plots.grouped_bars(
    {
        "inference": {"xla": inference.microseconds("xla"), "one launch": inference.microseconds("mosaic")},
        "training": {way: training[way] for way in ways},
    },
    "GPU time, µs (measured)",
    title="Gated layer of Llama 3 8B, forward pass",
)

# %% [markdown]
# While the kernel stores three results, its tensor cores wait. So `gated_linear` fuses only where no gradient is
# taken. **Rule:** ask what autodiff keeps. A value that is written anyway is not saved by fusing its producer with its
# user.
#
# ## 5. Where recomputation costs more than memory
#
# A loss over a large vocabulary can do without the logits, if the backward pass computes them again. How much of
# them?

# %%
head = plots.kernel_row("linear_cross_entropy", "backward", "4096-4096-128256-bfloat16-reduction_mean")
names = ["xla", "variant: all logits twice", "mosaic", "liger"]
times = {name: head.main.microseconds(name) / 1e3 for name in names}
plots.bars(
    times,
    "GPU time, ms (measured)",
    form="{:.1f}",
    title="Loss and gradients: 4096 tokens, 128256 words",
)

# %%
twice = times["variant: all logits twice"] / times["xla"] - 1
plots.say(
    f"Computing all logits twice costs {twice:.0%} over XLA, which writes and reads them. The kernel that won, "
    f"{times['xla'] / times['mosaic']:.2f} × XLA, keeps them where the weights' gradient will be. **Rule:** recompute "
    "what is cheap to compute (a softmax from its maximum and sum); a matrix product is not, unless memory is what you "
    "are short of."
)

# %% [markdown]
# ## 6. Where registers run out
#
# What a fused kernel keeps on the chip, it keeps in registers: 255 for a thread at most, and the more a thread has,
# the fewer threads there are to hide the latency of memory. Take the softmax that holds its row in registers,
# compiled here for longer and longer rows. What does not fit *spills*: it goes to memory and comes back.

# %%
spills = []
for features in (4096, 16384, 32768, 65536):
    made = analyze(capture(softmax_fused, array(2048, features), target="h200"))
    kernel = made.launches[-1]
    fit = min(16, 65536 // (128 * kernel.registers)) * 128 / 2048
    row_bytes = features * 2
    spills.append((features, kernel.registers, f"{fit:.0%}", row_bytes / 1e3, 2 * 128 * kernel.spill_bytes / 1e3))
plots.table(
    ["row", "registers", "threads that fit", "a second read of the row would be, kB", "spilled and read back, kB"],
    spills,
)

# %% [markdown]
# The fused form saves a second read of the row. Beyond 16384 values it moves more than that through the caches, for
# spills, with an eighth of the threads. **Rule:** look at registers and spills in the report of your kernel before
# you measure it; where it spills, read twice.
#
# ## 7. What else it costs

# %%
block = xlafuse.compare("llama3-8b", (2, 4096), strategies=["xla_cudnn", "best"], baseline="best", numerics=False)
seconds = {result.name: result.analysis.measured.compile_seconds for result in block.strategies}
lost = [
    (row.speed_up(name), plots.label(name), row)
    for row in measured
    for name in RIVALS
    if name != "xla" and row.speed_up(name) < 0.985
]
plots.say(
    f"**Compile time.** One layer takes XLA {seconds['xla_cudnn']:.1f} s on the machine with the H200, `best` "
    f"{seconds['best']:.1f} s: kernels have a compiler of their own.\n\n"
    "**Others do it, too.** Where ours is behind another library by more than 1.5 %:"
)

# %%
plots.table(
    ["operation", "", "shape", "other", "speed, other = 1"],
    (
        (f"`{row.main.op}`", row.main.phase, plots.short(row.main.spec), name, ratio)
        for ratio, name, row in sorted(lost, key=lambda each: each[0])
    ),
)

# %% [markdown]
# ## Before you fuse
#
# 1. How many bytes would go, and how long does the memory take for them? That is the most you can win.
# 2. Is it one launch already? (`xlafuse report` says so.)
# 3. Does the tensor core or a few microseconds of launch set the time? Then bytes hardly matter.
# 4. Does the backward pass want what you would no longer write?
# 5. What would be computed twice, and does it fit the registers?
# 6. Measure, beside XLA, in turns, on the shapes that you have.
