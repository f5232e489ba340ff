"""The operations of `pallas_kernels`, as the catalogue that remedies name them from."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.catalogue import Kernel
from hlo_analysis.patterns.launch_patterns import is_batched, is_product, takes_sixteen_bits
from hlo_analysis.program.facts import LaunchRow

_HOPPER = (9,)
_ROWS = ("batch_norm", "cross_entropy", "dropout_residual_norm", "layer_norm", "rms_norm", "softmax")
_PRODUCTS = ("gated_linear", "linear", "linear_cross_entropy", "linear_residual_norm", "lora_linear", "norm_linear",
             "quantized_linear")  # fmt: skip


def _single_product(launches: Sequence[LaunchRow]) -> str | None:
    """The kernels for matrix products multiply two matrices of 16 bits, and no batches of them."""
    product = next((launch for launch in launches if is_product(launch)), None)
    if product is None or (takes_sixteen_bits(product) and not is_batched(product)):
        return None
    return "the kernel of pallas_kernels multiplies by a single matrix, in bfloat16 or float16"


KERNELS = (
    Kernel(name="attention", pattern="attention", package="pallas_kernels", compute_capabilities=_HOPPER),
    *(Kernel(name=name, pattern=name, package="pallas_kernels", compute_capabilities=_HOPPER) for name in _ROWS),
    *(
        Kernel(
            name=name,
            pattern=name,
            package="pallas_kernels",
            compute_capabilities=_HOPPER,
            limit=_single_product,
        )
        for name in _PRODUCTS
    ),
)
"""One entry an operation that covers a pattern of the analyzer; `analyze(..., catalogue=KERNELS)`."""
