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
# # Softmax, from naive to fused
#
# One small operation, five programs. At the end you know how many bytes each moves, how an *online* softmax finds
# maximum and sum in one walk, why the last step keeps the row in registers, how long a row may then be, and how much
# of that a GPU shows.
#
# **Needs** no GPU, and a quarter of a minute. Launches and bytes are **counted** in programs compiled here for an
# H200; times are **measured** on one, all candidates of a shape in turns.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import jax
import jax.numpy as jnp
import numpy as np
import plots

import xlafuse
from hlo_analysis import analyze, capture
from xlafuse.studies.softmax_forms import (
    FUSED,
    ONLINE,
    THREE_KERNEL,
    softmax_fused,
    softmax_online,
    softmax_three_kernels,
)

# %% [markdown]
# ## As it is written down
#
# The maximum is subtracted so that no exponential overflows; the work is done in float32.


# %%
def softmax(x):
    wide = x.astype(jnp.float32)
    weights = jnp.exp(wide - jnp.max(wide, axis=-1, keepdims=True))
    return (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype)


x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
least = 2 * x.size * x.dtype.itemsize
plots.say(
    f"The least that any program can move is x, read once, and as much written: **{least / 1e6:.0f} MB**, "
    f"{least / 4.8e12 * 1e6:.0f} µs of an H200's memory."
)

# %% [markdown]
# ## Step 0: every operation a kernel
#
# The strategy `unfused` switches XLA's fusion off. This is what an eager framework does.

# %%
compiled = xlafuse.compare(softmax, (x,), strategies=["unfused", "xla"])
unfused, xla = (compiled[name].analysis for name in ("unfused", "xla"))
plots.table(
    ["operation", "MB"],
    ((launch.opcodes[0][0], plots.moved(launch) / 1e6) for launch in unfused.launches),
)

# %% [markdown]
# Most of that is float32 copies of x that only the next kernel wants. Nothing here is arithmetic: the GPU waits for
# its memory all the time.
#
# ## Step 1: three kernels
#
# By hand, one fuses what is elementwise into the pass that needs it. A maximum, a sum of exponentials and a division
# remain, since each needs the whole row's result of the one before. As Pallas kernels, one thread block a row:

# %%
plots.code(softmax_three_kernels)

# %% [markdown]
# Three reads of x, one write; the float32 values never leave the registers.
#
# ## Step 2: online
#
# Maximum and sum can be found in *one* walk. Go along the row in chunks, keep the maximum so far and the sum of
# exponentials below it, and when a chunk raises the maximum, scale the sum down. In plain JAX:


# %%
def maximum_and_sum(row, chunk=512):
    def step(state, values):
        maximum, total = state
        raised = jnp.maximum(maximum, jnp.max(values))
        total = total * jnp.exp(maximum - raised) + jnp.sum(jnp.exp(values - raised))
        return (raised, total), None

    start = (jnp.float32(-jnp.inf), jnp.float32(0))
    return jax.lax.scan(step, start, row.reshape(-1, chunk))[0]


row = jax.random.normal(jax.random.key(0), (4096,)) * 10
maximum, total = maximum_and_sum(row)
np.testing.assert_allclose(jnp.exp(row - maximum) / total, jax.nn.softmax(row), rtol=1e-5)

# %% [markdown]
# A second walk writes the weights. It reads x again, but out of the L2 cache if that still has the row. (The same
# step, with the product of weights and values carried along, is flash attention.)
#
# ## Step 3: fused
#
# A row of 4096 values is 16 KB in float32: 32 values for each thread of a warpgroup. So load the row once, keep it in
# registers, and there is nothing to walk along a second time. `xlafuse.kernels.softmax` does this.
#
# ## Counted


# %%
def counted(function, x):
    return analyze(capture(function, x, target="h200"))


programs = {
    "every operation": unfused,
    THREE_KERNEL: counted(softmax_three_kernels, x),
    "XLA": xla,
    ONLINE: counted(softmax_online, x),
    FUSED: counted(softmax_fused, x),
}
plots.table(
    ["program", "launches", "MB", "of the least"],
    (
        (name, made.launch_count, made.traffic.bytes / 1e6, f"{made.traffic.bytes / least:.1f} ×")
        for name, made in programs.items()
    ),
)

# %% [markdown]
# XLA fuses the naive program into **one** launch, with no more bytes than the best kernel. *Whether* XLA fuses is
# settled. Counting buffers cannot tell the last three apart: a second read of a row is the same buffer, and how well
# a kernel keeps the memory busy is no matter of bytes at all.
#
# ## Measured

# %%
measured = plots.kernel_row("softmax", "forward", "32768x4096-bfloat16")
names = ["xla", "torch_compile", "liger", "mosaic"]
shares = {name: 100 * plots.share_of_copy(measured, name) for name in names}
plots.bars(
    shares,
    "speed over that of a copy of as many bytes, % (measured)",
    line=100.0,
    title="Softmax of 32768 × 4096 in bfloat16: how near to a copy?",
)

# %%
plots.say(
    f"XLA's one kernel takes {measured.main.microseconds('xla'):.0f} µs, the fused one "
    f"{measured.main.microseconds('mosaic'):.0f}, a plain copy of as many bytes "
    f"{measured.main.microseconds('copy'):.0f}. Both launch once and both have {least / 1e6:.0f} MB of buffers. "
)

# %% [markdown]
# So a launch table is where one begins, not where one ends: a fused kernel can still be a slow kernel. What remains
# is how it loads (16 bytes a thread, straight to registers), and how many rows are in flight while others wait. One
# more way to see it: how much would a copy have moved in the time that each program took?

# %%
counts = {name: {"counted": programs[name].traffic.bytes / 1e9} for name in (THREE_KERNEL, ONLINE, "XLA", FUSED)}
for name, candidate in (("XLA", "xla"), (FUSED, "mosaic")):
    counts[name]["a copy in its time"] = least / shares[candidate] * 100 / 1e9
plots.grouped_bars(counts, "HBM traffic, GB", form="{:.2f}", title="Bytes, and what their time was worth")

# %% [markdown]
# ## How long may a row be?
#
# Registers are finite: 65,536 for each multiprocessor, 255 for a thread. The compiler's own figures (ptxas, for the
# kernels compiled here) say where the fused form ends.

# %%
resources = {}
for features in (1024, 4096, 8192, 16384, 32768, 65536):
    rows = jax.ShapeDtypeStruct((2048, features), jnp.bfloat16)
    kernel = counted(softmax_fused, rows).launches[-1]
    resources[features] = (kernel.registers, kernel.spill_bytes)
plots.table(
    ["row", "registers of a thread", "spilled, bytes a thread", "warpgroups at a time"],
    (
        (features, registers, spilled, min(16, 65536 // (128 * registers)))
        for features, (registers, spilled) in resources.items()
    ),
)

# %% [markdown]
# Up to 16384 values the row fits. Beyond that it *spills*: values that were to stay in registers go to memory and
# come back, which is the traffic that fusing was to save. `xlafuse.kernels.softmax` walks along longer rows online
# instead, with these registers:

# %%
longer = {}
for features in (32768, 65536):
    rows = jax.ShapeDtypeStruct((2048, features), jnp.bfloat16)
    kernel = counted(lambda x: xlafuse.kernels.softmax(x, implementation="mosaic"), rows).launches[-1]
    longer[features] = (kernel.registers, kernel.spill_bytes)
plots.table(
    ["row", "registers of a thread", "spilled, bytes a thread"],
    ((features, *figures) for features, figures in longer.items()),
)

# %% [markdown]
# **What to keep.** Each step saves reads of x: nine launches, three, one. XLA takes the last step of that by itself.
# The rest is done inside the kernel, where only a measurement sees it, and it ends where the registers do.
#
# **Next:** [05](05_your_own_kernel.ipynb) writes a kernel of this kind from nothing.
