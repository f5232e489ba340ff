"""Texts of the remedies for the inputs and results of a cuDNN convolution."""

from __future__ import annotations

from hlo_analysis.remedies.texts import Remedy

NUMBERS = "('NHWC', 'OHWI', 'NHWC')"
"""Where a launch does not say how its own lie."""

FILTER_LAYOUT = Remedy(
    kind="rewrite",
    text=f"keep images and filters as cuDNN takes them (dimension_numbers={NUMBERS} of lax.conv_general_dilated), so "
    "that none is transposed",
)
PADDED = Remedy(
    kind="rewrite",
    text="pad both sides alike, as padding=((1, 1), (1, 1)), where the model may be so: cuDNN then pads as it reads. "
    "'SAME' with a stride pads one side more, in an array of its own, and a causal convolution one side alone: without "
    "a gradient it may be padded on both, and cut ([:, :length]) by its reader",
)
CONVOLVED_PARTS = Remedy(
    kind="rewrite",
    text="convolve what is joined part by part and add, conv(a, w[:, :, :n]) + conv(b, w[:, :, n:]): cuDNN adds the "
    "one result as it writes the other, and nothing is joined",
)
SPREAD = Remedy(
    kind="rewrite",
    text="give a transposed convolution the filter of the convolution whose gradient it is: "
    "lax.conv_transpose(x, jnp.flip(w, (0, 1)).swapaxes(2, 3), ..., transpose_kernel=True) makes the same of a filter "
    "w, best kept so. cuDNN then takes x as it is; else XLA writes zeros between its elements, and cuDNN multiplies by "
    "them",
)
SHIFTED = Remedy(
    kind="rewrite",
    text="write a short convolution of each feature alone as a sum of shifted products, "
    "sum(padded[:, i : i + length] * w[i] for i in range(taps)), in float32 as cuDNN sums: XLA fuses it with what is "
    "around it, and pads as it reads",
)
