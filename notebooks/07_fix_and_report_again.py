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
# # Fix, and report again: a model of one's own
#
# A small GPT, written plainly, as one finds it in many repositories. At the end you have read its report, followed
# remedies by hand with `xlafuse.kernels`, made the report again after each, seen one kernel that the library itself
# advises against, and checked that the model still computes the same.
#
# **Needs** no GPU, and about a minute. Launches, bytes and memory are **counted** in programs compiled for an H200.

# %%
import os
import sys

if "google.colab" in sys.modules:  # there, put the address of this project between the quotes
    os.system("git clone '' xlafuse && pip install -q './xlafuse[deviceless,notebooks]'")
    os.chdir("xlafuse/notebooks")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler for the H200 needs no GPU

import dataclasses

import numpy as np
import plots
from IPython.display import display

from hlo_analysis import analyze, capture, compare_analyses
from hlo_analysis.records import StrategyResult
from hlo_analysis.report import show
from xlafuse.catalogue import KERNELS

# %% [markdown]
# ## The model
#
# Its parts are functions of their own, so that they can be exchanged one by one. A norm takes what is to be added to
# the residual stream, and gives the normalized rows and the stream.
# %%
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from xlafuse import kernels

HEAD_SIZE = 128


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(is_seen, scores * HEAD_SIZE**-0.5, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def add_norm(x, update, scale, bias):
    x = x + update
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (centred * inverse * scale + bias).astype(x.dtype), x


def mlp(x, up, up_bias, down):
    return jax.nn.gelu(x @ up + up_bias) @ down


def cross_entropy(x, vocabulary, labels):
    logits = (x @ vocabulary).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(picked)


@dataclass(frozen=True)
class Gpt:
    attention: Callable = attention
    add_norm: Callable = add_norm
    mlp: Callable = mlp
    cross_entropy: Callable = cross_entropy

    def loss(self, params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        update = jnp.zeros_like(x)
        for block in params["blocks"]:
            y, x = self.add_norm(x, update, *block["norm1"])
            heads = (y @ block["qkv"]).reshape(*y.shape[:2], -1, HEAD_SIZE)
            update = self.attention(*jnp.split(heads, 3, axis=2)).reshape(x.shape) @ block["out"]
            y, x = self.add_norm(x, update, *block["norm2"])
            update = self.mlp(y, *block["mlp"])
        y, _ = self.add_norm(x, update, *params["norm"])
        return self.cross_entropy(y, params["vocabulary"], tokens[:, 1:])


def shapes(width, words, batch, length, dtype=jnp.bfloat16):
    """Abstract parameters of one layer, and tokens."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    norm = (array(width), array(width))
    mlp = (array(width, 4 * width), array(4 * width), array(4 * width, width))
    block = {"norm1": norm, "norm2": norm, "mlp": mlp}
    block |= {"qkv": array(width, 3 * width), "out": array(width, width)}
    params = {"embedding": array(words, width), "vocabulary": array(width, words)}
    params |= {"norm": norm, "blocks": [block]}
    return params, jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


arguments = shapes(2048, 50304, batch=4, length=2048)

# %% [markdown]
# ## The report before
#
# The gradient of the loss is what training runs. The table has the costliest remedies, each with all the values that
# it is for.


# %%
def report(model):
    captured = capture(model.loss, *arguments, target="h200", mode="grad", label="gpt")
    return analyze(captured, catalogue=KERNELS)


def remedies(analysis, count=4):
    """Time at stake by remedy."""
    found = {}
    for missed in analysis.missed:
        time, size, values = found.get(missed.remedy, (0.0, 0, 0))
        found[missed.remedy] = (
            time + missed.time_at_stake_us,
            size + missed.bytes_at_stake,
            values + 1,
        )
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:count]
    header = ["µs at stake", "GB", "values", "remedy"]
    return plots.table(header, ((t, size / 1e9, values, text) for text, (t, size, values) in ranked))


def progress():
    header = ["step", "launches", "GB", "peak memory, GB", "roofline, ms"]
    rows = (
        (
            name,
            made.launch_count,
            made.traffic.bytes / 1e9,
            made.memory.peak_bytes / 1e9,
            made.roofline_us / 1e3,
        )
        for name, made in steps.items()
    )
    return plots.table(header, rows)


steps = {"before": report(Gpt())}
display(progress())
remedies(steps["before"])

# %% [markdown]
# ## Fix 1: attention
#
# The remedy begins with a name, so `xlafuse.kernels` has the operation. It takes the same arrays.


# %%
def fused_attention(q, k, v):
    return kernels.attention(q, k, v, is_causal=True)


with_attention = replace(Gpt(), attention=fused_attention)

# %%
steps["attention"] = report(with_attention)
display(progress())
remedies(steps["attention"])

# %% [markdown]
# ## Fix 2: a rewrite, without any kernel
#
# The next remedy is about `take_along_axis`, whose gradient writes an array of zeros as large as the logits, updates
# it and reads it again. A comparison with the labels is elementwise, and XLA fuses it.


# %%
def masked_cross_entropy(x, vocabulary, labels):
    logits = (x @ vocabulary).astype(jnp.float32)
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return -jnp.mean(jnp.where(is_label, jax.nn.log_softmax(logits), 0).sum(-1))


with_mask = replace(with_attention, cross_entropy=masked_cross_entropy)

# %%
steps["mask"] = report(with_mask)
progress()

# %% [markdown]
# ## Fix 3: norms and epilogues
#
# `layer_norm` adds the residual in the same launch; `linear` does bias and activation on the product's result.


# %%
def fused_add_norm(x, update, scale, bias):
    return kernels.layer_norm(update, scale, bias, epsilon=1e-5, residual=x)


def fused_mlp(x, up, up_bias, down):
    return kernels.linear(kernels.linear(x, up, bias=up_bias, activation="gelu_tanh"), down)


with_norms = replace(with_mask, add_norm=fused_add_norm, mlp=fused_mlp)

# %%
steps["norms, MLP"] = report(with_norms)
display(progress())
remedies(steps["norms, MLP"])

# %% [markdown]
# ## Fix 4: the loss, and a kernel that is not taken
#
# What is left begins with the loss. The remedy names `cross_entropy`, and says that `linear_cross_entropy`, whose
# kernels never write all logits, was measured to be slower here. Called without an implementation,
# `linear_cross_entropy` knows that, too:


# %%
def fused_cross_entropy(x, vocabulary, labels, implementation=None):
    rows = x.reshape(-1, x.shape[-1])
    return kernels.linear_cross_entropy(
        rows, vocabulary, labels.reshape(-1), reduction="mean", implementation=implementation
    )


def lean_cross_entropy(x, vocabulary, labels):
    return fused_cross_entropy(x, vocabulary, labels, implementation=("mosaic", "xla"))


with_loss = replace(with_norms, cross_entropy=fused_cross_entropy)

# %%
loss_arguments = (
    jax.ShapeDtypeStruct((4, 2048, 2048), jnp.bfloat16),
    jax.ShapeDtypeStruct((2048, 50304), jnp.bfloat16),
    jax.ShapeDtypeStruct((4, 2048), jnp.int32),
)
with kernels.recorded_choices() as choices:
    default = capture(fused_cross_entropy, *loss_arguments, target="h200", mode="grad")
print(*dict.fromkeys(f"{choice.operation}: {choice.taken}" for choice in choices), sep="\n")
steps["loss"] = report(with_loss)
progress()

# %% [markdown]
# The first record names the kernel that a loss alone takes. With the gradient, as here, it is XLA's product and then
# the kernel of `cross_entropy`, which writes the gradient with the loss. The other kernel keeps the logits of as many
# tokens as there are features (2048 of 8192 here), and computes the others twice. But time is not the only cost. Ask
# for it by name, and look at the memory of this part of the program:

# %%
asked = capture(lean_cross_entropy, *loss_arguments, target="h200", mode="grad")
losses = {"product and cross_entropy": analyze(default), "linear_cross_entropy's kernels": analyze(asked)}
plots.table(
    ["loss and its gradient", "launches", "TFLOP", "temporary memory, GB", "roofline, ms"],
    (
        (
            name,
            made.launch_count,
            made.traffic.flops / 1e12,
            made.memory.temp_bytes / 1e9,
            made.roofline_us / 1e3,
        )
        for name, made in losses.items()
    ),
)

# %%
apart, together = losses.values()
more = together.traffic.flops / apart.traffic.flops - 1
less = (apart.memory.temp_bytes - together.memory.temp_bytes) / 1e9
plots.say(
    f"{less:.1f} GB less, for {more:.0%} more arithmetic: take it where memory limits the batch, and not for speed."
)

# %% [markdown]
# ## Is it still the same model?
#
# A report says nothing about results. At a small size, in float32, on the CPU (where each kernel's place is taken by
# the same operation in plain JAX), loss and gradients agree. That the kernels compute this on a GPU is what the tests
# of `xlafuse.kernels` are for.


# %%
def drawn(shape):
    if shape.dtype == jnp.int32:
        return jax.random.randint(jax.random.key(1), shape.shape, 0, 512)
    return jax.random.normal(jax.random.key(sum(shape.shape)), shape.shape, shape.dtype) * 0.05


small = jax.tree.map(drawn, shapes(256, 512, batch=2, length=64, dtype=jnp.float32))
expected, expected_gradient = jax.value_and_grad(Gpt().loss)(*small)
loss, gradient = jax.value_and_grad(with_loss.loss)(*small)
np.testing.assert_allclose(loss, expected, rtol=1e-5)
for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)

# %% [markdown]
# ## Before and after

# %%
times = {name: {"roofline": made.roofline_us / 1e3} for name, made in steps.items()}
plots.grouped_bars(times, "GPU time of loss and gradient, ms", form="{:.1f}", title="Step by step")

# %%
results = [
    StrategyResult(name=name, description="", analysis=dataclasses.replace(steps[name], label=name))
    for name in ("before", "loss")
]
show(compare_analyses("One GPT layer and its loss, gradient, H200", results, "before"))

# %% [markdown]
# On a machine with a Hopper GPU, `xlafuse report --fn gpt.py:loss --args gpt.py:arguments --mode grad --measure`
# takes the times. Profile the whole training step, too: what is fused now may have been a small part of it.
