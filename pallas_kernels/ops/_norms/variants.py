"""The kernel configurations of a norm worth timing, as `OpSpec.variants` wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ops._norms.config import BackwardShape, forward_candidates
from pallas_kernels.specs import Arguments


def norm_variants(
    phase: str,
    arguments: Arguments,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    centered: bool = False,
    has_dropout: bool = False,
) -> Mapping[str, Callable[..., Any]]:
    """`forward` or `backward`, which take the arguments and a `config`, with each configuration, by name."""
    x, scale = arguments["x"], arguments.get("scale")
    features, itemsize = x.shape[-1], jnp.dtype(x.dtype).itemsize
    if phase == "forward":
        return {name: partial(forward, config=c) for name, c in forward_candidates(features, itemsize).items()}
    shape = BackwardShape(
        features=features,
        itemsize=itemsize,
        streams=2 if arguments.get("residual") is None else 3,
        gain_bytes=0 if scale is None else jnp.dtype(scale.dtype).itemsize,
        sums=sum(arguments.get(name) is not None for name in ("scale", "bias")),
        has_dropout=has_dropout,
        centered=centered,
    )
    return {name: partial(backward, config=c) for name, c in shape.candidates().items()}
