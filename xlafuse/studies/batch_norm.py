"""Study of batch norm in training: its mean over the batch needs values from every block of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import batch_norm
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, claim, comparison
from xlafuse.studies.products import apart
from xlafuse.studies.recorded import recorded_rows
from xlafuse.studies.records import Row
from xlafuse.studies.variants import Case, Variant, count_variants

_SPECS = ("32768x1024", "32768x4096", "8192x8192")


def _stages(x, scale, bias):
    mean = apart(jnp.mean(x, axis=0, dtype=jnp.float32))
    centred = apart(x.astype(jnp.float32) - mean)
    variance = apart(jnp.mean(centred * centred, axis=0))
    y = centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias
    return y.astype(x.dtype), mean, variance


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=_stages),
        XLA: Variant(function=lambda x, scale, bias: batch_norm(x, scale, bias, implementation="xla")),
        FUSED: Variant(function=lambda x, scale, bias: batch_norm(x, scale, bias, implementation="mosaic")),
    }
    cases = []
    for spec in _SPECS:
        rows, features = map(int, spec.split("x"))
        vector = jax.ShapeDtypeStruct((features,), jnp.float32)
        x = jax.ShapeDtypeStruct((rows, features), jnp.bfloat16)
        cases.append(Case(name=f"{rows} × {features}", arguments=(x, vector, vector), variants=variants))
    return cases


def _count(target: str) -> Iterator[Row | str]:
    yield from count_variants(_cases()[1:2], target)
    for spec, case in zip(_SPECS, _cases(), strict=True):
        yield from recorded_rows("batch_norm", "forward", f"{spec}-bfloat16", case.name, {"xla": XLA, "mosaic": FUSED})


STUDY = replace(
    comparison(
        "batch_norm",
        "Batch norm: a reduction over the whole grid",
        [
            claim(
                "A mean over the batch needs a reduction across multiprocessors: atomics or two passes",
                "two passes",
                "Kernel Fusion",
                Gain(
                    over=XLA,
                    least=1.0,
                    reason="Two passes are needed; each block leaves its sums, and the second pass of a small x "
                    "reads it from L2.",
                ),
            ),
        ],
        _cases,
    ),
    count=_count,
)
