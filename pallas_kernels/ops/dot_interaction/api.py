"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops.dot_interaction.mosaic_gpu import (
    ROWS,
    Triangle,
    dot_interaction_backward,
    dot_interaction_forward,
)
from pallas_kernels.ops.dot_interaction.reference import dot_interaction_reference
from pallas_kernels.primitives.checks import as_arrays, check_floating, static_flag
from pallas_kernels.primitives.gemm.operands import DTYPES
from pallas_kernels.primitives.gradients import with_backward
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported
from pallas_kernels.primitives.rows import THREADS

_FIELDS_BY_XLA = 40
"""Up to so many fields XLA is faster forward: the kernel computes all products of 64 rows."""
MOST_FEATURES = 512
"""The largest vector size: 64 vectors of it take 64 KiB of shared memory."""


@operation("features: ... f d -> ... !p")
def dot_interaction(
    features: jax.Array, *, self_interaction: bool = False, implementation: Implementation = None
) -> jax.Array:
    """Multiplies each pair of a sample's feature vectors: the interaction of DLRM.

    Equivalent to this, in float32 between the casts:

        products = features @ features.swapaxes(-1, -2)       # (..., fields, fields)
        y = products[..., *np.tril_indices(fields, 0 if self_interaction else -1)]

    "mosaic" does not write the products to memory but for y, and is one kernel each way.

    Args:
        features: (..., fields, size), bfloat16, float16 or float32 (float64 with "xla").
        self_interaction: whether y has the products of vectors with themselves, too.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; bfloat16 and float16, at
            most 64 fields, at least 128 pairs (17 fields), and a size that is a multiple of 16 and at most 512.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla". Up to 40 fields "xla" forward, and "mosaic" for the gradient.

    Returns:
        y, (..., pairs), of the dtype of features: the lower triangle, row after row.

    Raises:
        TypeError, ValueError: features or the implementation are not as above.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
    https://arxiv.org/abs/1906.00091
    """
    (features,) = as_arrays("dot_interaction", features=features)
    self_interaction = static_flag("dot_interaction", "self_interaction", self_interaction)
    check_floating("dot_interaction", features=features)
    if features.ndim < 2:
        raise ValueError(f"dot_interaction: features must be (..., fields, size), got {features.shape}.")
    support = {"mosaic": partial(mosaic_unsupported, features, self_interaction), "xla": lambda: None}
    chosen = choose("dot_interaction", implementation, support, preferred=("mosaic",))
    reference = partial(dot_interaction_reference, self_interaction=self_interaction)
    if chosen == "xla" or features.size == 0:
        return reference(features)
    samples = features.reshape(-1, *features.shape[-2:])
    # On an H200, µs of the forward kernel and of XLA: 3483x16x128 18.9 and 11.1, 8448x27x64 37.8 and 31.1, 14128x17x64
    # 52.5 and 30.6, 8192x40x128 67.3 and 54.3, 6912x40x256 78 and 60 to 85, 8192x48x64 58.9 and 58.2, 8192x48x256 93.2
    # and 106.7; of the rest of the gradient 50.4 and 56.4, 97.4 and 122.9 for the first two.
    by_xla = implementation is None and samples.shape[1] <= _FIELDS_BY_XLA
    forward, backward = (
        partial(each, has_diagonal=self_interaction) for each in (dot_interaction_forward, dot_interaction_backward)
    )
    y = partly_by_xla(with_backward(forward, backward), reference, forward=by_xla, backward=backward)(samples)
    return y.reshape(*features.shape[:-2], -1)


def mosaic_unsupported(features: jax.Array, self_interaction: bool) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if features.dtype.name not in DTYPES:
        return f"features are {features.dtype.name}, the kernels take {', '.join(DTYPES)}"
    fields, size = features.shape[-2:]
    pairs = Triangle(fields=fields, has_diagonal=self_interaction).pairs
    if features.size and (fields > ROWS or pairs < THREADS):
        return (
            f"{fields} fields make {pairs} pairs; the kernels take at most {ROWS} fields and at least {THREADS} pairs"
        )
    if size % 16 or size > MOST_FEATURES:
        return f"the vectors have {size} values, the kernels take multiples of 16 up to {MOST_FEATURES}"
    return mosaic_gpu_unsupported()
