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
# # Your own kernel and your own plan, from nothing to the report
#
# At the end you have found an operation that XLA cuts into several launches, written a Pallas kernel for it in
# fifteen lines, checked it without a GPU, seen it in the report beside XLA's, had a remedy name it, and made a fusion
# plan of your own for a transformer block.
#
# **Needs** no GPU, and half a minute. The kernel runs here in Pallas' interpreter, and is compiled for an H200.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import numpy as np
import plots

import xlafuse
from hlo_analysis import analyze, capture
from hlo_analysis.catalogue import Kernel
from hlo_analysis.report import show

# %% [markdown]
# ## The operation
#
# An int8 matrix product wants its left operand in int8, with a scale for each row: the largest absolute value of the
# row, divided by 127. `xlafuse.kernels` has no such operation.

# %%
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def quantize_rows(x):
    """x in int8, and the scale of each row: x is about rows * scales[:, None]."""
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / 127
    return jnp.round(wide / scales[:, None]).astype(jnp.int8), scales


# %% [markdown]
# ## What XLA makes of it

# %%
x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)

# %%
before = analyze(capture(quantize_rows, x, target="h200", label="xla"))
plots.launches(before)

# %% [markdown]
# Three launches: one for the maxima, one to divide them by 127, one for the rows, which it reads again. XLA's
# reasons, for what it did not fuse:

# %%
plots.table(
    ["from", "to", "MB", "XLA's reason"],
    (
        (each.producer, each.consumer, each.bytes / 1e6, each.reason)
        for each in before.decisions
        if each.verdict != "fused" and each.producer_launch is not None
    ),
)

# %%
least = sum(array.size * array.dtype.itemsize for array in (x, *jax.eval_shape(quantize_rows, x)))
plots.say(
    f"The program moves {before.traffic.bytes / 1e6:.0f} MB. The least is {least / 1e6:.0f}: x read once, int8 and "
    "scales written."
)

# %% [markdown]
# ## The kernel
#
# A thread block of one warpgroup (128 threads) takes one row, loads it into registers in 16-byte pieces, finds the
# maximum over the warpgroup, and writes both results. `WG_STRIDED` says how the row is dealt out to the threads.


# %%
def quantize_rows_kernel(x):
    rows, features = x.shape
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=8)

    def body(x_ref, rows_ref, scales_ref):
        row = lax.axis_index("row")
        values = plgpu.load(x_ref.at[row], layout=layout).astype(jnp.float32)
        scale = jnp.max(jnp.abs(values)) / 127
        rows_ref[row, :] = jnp.round(values / scale).astype(jnp.int8)
        scales_ref[row] = scale

    results = (jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.float32))
    return plgpu.kernel(body, out_type=results, grid=(rows,), grid_names=("row",))(x)


# %% [markdown]
# ## First correct
#
# Pallas interprets the kernel on the CPU: every thread block, with its memory and barriers.

# %%
few = jax.random.normal(jax.random.key(0), (4, 1024), jnp.bfloat16)
with plgpu.force_gpu_interpret_mode():
    interpreted, scales = jax.jit(quantize_rows_kernel)(few)
expected, expected_scales = quantize_rows(few)
np.testing.assert_array_equal(interpreted, expected)
np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)

# %% [markdown]
# ## Then compiled, and reported

# %%
after = analyze(capture(quantize_rows_kernel, x, target="h200", label="kernel"))
analyses = {"XLA": before, "the kernel": after}
plots.table(
    ["program", "launches", "MB", "roofline, µs"],
    ((name, made.launch_count, made.traffic.bytes / 1e6, made.roofline_us) for name, made in analyses.items()),
)

# %%
times = {name: {"roofline": made.roofline_us} for name, made in analyses.items()}
plots.grouped_bars(times, "GPU time, µs", title="Rows to int8")

# %%
kernel = after.launches[0]
plots.say(
    f"One launch, no byte too many, and {kernel.registers} registers a thread, {kernel.spill_bytes} bytes spilled: "
    f"{65536 // (128 * kernel.registers)} rows are in flight on each multiprocessor. The roofline is a bound and no "
    "measurement: on a machine with a Hopper GPU, `xlafuse report --fn ... --measure` takes the times."
)

# %% [markdown]
# ## A limit, said aloud
#
# A layout deals out whole vectors: 8 values for each of 128 threads. A row of another length does not fit, and a
# kernel that is not for every shape must say so, or leave such shapes to XLA. This is what each operation of
# `xlafuse.kernels` does, too.


# %%
def quantize(x):
    """`quantize_rows`, by the kernel where it fits."""
    fits = x.ndim == 2 and x.dtype == jnp.bfloat16 and x.shape[1] % 1024 == 0 and x.shape[1] <= 16384
    return quantize_rows_kernel(x) if fits else quantize_rows(x)


odd = jax.ShapeDtypeStruct((32768, 4000), jnp.bfloat16)
chosen = {str(each.shape): analyze(capture(quantize, each, target="h200")) for each in (x, odd)}
plots.table(["shape", "launches"], ((shape, made.launch_count) for shape, made in chosen.items()))

# %% [markdown]
# ## Remedies that name your kernel
#
# The analyzer recognizes patterns in a program (`hlo_analysis.catalogue.PATTERNS`). Tell it that you have a kernel
# for one of them, and remedies name it. Say you wrote a norm:

# %%
mine = Kernel(name="my_norm", pattern="rms_norm", package="my_kernels", compute_capabilities=(9,))


def add_norm(x, residual, scale):
    stream = x + residual
    wide = stream.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale).astype(x.dtype), stream


captured = capture(add_norm, x, x, jax.ShapeDtypeStruct((4096,), jnp.bfloat16), target="h200")
plots.say(f"*Remedy:* {analyze(captured, catalogue=[mine]).missed[0].remedy}")

# %% [markdown]
# ## A plan of your own
#
# For the transformer block, a *strategy* says which implementation serves which site, and which options XLA gets.
# Here is one between XLA and `best`: cuDNN's attention, and of our kernels the gated layer alone.

# %%
strategy = xlafuse.Strategy(
    name="gated_only",
    description="XLA with cuDNN's attention, and one kernel for the gated layer.",
    plan=xlafuse.FusionPlan(attention="cudnn", up_projection="mosaic"),
    requires=("block", "cuda", "hopper"),
)
comparison = xlafuse.compare(
    "llama3-8b", (2, 4096), strategies=["xla_cudnn", strategy, "best"], baseline="xla_cudnn", numerics=False
)
plots.table(
    ["plan", "launches", "GB", "roofline, ms"],
    (
        (
            plots.label(each.name),
            each.analysis.launch_count,
            each.analysis.traffic.bytes / 1e9,
            each.analysis.roofline_us / 1e3,
        )
        for each in comparison.strategies
    ),
)

# %%
xla, own, best = (each.analysis for each in comparison.strategies)
share = (xla.traffic.bytes - own.traffic.bytes) / (xla.traffic.bytes - best.traffic.bytes)
plots.say(
    f"The gated layer alone brings {share:.0%} of the bytes that `best` saves, and "
    f"{xla.launch_count - own.launch_count} of the {xla.launch_count - best.launch_count} launches."
)

# %% [markdown]
# ## The report

# %%
show(comparison)

# %% [markdown]
# `hlo_analysis.report.render_html(comparison)` gives the whole page as text. To keep the plan, add the entry to
# `xlafuse/strategies.py`: then `xlafuse report --block llama3-8b --strategies xla_cudnn,gated_only,best` knows it.
#
# **Next:** [06](06_when_not_to_fuse.ipynb), before you write the next kernel.
