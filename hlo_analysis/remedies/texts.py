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


ATTENTION = Remedy(
    kind="kernel",
    pattern="attention",
    text="one kernel that keeps the scores on the chip, e.g. cuDNN's through "
    "jax.nn.dot_product_attention(implementation='cudnn') for bfloat16 and float16, which takes no soft cap; few "
    "queries against a long cache want a kernel for decoding",
    code='out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")',
)
PADDED = Remedy(
    kind="rewrite",
    pattern="padded_product",
    text="pad {size} to {padded} in the model (a vocabulary, features), or add zeros to what is multiplied and take a "
    "part of the result, which XLA fuses with what reads it: cuBLAS takes rows that begin at multiples of 16 bytes",
    code="# before: y = x @ w\ny = (x @ jnp.pad(w, ((0, 0), (0, {more}))))[..., :{size}]",
)
ATTENTION_CAST = Remedy(
    kind="rewrite",
    text="cast query, key and value to bfloat16 or float16 first, "
    "jax.nn.dot_product_attention(*(x.astype(jnp.bfloat16) for x in (query, key, value)), implementation='cudnn'): "
    "kernels that keep the scores on the chip take no other type",
    code="half = [x.astype(jnp.bfloat16) for x in (query, key, value)]\n"
    'out = jax.nn.dot_product_attention(*half, implementation="cudnn").astype(query.dtype)',
)
UNTRANSPOSED_ATTENTION = Remedy(
    kind="kernel",
    pattern="attention",
    text="a kernel that takes query, key and value as their projections write them (batch, length, heads, size), and "
    "writes its result so, e.g. cuDNN's through jax.nn.dot_product_attention: then nothing is transposed",
    code=ATTENTION.code,
)
GATED_LINEAR = Remedy(
    kind="kernel",
    pattern="gated_linear",
    text="both products and the gated activation in one kernel, which writes only the result",
)
LORA_LINEAR = Remedy(
    kind="kernel",
    pattern="lora_linear",
    text="x @ w + (x @ a) @ b in one kernel, which adds the correction before the result is written; "
    "w + a @ b, where that is made first, is an array as large as w",
)
LINEAR_EPILOGUE = Remedy(
    kind="kernel",
    pattern="linear",
    text="the work after the product done in its epilogue, before the result is written",
)
LINEAR_KEEPS_PRODUCT = Remedy(
    kind="kernel",
    pattern="linear",
    text="product and activation in one kernel, which keeps the product alone for the gradient, and whose gradient "
    "computes again what else it needs",
)
CHECKPOINTED = Remedy(
    kind="rewrite",
    code="activation = jax.checkpoint(activation)  # e.g. jax.checkpoint(jax.nn.gelu)",
    text="compute it again in the backward pass: jax.checkpoint around the element-wise function, as in "
    "jax.checkpoint(jax.nn.gelu)(x). The backward pass reads what it is made of anyway",
)
EPILOGUE = Remedy(
    kind="kernel", text="a product that does the work after it in its epilogue, before the result is written"
)
REDUCED_PRODUCT = Remedy(
    kind="kernel",
    text="one for the product and what reduces it, as attention is: each block of the result is reduced on the "
    "chip, and written only if something else reads it",
)
RESIDUAL_NORM = Remedy(
    kind="kernel",
    pattern="linear_residual_norm",
    text="product, residual and the mean squares of their rows in one kernel; the next "
    "layer divides by their roots as it loads its input",
)
QUANTIZED = Remedy(
    kind="kernel",
    pattern="quantized_linear",
    text="the product widens int8 or int4 weights as it loads them. Scales of whole columns may as "
    "well go behind the product, (x @ w.astype(x.dtype)) * scale: XLA then loads the integers, too",
    code="y = (x @ w.astype(x.dtype)) * scale",
)
LINEAR_PROLOGUE = Remedy(kind="kernel", text="a product that does the work before it as its operand is loaded")
NORM_LINEAR = Remedy(
    kind="kernel",
    pattern="norm_linear",
    text="the product normalises its rows as it loads them, or scales its result afterwards",
)
RMS_NORM = Remedy(
    kind="kernel",
    pattern="rms_norm",
    keeps_input=True,
    text="the reduction and all that follows it in one kernel, the row read once",
)
LAYER_NORM = Remedy(
    kind="kernel",
    pattern="layer_norm",
    keeps_input=True,
    text="mean, variance and all that follows in one kernel, the row read once",
)
BATCH_NORM = Remedy(
    kind="kernel",
    pattern="batch_norm",
    keeps_input=True,
    text="mean and variance of a feature in one pass over the rows, and what follows in another",
)
GROUP_NORM = Remedy(
    kind="kernel",
    text="one for each group: mean, variance and all that follows, what is normalized together read once and kept on "
    "the chip where it fits",
)
SOFTMAX = Remedy(
    kind="kernel",
    pattern="softmax",
    keeps_input=True,
    text="maximum, sum and quotient in one kernel, the row read once",
)
LOG_SOFTMAX = Remedy(
    kind="kernel",
    pattern="cross_entropy",
    keeps_input=True,
    text="maximum, sum and logarithm in one kernel, the row read once (where the result is a loss); give it the logits "
    "as the product writes them, not widened to float32",
)
LAYOUT = Remedy(
    kind="rewrite",
    text="give the operation the layout that its neighbour wants (order of einsum axes, of reshape and transpose), so "
    "that nothing is moved",
)
PARTS = Remedy(
    kind="rewrite",
    text="have the operation work on the part where it lies (by indices, a mask, or sizes that need no padding), so "
    "that it is not moved first",
)
ADD_TO = Remedy(
    kind="rewrite",
    text="add into an array that exists anyway (residual.at[indices].add(...) in place of zeros), or gather what "
    "belongs to each row where the indices can be inverted: here an array of zeros is written first",
)
PICKED = Remedy(
    kind="rewrite",
    text="pick by a mask, jnp.where(jnp.arange(n) == index[..., None], x, 0).sum(-1), in place of "
    "jnp.take_along_axis (and of optax.softmax_cross_entropy_with_integer_labels, which calls it): XLA updates the "
    "whole array in place for its gradient and reads it again; the mask's gradient fuses into its readers",
    code="# before: jnp.take_along_axis(x, index[..., None], -1)[..., 0]\n"
    "picked = jnp.where(jnp.arange(x.shape[-1]) == index[..., None], x, 0).sum(-1)",
)
ROWS_UPDATED = Remedy(
    kind="rewrite",
    code="rows = table[indices]  # the loss takes these, and its gradient is of these\n"
    "table = table.at[indices].add(-rate * jax.grad(loss)(rows))  # jax.jit(..., donate_argnums=...)",
    text="update only the rows that were looked up: give the loss rows = table[indices] in place of the table, add to "
    "table.at[indices] what the optimizer makes of the rows' gradient, and donate the table. XLA else fills a gradient "
    "as large as the table with zeros, and the optimizer reads and writes all of it. Momentum and weight decay then "
    "skip the other rows",
)
UNIQUE = Remedy(
    kind="rewrite",
    code="x.at[indices].set(values, unique_indices=True)",
    text="say so where no index comes twice, .at[...].set(..., unique_indices=True): the gradient of .set else "
    "scatters the numbers of its updates first, to learn which of them stayed",
)
TOP_K = Remedy(
    kind="kernel",
    text="one that selects: XLA sorts everything, in passes over all of it, for the part that is taken. "
    "lax.top_k of at most 16 out of 1024 or more is such a kernel already",
)
SPLIT_WEIGHT = Remedy(
    kind="rewrite",
    code="# before: jnp.concatenate([x, y[indices]], -1) @ w\n"
    "size = x.shape[-1]\nrows = x @ w[:size] + (y @ w[size:])[indices]",
    text="split the weight in place of joining its operands, x @ w[:n] + (y @ w[n:])[indices] (or [:, None] for what "
    "is broadcast): what is repeated is multiplied once in place of once for each row, and no joined array is written",
)
UNREPEATED = Remedy(
    kind="rewrite",
    code="# before: jnp.einsum('bthd,bshd->bhts', query, jnp.repeat(key, groups, 2))\n"
    "query = query.reshape(batch, length, heads // groups, groups, size)\n"
    "scores = jnp.einsum('bthgd,bshd->bhgts', query, key)",
    text="repeat nothing for a product: give the other operand an axis for those that share a part, as the heads of "
    "grouped queries, jnp.einsum('bthgd,bshd->bhgts', query, key). What is repeated here is larger than the result",
)
SCAN = Remedy(
    kind="kernel",
    text="one that goes along the axis with its state on the chip: lax.associative_scan writes and reads arrays "
    "at each of its log2(n) levels, up and down",
)
LINEAR_CROSS_ENTROPY = Remedy(
    kind="kernel",
    pattern="linear_cross_entropy",
    text="product and loss in one kernel, which never writes an array of logits",
    otherwise=LOG_SOFTMAX,
)
WHOLE_SUM = Remedy(
    kind="option",
    options=(("xla_gpu_experimental_force_split_k", "1"),),
    text="xla_gpu_experimental_force_split_k=1 keeps the product whole: XLA split its sum into parts (split-K), which "
    "this launch adds up; measure both",
)
LEAVE_ON = Remedy(kind="option", text="leave XLA's fusion passes on (xla_disable_hlo_passes switches them off)")
DONATE = Remedy(
    kind="rewrite",
    code="step = jax.jit(step, donate_argnums=(0,))  # the numbers of the arguments that are not read again",
    text="donate the argument (jax.jit(..., donate_argnums=...)), so that XLA need not keep its buffer whole",
)
KEPT = Remedy(
    kind="rewrite",
    text="let nothing read the value after its update in place (a loop's state, or .at[...].set): XLA copies what is "
    "needed twice",
)
OVERLAP = Remedy(
    kind="rewrite",
    text="cut the work into parts, so that the collective of one part runs beside the work on the next",
)
SEPARATE_SUMS = Remedy(
    kind="option",
    options=(("xla_gpu_all_reduce_combine_threshold_bytes", "0"),),
    text="xla_gpu_all_reduce_combine_threshold_bytes=0 leaves sums over devices apart: XLA joined several arrays for "
    "one and takes the result apart again; measure both",
)
ROPE = Remedy(
    kind="kernel", pattern="rope", text="both halves rotated and joined in one kernel, of query and key at once"
)
ONE_KERNEL = Remedy(kind="kernel", text="one for both ends, which keeps the value on the chip")
OWN_KERNEL = Remedy(
    kind="kernel",
    text="one in the library's place, which does the work beside it, too: XLA fuses no more into a library's "
    "kernel than the epilogues that it offers",
)
KEEP_TRITON = Remedy(
    kind="option",
    options=(("xla_gpu_cublas_fallback", "False"),),
    text="xla_gpu_cublas_fallback=False keeps the product in Triton, with what was fused into it; measure both",
)
MERGE_LOOPS = Remedy(kind="kernel", text="one with several outputs, which reads the shared values once")
