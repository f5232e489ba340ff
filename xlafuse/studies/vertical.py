"""Study of LayerNorm → GELU → linear: two launches, and why not one."""

from __future__ import annotations

import jax

from pallas_kernels import bias_activation, layer_norm, linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import ROWS, apart, at, bf16, dot, layer
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS = 4096, 4096
_TILE = 256
"""Outputs that a block of a product computes. Each of the 16 blocks side by side would norm the same rows."""


def _unfused(x, scale, bias, w):
    return dot(apart(jax.nn.gelu(apart(layer(x, scale, bias)), approximate=True)), w)


def _xla(x, scale, bias, w):
    return dot(jax.nn.gelu(layer(x, scale, bias), approximate=True), w)


def _fused(x, scale, bias, w):
    return linear(apart(jax.nn.gelu(layer(x, scale, bias), approximate=True)), w, implementation="mosaic")


def _kernels(x, scale, bias, w):
    normed = layer_norm(x, scale, bias, epsilon=1e-5, implementation="mosaic")
    assert not isinstance(normed, tuple)  # there is no residual
    return linear(bias_activation(normed, None, implementation="mosaic"), w, implementation="mosaic")


def _torch(torch, x, scale, bias, w):
    functional = torch.nn.functional
    normed = functional.layer_norm(x, (x.shape[-1],), scale, bias, 1e-5)
    return functional.gelu(normed, approximate="tanh") @ w


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=_unfused),
        XLA: Variant(function=_xla),
        FUSED: Variant(function=_fused),
        "three kernels": Variant(function=_kernels),
        "torch.compile": torch_variants(_torch)["torch.compile"],
    }
    return [
        Case(
            name=f"{rows} tokens",
            arguments=(bf16(rows, _FEATURES), bf16(_FEATURES), bf16(_FEATURES), bf16(_FEATURES, _OUTPUTS)),
            variants=at(rows, variants),
            is_counted=rows in (16, 8192),
        )
        for rows in ROWS
    ]


STUDY = comparison(
    "vertical",
    "LayerNorm, GELU and a product",
    [
        (
            Claim(
                text="LayerNorm → GELU → linear without a round trip through memory",
                published="one launch",
                source="Kernel Fusion",
            ),
            Gain(
                least=1.0,
                reason="Norm and activation in one launch, the product in another.",
            ),
        ),
    ],
    _cases,
    reason=f"In one launch each of the {_OUTPUTS // _TILE} blocks that share a row of x would norm and activate it "
    f"again, {_OUTPUTS // _TILE} times the exponentials, on the units that feed the tensor cores; the round trip that "
    f"two launches take is {4 * 8192 * _FEATURES / 1e6:.0f} MB of 8192 tokens, "
    f"{4 * 8192 * _FEATURES / 4.8e12 * 1e6:.0f} µs of an H200's bandwidth.",
)
CASES = _cases
