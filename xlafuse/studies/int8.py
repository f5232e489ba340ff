"""Study of a product with int8 weights, from one token to 8192: dequantized in registers or in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import QuantizedWeight, quantized_linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import apart, at, bf16, dot
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS = 4096, 4096
_ROWS = (1, 4, 16, 64, 256, 512, 2048, 8192)


def _weight(values, scales) -> QuantizedWeight:
    return QuantizedWeight(values=values, scales=scales, bits=8, group_size=None)


def _product(x, values, scales, *, is_apart: bool):
    w = _weight(values, scales).dequantized(x.dtype)
    return dot(x, apart(w) if is_apart else w)


def _fused(x, values, scales):
    return quantized_linear(x, _weight(values, scales), implementation="mosaic")


def _torch(torch, x, values, scales):
    return x @ (values.to(torch.float32) * scales.T).to(x.dtype).T


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=lambda x, v, s: _product(x, v, s, is_apart=True)),
        XLA: Variant(function=lambda x, v, s: _product(x, v, s, is_apart=False)),
        FUSED: Variant(function=_fused),
        "torch.compile": torch_variants(_torch)["torch.compile"],
    }
    values = jax.ShapeDtypeStruct((_OUTPUTS, _FEATURES), jnp.int8)
    scales = jax.ShapeDtypeStruct((1, _OUTPUTS), jnp.float32)
    return [
        Case(
            name=f"{rows} tokens",
            arguments=(bf16(rows, _FEATURES), values, scales),
            variants=at(rows, variants),
            is_counted=rows in (16, 8192),
        )
        for rows in _ROWS
    ]


STUDY = comparison(
    "int8",
    "Weights dequantised in registers",
    [
        (
            Claim(
                text="Dequantise in registers inside the product: one read of the weights",
                published="one read",
                source="Writing Fused Kernels with Triton",
            ),
            Gain(least=2.0, reason="With many tokens the product's arithmetic hides the weights' traffic."),
        ),
    ],
    _cases,
)
CASES = _cases
