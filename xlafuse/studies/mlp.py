"""Study of the first product of an MLP with bias and GELU: three launches or one."""

from __future__ import annotations

import jax

from pallas_kernels import linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import ROWS, apart, at, bf16, dot
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS = 4096, 16384


def _unfused(x, w, bias):
    return jax.nn.gelu(apart(apart(dot(x, w)) + bias), approximate=True)


def _torch(torch, x, w, bias):
    return torch.nn.functional.gelu(torch.addmm(bias, x, w), approximate="tanh")


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=_unfused),
        XLA: Variant(function=lambda x, w, bias: jax.nn.gelu(dot(x, w) + bias, approximate=True)),
        FUSED: Variant(
            function=lambda x, w, bias: linear(x, w, bias=bias, activation="gelu_tanh", implementation="mosaic")
        ),
        **torch_variants(_torch),
    }
    return [
        Case(
            name=f"{rows} tokens",
            arguments=(bf16(rows, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(_OUTPUTS)),
            variants=at(rows, variants),
            is_counted=rows in (16, 8192),
        )
        for rows in ROWS
    ]


STUDY = comparison(
    "mlp",
    "Bias and GELU in the product before them",
    [
        (
            Claim(
                text="GELU fused into the MLP's first product",
                published="1.1 to 1.2 ×",
                source="Fusion as annotated code",
            ),
            Gain(least=1.1, reason="The product's own time sets how much its epilogue can save."),
        ),
        (
            Claim(
                text="Product, bias and activation: three launches become one",
                published="3 → 1 launches",
                source="GPU MODE lecture on fusing kernels",
            ),
            Gain(over="PyTorch eager", least=1.0),
        ),
    ],
    _cases,
)
CASES = _cases
