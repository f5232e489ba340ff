"""Texts of the remedies for missed fusions; the modules beside this one choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.rules import attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """What removes a missed fusion; see `remedy_kind`, `remedy`, `options`, `kernel` and `code` of `MissedFusion`.

    code: of a kernel: calls one that everyone has; '' where one must be written, unless the catalogue names one.
    pattern: of `catalogue.PATTERNS`, where a kernel of the catalogue can be named.
    keeps_input: whether the kernel reads rows that another launch writes, once, and takes none of that launch's work.
    otherwise: what a kernel of the catalogue may serve for where none serves for this.
    portion: how much of the value's traffic and of the launch it removes; half of it where a loop is unrolled by two.
    """

    kind: Literal["option", "rewrite", "kernel"]
    text: str
    pattern: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    kernel: str | None = None
    code: str = ""
    portion: float = 1.0
    keeps_input: bool = False
    otherwise: Remedy | None = None

    def __post_init__(self) -> None:
        if self.options and not self.code:
            given = ", ".join(f'"{name}": "{value}"' for name, value in self.options)
            object.__setattr__(self, "code", f"jax.jit(fn, compiler_options={{{given}}})")

    def named(self, catalogue: Catalogue, launches: Sequence[LaunchRow]) -> Remedy:
        """Names the first kernel of the catalogue that covers the pattern and takes what the launches show.

        Where there is none, the text says that a kernel must be written, and why the catalogue's own does not serve.
        """
        none = refusal = "no XLA option and no kernel of the catalogue does this"
        for kernel in catalogue:
            if kernel.pattern == self.pattern:
                reason = attempt(kernel.refusal, "its check of these launches failed", launches)
                if reason is None:
                    note, code = kernel.note(launches), kernel.call(launches) or kernel.code or self.code
                    text = f"{kernel.name}: {self.text}" + (f"; {note}" if note else "")
                    return replace(self, text=text, kernel=kernel.name, code=code)
                refusal = f"{kernel.name} does not take this: {reason}"
        if self.otherwise and (other := self.otherwise.named(catalogue, launches)).kernel:
            return replace(other, text=f"{other.text}; {refusal}")
        if self.kind != "kernel" or self.code:
            return self if refusal is none else replace(self, text=f"{self.text}; {refusal}")
        return replace(self, text=f"write a kernel, e.g. in Pallas ({refusal}): {self.text}")


def kernel(
    text: str,
    *,
    pattern: str | None = None,
    code: str = "",
    keeps_input: bool = False,
    otherwise: Remedy | None = None,
) -> Remedy:
    """Returns the remedy that one kernel does the work of several launches."""
    return Remedy(kind="kernel", text=text, pattern=pattern, code=code, keeps_input=keeps_input, otherwise=otherwise)


def rewrite(text: str, *, code: str = "", pattern: str | None = None, portion: float = 1.0) -> Remedy:
    """Returns the remedy that the program computes the same in another way."""
    return Remedy(kind="rewrite", text=text, code=code, pattern=pattern, portion=portion)


ATTENTION = kernel(
    "one kernel that keeps the scores on the chip, e.g. cuDNN's through "
    "jax.nn.dot_product_attention(implementation='cudnn') for bfloat16 and float16, which takes no soft cap; few "
    "queries against a long cache want a kernel for decoding",
    pattern="attention",
    code='out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")',
)
PADDED = rewrite(
    "pad {size} to {padded} in the model (a vocabulary, features), or add zeros to what is multiplied and take a "
    "part of the result, which XLA fuses with what reads it: cuBLAS takes rows that begin at multiples of 16 bytes",
    pattern="padded_product",
    code="# before: y = x @ w\ny = (x @ jnp.pad(w, ((0, 0), (0, {more}))))[..., :{size}]",
)
ATTENTION_CAST = rewrite(
    "cast query, key and value to bfloat16 or float16 first, "
    "jax.nn.dot_product_attention(*(x.astype(jnp.bfloat16) for x in (query, key, value)), implementation='cudnn'): "
    "kernels that keep the scores on the chip take no other type",
    code="half = [x.astype(jnp.bfloat16) for x in (query, key, value)]\n"
    'out = jax.nn.dot_product_attention(*half, implementation="cudnn").astype(query.dtype)',
)
UNTRANSPOSED_ATTENTION = kernel(
    "a kernel that takes query, key and value as their projections write them (batch, length, heads, size), and "
    "writes its result so, e.g. cuDNN's through jax.nn.dot_product_attention: then nothing is transposed",
    pattern="attention",
    code=ATTENTION.code,
)
GATED_LINEAR = kernel(
    "both products and the gated activation in one kernel, which writes only the result", pattern="gated_linear"
)
LORA_LINEAR = kernel(
    "x @ w + (x @ a) @ b in one kernel, which adds the correction before the result is written; "
    "w + a @ b, where that is made first, is an array as large as w",
    pattern="lora_linear",
)
LINEAR_EPILOGUE = kernel(
    "the work after the product done in its epilogue, before the result is written", pattern="linear"
)
LINEAR_KEEPS_PRODUCT = kernel(
    "product and activation in one kernel, which keeps the product alone for the gradient, and whose gradient "
    "computes again what else it needs",
    pattern="linear",
)
CHECKPOINTED = rewrite(
    "compute it again in the backward pass: jax.checkpoint around the element-wise function, as in "
    "jax.checkpoint(jax.nn.gelu)(x). The backward pass reads what it is made of anyway",
    code="activation = jax.checkpoint(activation)  # e.g. jax.checkpoint(jax.nn.gelu)",
)
EPILOGUE = kernel("a product that does the work after it in its epilogue, before the result is written")
REDUCED_PRODUCT = kernel(
    "one for the product and what reduces it, as attention is: each block of the result is reduced on the "
    "chip, and written only if something else reads it"
)
RESIDUAL_NORM = kernel(
    "product, residual and the mean squares of their rows in one kernel; the next "
    "layer divides by their roots as it loads its input",
    pattern="linear_residual_norm",
)
QUANTIZED = kernel(
    "the product widens int8 or int4 weights as it loads them. Scales of whole columns may as "
    "well go behind the product, (x @ w.astype(x.dtype)) * scale: XLA then loads the integers, too",
    pattern="quantized_linear",
    code="y = (x @ w.astype(x.dtype)) * scale",
)
LINEAR_PROLOGUE = kernel("a product that does the work before it as its operand is loaded")
NORM_LINEAR = kernel(
    "the product normalises its rows as it loads them, or scales its result afterwards", pattern="norm_linear"
)
RMS_NORM = kernel(
    "the reduction and all that follows it in one kernel, the row read once", pattern="rms_norm", keeps_input=True
)
LAYER_NORM = kernel(
    "mean, variance and all that follows in one kernel, the row read once", pattern="layer_norm", keeps_input=True
)
BATCH_NORM = kernel(
    "mean and variance of a feature in one pass over the rows, and what follows in another",
    pattern="batch_norm",
    keeps_input=True,
)
GROUP_NORM = kernel(
    "one for each group: mean, variance and all that follows, what is normalized together read once and kept on "
    "the chip where it fits"
)
SOFTMAX = kernel("maximum, sum and quotient in one kernel, the row read once", pattern="softmax", keeps_input=True)
LOG_SOFTMAX = kernel(
    "maximum, sum and logarithm in one kernel, the row read once (where the result is a loss); give it the logits "
    "as the product writes them, not widened to float32",
    pattern="cross_entropy",
    keeps_input=True,
)
LAYOUT = rewrite(
    "give the operation the layout that its neighbour wants (order of einsum axes, of reshape and transpose), so "
    "that nothing is moved"
)
PARTS = rewrite(
    "have the operation work on the part where it lies (by indices, a mask, or sizes that need no padding), so "
    "that it is not moved first"
)
ADD_TO = rewrite(
    "add into an array that exists anyway (residual.at[indices].add(...) in place of zeros), or gather what "
    "belongs to each row where the indices can be inverted: here an array of zeros is written first"
)
PICKED = rewrite(
    "pick by a mask, jnp.where(jnp.arange(n) == index[..., None], x, 0).sum(-1), in place of "
    "jnp.take_along_axis (and of optax.softmax_cross_entropy_with_integer_labels, which calls it): XLA updates the "
    "whole array in place for its gradient and reads it again; the mask's gradient fuses into its readers",
    code="# before: jnp.take_along_axis(x, index[..., None], -1)[..., 0]\n"
    "picked = jnp.where(jnp.arange(x.shape[-1]) == index[..., None], x, 0).sum(-1)",
)
ROWS_UPDATED = rewrite(
    "update only the rows that were looked up: give the loss rows = table[indices] in place of the table, add to "
    "table.at[indices] what the optimizer makes of the rows' gradient, and donate the table. XLA else fills a gradient "
    "as large as the table with zeros, and the optimizer reads and writes all of it. Momentum and weight decay then "
    "skip the other rows",
    code="rows = table[indices]  # the loss takes these, and its gradient is of these\n"
    "table = table.at[indices].add(-rate * jax.grad(loss)(rows))  # jax.jit(..., donate_argnums=...)",
)
UNIQUE = rewrite(
    "say so where no index comes twice, .at[...].set(..., unique_indices=True): the gradient of .set else "
    "scatters the numbers of its updates first, to learn which of them stayed",
    code="x.at[indices].set(values, unique_indices=True)",
)
TOP_K = kernel(
    "one that selects: XLA sorts everything, in passes over all of it, for the part that is taken. "
    "lax.top_k of at most 16 out of 1024 or more is such a kernel already"
)
SPLIT_WEIGHT = rewrite(
    "split the weight in place of joining its operands, x @ w[:n] + (y @ w[n:])[indices] (or [:, None] for what "
    "is broadcast): what is repeated is multiplied once in place of once for each row, and no joined array is written",
    code="# before: jnp.concatenate([x, y[indices]], -1) @ w\n"
    "size = x.shape[-1]\nrows = x @ w[:size] + (y @ w[size:])[indices]",
)
UNREPEATED = rewrite(
    "repeat nothing for a product: give the other operand an axis for those that share a part, as the heads of "
    "grouped queries, jnp.einsum('bthgd,bshd->bhgts', query, key). What is repeated here is larger than the result",
    code="# before: jnp.einsum('bthd,bshd->bhts', query, jnp.repeat(key, groups, 2))\n"
    "query = query.reshape(batch, length, heads // groups, groups, size)\n"
    "scores = jnp.einsum('bthgd,bshd->bhgts', query, key)",
)
SCAN = kernel(
    "one that goes along the axis with its state on the chip: lax.associative_scan writes and reads arrays "
    "at each of its log2(n) levels, up and down"
)
LINEAR_CROSS_ENTROPY = kernel(
    "product and loss in one kernel, which never writes an array of logits",
    pattern="linear_cross_entropy",
    otherwise=LOG_SOFTMAX,
)
WHOLE_SUM = Remedy(
    kind="option",
    options=(("xla_gpu_experimental_force_split_k", "1"),),
    text="xla_gpu_experimental_force_split_k=1 keeps the product whole: XLA split its sum into parts (split-K), which "
    "this launch adds up; measure both",
)
LEAVE_ON = Remedy(kind="option", text="leave XLA's fusion passes on (xla_disable_hlo_passes switches them off)")
DONATE = rewrite(
    "donate the argument (jax.jit(..., donate_argnums=...)), so that XLA need not keep its buffer whole",
    code="step = jax.jit(step, donate_argnums=(0,))  # the numbers of the arguments that are not read again",
)
KEPT = rewrite(
    "let nothing read the value after its update in place (a loop's state, or .at[...].set): XLA copies what is "
    "needed twice"
)
OVERLAP = rewrite("cut the work into parts, so that the collective of one part runs beside the work on the next")
SEPARATE_SUMS = Remedy(
    kind="option",
    options=(("xla_gpu_all_reduce_combine_threshold_bytes", "0"),),
    text="xla_gpu_all_reduce_combine_threshold_bytes=0 leaves sums over devices apart: XLA joined several arrays for "
    "one and takes the result apart again; measure both",
)
ROPE = kernel("both halves rotated and joined in one kernel, of query and key at once", pattern="rope")
ONE_KERNEL = kernel("one for both ends, which keeps the value on the chip")
OWN_KERNEL = kernel(
    "one in the library's place, which does the work beside it, too: XLA fuses no more into a library's "
    "kernel than the epilogues that it offers"
)
KEEP_TRITON = Remedy(
    kind="option",
    options=(("xla_gpu_cublas_fallback", "False"),),
    text="xla_gpu_cublas_fallback=False keeps the product in Triton, with what was fused into it; measure both",
)
MERGE_LOOPS = kernel("one with several outputs, which reads the shared values once")
CONVOLUTION_NUMBERS = "('NHWC', 'OHWI', 'NHWC')"
"""Dimension numbers for a launch whose own are not known."""

FILTER_LAYOUT = rewrite(
    f"keep images and filters in the order that cuDNN reads (dimension_numbers={CONVOLUTION_NUMBERS} of "
    "lax.conv_general_dilated), so that XLA transposes neither"
)
SPREAD = rewrite(
    "give a transposed convolution the filter in the layout of the forward convolution: "
    "lax.conv_transpose(x, jnp.flip(w, (0, 1)).swapaxes(2, 3), ..., transpose_kernel=True) gives the same result, and "
    "w is best stored this way. cuDNN then reads x as it is. Otherwise XLA writes an array with zeros between the "
    "elements of x, and cuDNN multiplies by the zeros",
    code="w = jnp.flip(w, (0, 1)).swapaxes(2, 3)  # best stored this way\n"
    "y = jax.lax.conv_transpose(x, w, strides, padding, transpose_kernel=True)",
)
SHIFTED = rewrite(
    "write a short depthwise convolution as a sum of shifted products, "
    "sum(padded[:, i : i + length] * w[i] for i in range(taps)), in float32 (cuDNN, too, sums in float32): XLA fuses "
    "this with the work around it, and pads while it reads",
    code="padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))\n"
    "y = sum(padded[:, i : i + x.shape[1]] * w[i] for i in range(taps))",
)
