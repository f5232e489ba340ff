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
# # XLA beside custom fusion
#
# The same operations, once as XLA fuses them and once as hand-fused Pallas kernels: what changes in launches and bytes
# (**counted**, compiled here for an H200 that is not here), and what that is worth in time (**measured** on an H200,
# kept in `results/`). The last section shows where custom fusion does not pay.

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from hlo_analysis import analyze, capture
from pallas_kernels import layer_norm
from pallas_kernels.ops.softmax.forms import FORMS
from xlafuse.bench.ceiling import COPY
from xlafuse.bench.results import geometric_mean, load
from xlafuse.bench.rows import grouped, is_bound_by_products, rows, teraflops_per_second

GRAY, BLUE = "#9498a0", "#4269d0"
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def show_launches(label, function, *arguments, mode="forward"):
    """One line a program: what it launches, and what those launches move through HBM."""
    analysis = analyze(capture(function, *arguments, target="h200", mode=mode, label=label))
    kinds = ", ".join(f"{count} {kind}" for kind, count in analysis.launches_by_kind.items())
    moved = sum((launch.bytes_read + launch.bytes_written) * launch.repeat for launch in analysis.launches)
    print(
        f"{label:22} {analysis.launch_count:2} launches {moved / 1e6:8.0f} MB  "
        f"{analysis.roofline_us:6.0f} µs at best  ({kinds})"
    )


# %% [markdown]
# ## One softmax, four programs
#
# Softmax as it is written down reads its rows three times: for the maximum, for the sum, for the division. The online
# form finds maximum and sum in one walk and reads twice; the fused form keeps the row in registers and reads once. XLA
# sees the three-step program and decides for itself.

# %%
x = array(32768, 4096)
show_launches("XLA", lambda x: jax.nn.softmax(x, axis=-1), x)
for name, form in FORMS.items():
    show_launches(f"Pallas, {name}", form, x)

# %% [markdown]
# XLA's softmax is one launch, too: *that* it fuses is no longer the question, but how near to the speed of memory the
# one kernel comes. The measurements below answer it. Bytes are counted by buffer, each once a launch: that the online
# form reads its rows twice, the second time partly out of the L2 cache, only a measurement shows.
#
# ## A normalisation and its gradient
#
# Forward, XLA splits residual sum and normalisation. Backward it needs sums along rows (for dx) and along columns (for
# the gradients of scale and bias), and a fusion has one shape of reduction; so it reads its operands again for the
# second. One kernel that keeps column sums in registers while it walks down the rows reads them once. (The copy in the
# gradient: x and residual have the same one, and two results of a program may not share a buffer.)

# %%
hidden, weights = array(32768, 4096), array(4096)


def norm(implementation):
    def function(x, residual, scale, bias):
        return layer_norm(x, scale, bias, residual=residual, implementation=implementation)

    return function


for mode in ("forward", "grad"):
    for implementation in ("xla", "mosaic"):
        show_launches(f"{implementation}, {mode}", norm(implementation), hidden, hidden, weights, weights, mode=mode)

# %% [markdown]
# ## What it is worth: the share of a copy's speed
#
# An operation that memory bounds can be no faster than a copy of the bytes it must read and write. Each bar is the
# geometric mean over the measured shapes; 100 % is the copy, or elementwise work where that is faster.

# %%
measured = load(Path("results/kernels-h200.json"))
table = [row for row in rows(measured) if row.ours]
streamed = [row for row in table if row.main.is_large and not is_bound_by_products(row.main)]
groups = grouped(streamed)

figure, axes = plt.subplots(figsize=(7, 0.3 * len(groups) + 0.8))
for place, (_, _, group) in enumerate(groups):
    for name, colour, shift in (("xla", GRAY, 0.2), (None, BLUE, -0.2)):
        share = geometric_mean([row.main.ceiling_share(name or row.ours) for row in group])
        axes.barh(place + shift, 100 * share, height=0.38, color=colour)
axes.set_yticks(range(len(groups)), [f"{op}, {phase}" for op, phase, _ in groups])
axes.invert_yaxis()
axes.axvline(100, color="black", linewidth=0.6)
axes.set_xlabel("share of the ceiling, % (measured; gray XLA, blue Pallas)")
plt.show()

# %% [markdown]
# ## Matrix products
#
# Here the tensor cores set the time and XLA calls cuBLAS, which is hard to beat. What a custom kernel can save is the
# traffic around the product: bias, activation, gate, residual.

# %%
multiplied = [row for row in table if is_bound_by_products(row.main) and row.main.phase == "forward"]
print(f"{'operation':24} {'shape':44} {'TF/s':>6} {'XLA':>6} {'ratio':>6}")
for row in multiplied:
    ours, xla = (teraflops_per_second(row.main, name) or float("nan") for name in (row.ours, "xla"))
    print(f"{row.main.op:24} {row.main.spec:44} {ours:6.0f} {xla:6.0f} {row.speed_up('xla'):6.2f}")

# %% [markdown]
# ## Where custom fusion does not pay
#
# A fusion of elementwise operations is what XLA does best: it already moves each byte once. Where even a plain copy
# would hardly be faster than XLA, no kernel can be.

# %%
at_the_copy = defaultdict(list)
for row in streamed:
    if row.main.microseconds("xla") < 1.1 * row.main.microseconds(COPY):
        at_the_copy[row.main.op, row.main.phase].append(row)
for (op, phase), group in at_the_copy.items():
    ratio = geometric_mean([row.speed_up("xla") for row in group])
    print(
        f"{op:24} {phase:9} {len(group)} shapes where XLA is within 10 % of a copy; ours is {ratio:.2f} times as fast"
    )
