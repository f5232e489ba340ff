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
# # XLA beside custom fusion plans, on the same block
#
# One Llama 3 8B layer, three plans: XLA as it comes, XLA with cuDNN's attention, and `best`, which gives each site to
# whatever was measured fastest there: mostly the Pallas kernels of `xlafuse.kernels`. At the end you know how many
# launches and bytes each plan needs, how near each launch comes to what the H200 can do, and where the time is won.
#
# **Needs** no GPU, and about half a minute. Launches and bytes are **counted** in programs compiled here for an H200;
# times are **measured** on one, launch by launch, and recorded.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import plots

import xlafuse

# %%
PLANS = ["xla", "xla_cudnn", "best"]
comparison = xlafuse.compare("llama3-8b", (2, 4096), strategies=PLANS, numerics=False)
blocks = {result.name: result.analysis for result in comparison.strategies}
plots.table(
    ["plan", "launches", "GB", "roofline, ms", "measured, ms", "GPU idle between, µs"],
    (
        (
            plots.label(name),
            block.launch_count,
            block.traffic.bytes / 1e9,
            block.roofline_us / 1e3,
            block.measured.kernel_us / 1e3,
            block.measured.gap_us,
        )
        for name, block in blocks.items()
    ),
)

# %% [markdown]
# The roofline is what memory and tensor cores would need for these launches, one after another, without any loss. It
# falls with the bytes, but the last step is small: once the attention scores are gone, the tensor cores set the time.
#
# ## Launches
#
# A plan cuts the layer into kernels in another way. Each row is a part of the layer, each number the launches it
# takes.

# %%
counts = {name: plots.by_site(block, lambda launch: 1) for name, block in blocks.items()}
sites = [site for site, count in counts["xla"].items() if count]
plots.table(
    ["part of the layer", *map(plots.label, PLANS)],
    ((site, *(round(counts[name][site]) for name in PLANS)) for site in sites),
)

# %% [markdown]
# Where `best` has one launch, the rotary embedding, the gate's activation and the residual sums are part of a matrix
# product: they work on its result while it is still in registers. (The second launch of q, k and v makes the table of
# sines and cosines.)
#
# ## Time, part by part

# %%
times = {name: plots.by_site(block, lambda launch: launch.measured_us) for name, block in blocks.items()}
plots.grouped_bars(
    {site: {name: times[name][site] for name in PLANS} for site in sites},
    "GPU time, µs (measured)",
    title="Attention is where XLA loses; the MLP is where the time is",
)

# %% [markdown]
# ## How near to the roof?
#
# Each circle is a launch, its area its time. To the left of the ridge memory is the limit, to the right the tensor
# cores. A fused plan moves circles to the right (fewer bytes for the same work) and removes the small ones at the
# left. Launches that only move bytes (fewer than 0.1 FLOPs a byte, as norms of `best`, whose FLOPs are not stated)
# are left out.

# %%
plots.roofline(blocks, title="Launches of one forward pass")

# %%
products = {
    name: [launch for launch in block.launches if launch.flops > 1e11 and launch.limiter == "compute"]
    for name, block in blocks.items()
}
rates = {n: sum(p.flops for p in ps) / sum(p.measured_us for p in ps) / 1e6 for n, ps in products.items()}
peak = dict(blocks["best"].device.matrix_flops)["bf16"] / 1e12
plots.table(
    ["launches that the tensor cores limit", "TFLOP/s", "of the peak"],
    ((plots.label(name), rate, f"{rate / peak:.0%}") for name, rate in rates.items()),
)

# %% [markdown]
# Why not nearer to the peak? Power. The peak holds at the highest clock, and the H200 lowers its clock while it
# multiplies random numbers. The recordings say so:

# %%
plots.say("\n".join(f"- {name}: {' '.join(block.measured.notes)}" for name, block in blocks.items()))

# %% [markdown]
# ## Where the win comes from
#
# From `xla_cudnn`, the strongest plan without our kernels, to `best`: how many bytes does each part save, how long
# would the H200's memory need for them, and how much time is won?

# %%
bandwidth = blocks["best"].device.memory_bandwidth
memory = {name: plots.by_site(blocks[name], lambda launch: plots.moved(launch) / bandwidth * 1e6) for name in PLANS}


def row(part, moved, took):
    """How much less `best` moves and takes."""
    return part, moved["xla_cudnn"] - moved["best"], took["xla_cudnn"] - took["best"]


plots.table(
    ["part of the layer", "memory time of the bytes saved, µs", "time won, µs (measured)"],
    [
        *(row(site, {n: memory[n][site] for n in PLANS}, {n: times[n][site] for n in PLANS}) for site in sites),
        row("the layer", *({n: sum(each[n].values()) for n in PLANS} for each in (memory, times))),
    ],
)

# %% [markdown]
# Two kinds of win. Attention moves the same bytes as cuDNN's and is simply the faster kernel. Everywhere else our
# kernels multiply about as fast as cuBLAS, and the time won is that of launches which are gone: the activation of the
# gated layer, the rotary embedding, the residual sums, the first pass of a norm.
#
# ## In turns, and on the wall clock
#
# The recordings above were taken one plan after the other, for the sake of each launch. For a fair ratio the plans
# take turns in one run, and torch.compile with them. *Wall clock* is what a caller waits for.

# %%
shapes = {"2 × 4096, forward": ("forward", "2x4096"), "1 × 512, forward": ("forward", "1x512")}
shapes |= {"16 × 1, decode": ("forward", "16x1"), "1 × 1, decode": ("forward", "1x1")}
turns = {title: plots.block_results(*key) for title, key in shapes.items()}
names = ["xla", "xla_cudnn", "torch_compile", "best"]
plots.grouped_bars(
    {title: {name: turn.speed_up(name, "xla") for name in names} for title, turn in turns.items()},
    "speed of the kernels, XLA = 1 (measured)",
    form="{:.2f}",
    title="The same plans at four shapes",
)

# %%
walls = {title: {each.name: each.timing.wall_us for each in turn.candidates} for title, turn in turns.items()}
plots.table(
    ["wall clock, µs", *map(plots.label, names)],
    (("for " + title, *(wall[name] for name in names)) for title, wall in walls.items()),
)

# %% [markdown]
# At small shapes the wall clock of one layer is the host's: it launches for longer than the GPU computes. A whole
# model in one `jit` launches all its layers at once, and there the kernels count again.
#
# ## Decoding: the other end of the roofline
#
# With one token a sequence, every weight is read for one row of work, and a launch of two microseconds counts.

# %%
decode = xlafuse.compare("llama3-8b", (1, 1), strategies=["xla", "best"], numerics=False)
floor = decode["best"].analysis.traffic.bytes / bandwidth * 1e6
plots.table(
    ["plan", "launches", "estimate, µs", "memory time of the bytes, µs"],
    (
        (
            plots.label(each.name),
            each.analysis.launch_count,
            each.analysis.estimated_us,
            each.analysis.traffic.bytes / bandwidth * 1e6,
        )
        for each in decode.strategies
    ),
)

# %%
ours, xla = (decode[name].analysis.estimated_us / floor - 1 for name in ("best", "xla"))
plots.say(
    f"Reading the weights takes the H200 at least {floor:.0f} µs. `best` is estimated within {ours:.0%} of that, "
    f"XLA at {xla:.0%} more."
)

# %% [markdown]
# **Next:** [03](03_backward_pass.ipynb) asks the same of the backward pass, [06](06_when_not_to_fuse.ipynb) shows
# where fusing loses, and [05](05_your_own_kernel.ipynb) adds a kernel and a plan of one's own.
