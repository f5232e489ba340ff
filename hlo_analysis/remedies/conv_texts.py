"""Texts of the remedies for the inputs and results of a cuDNN convolution."""

from __future__ import annotations

from hlo_analysis.remedies.texts import Remedy

NUMBERS = "('NHWC', 'OHWI', 'NHWC')"
"""Dimension numbers for a launch whose own are not known."""

FILTER_LAYOUT = Remedy(
    kind="rewrite",
    text=f"keep images and filters in the order that cuDNN reads (dimension_numbers={NUMBERS} of "
    "lax.conv_general_dilated), so that XLA transposes neither",
)
SPREAD = Remedy(
    kind="rewrite",
    code="w = jnp.flip(w, (0, 1)).swapaxes(2, 3)  # best stored this way\n"
    "y = jax.lax.conv_transpose(x, w, strides, padding, transpose_kernel=True)",
    text="give a transposed convolution the filter in the layout of the forward convolution: "
    "lax.conv_transpose(x, jnp.flip(w, (0, 1)).swapaxes(2, 3), ..., transpose_kernel=True) gives the same result, and "
    "w is best stored this way. cuDNN then reads x as it is. Otherwise XLA writes an array with zeros between the "
    "elements of x, and cuDNN multiplies by the zeros",
)
SHIFTED = Remedy(
    kind="rewrite",
    code="padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))\n"
    "y = sum(padded[:, i : i + x.shape[1]] * w[i] for i in range(taps))",
    text="write a short depthwise convolution as a sum of shifted products, "
    "sum(padded[:, i : i + length] * w[i] for i in range(taps)), in float32 (cuDNN, too, sums in float32): XLA fuses "
    "this with the work around it, and pads while it reads",
)
