"""The MLPs of experts: rows in groups, each times its own weights, as XLA multiplies them and in our kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import gated_linear, grouped_gated_linear, grouped_linear, linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, claim, comparison
from xlafuse.studies.products import bf16
from xlafuse.studies.variants import UNFUSED as SWITCHED_OFF
from xlafuse.studies.variants import Case, Variant, drawn

_DENSE = "one dense MLP of the size"
_CASES = ((16384, 4096, 14336, 8), (16384, 2048, 1536, 64), (64, 2048, 768, 128))
"""Rows, features, hidden features and experts: training as Mixtral's, with more and smaller experts, and decoding."""


def _ragged(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    gated, rows = lax.ragged_dot(x, gate, sizes), lax.ragged_dot(x, up, sizes)
    return lax.ragged_dot(jax.nn.silu(gated) * rows, down, sizes)


def _grouped(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    hidden = grouped_gated_linear(x, gate, up, sizes, implementation="mosaic")
    return grouped_linear(hidden, down, sizes, implementation="mosaic")


def _dense(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, _: jax.Array) -> jax.Array:
    return linear(gated_linear(x, gate[0], up[0]), down[0])


def _argument(rows: int, struct: Any, seed: int) -> jax.Array:
    """Draws an argument; the groups' sizes sum to the rows."""
    if jnp.issubdtype(struct.dtype, jnp.integer):
        generator = np.random.default_rng(seed)
        (groups,) = struct.shape
        return jnp.asarray(generator.multinomial(rows, generator.dirichlet(np.full(groups, 2.0))), jnp.int32)
    return drawn(struct, seed) * (struct.shape[-2] ** -0.5 if struct.ndim == 3 else 1)


def _case(rows: int, features: int, hidden: int, groups: int) -> Case:
    weights = bf16(groups, features, hidden), bf16(groups, features, hidden), bf16(groups, hidden, features)
    return Case(
        name=f"{rows} rows, {groups} experts of {features} × {hidden}",
        arguments=(bf16(rows, features), *weights, jax.ShapeDtypeStruct((groups,), jnp.int32)),
        variants={
            UNFUSED: Variant(function=_ragged, options=SWITCHED_OFF),
            XLA: Variant(function=_ragged),
            FUSED: Variant(function=_grouped),
            _DENSE: Variant(function=_dense, is_checked=False),
        },
        draw=partial(_argument, rows),
    )


STUDY = comparison(
    "experts",
    "Products of experts",
    [
        claim(
            "Multiplying the tokens of each expert alone, none dropped or padded, is faster than padding",
            "training up to 1.4 times as fast as Tutel's",
            "MegaBlocks, arXiv:2211.15841",
            Gain(
                over=XLA,
                least=1.4,
                reason="Padded experts compute rows that nothing needs. XLA's compute each row for every expert.",
            ),
        ),
    ],
    lambda: [_case(*each) for each in _CASES],
    reason="On a GPU, XLA makes one dense product over all groups of lax.ragged_dot: it multiplies each row by every "
    "expert's weights, and writes the rows once for each expert.",
)
