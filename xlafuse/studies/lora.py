"""Study of a linear layer with a low-rank update: x is read once for both products, or once for each."""

from __future__ import annotations

from pallas_kernels import lora_linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import ROWS, apart, at, bf16, dot
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS, _RANK = 4096, 4096, 16


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=lambda x, w, a, b: apart(dot(x, w)) + apart(dot(apart(dot(x, a)), b)) / _RANK),
        XLA: Variant(function=lambda x, w, a, b: dot(x, w) + dot(dot(x, a), b) / _RANK),
        FUSED: Variant(function=lambda x, w, a, b: lora_linear(x, w, a, b, alpha=1 / _RANK, implementation="mosaic")),
        **torch_variants(lambda torch, x, w, a, b: x @ w + (x @ a) @ b / _RANK),
    }
    return [
        Case(
            name=f"{rows} tokens, rank {_RANK}",
            arguments=(bf16(rows, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(_FEATURES, _RANK), bf16(_RANK, _OUTPUTS)),
            variants=at(rows, variants),
            is_counted=rows in (16, 8192),
        )
        for rows in ROWS
    ]


STUDY = comparison(
    "lora",
    "A low-rank update in the product",
    [
        (
            Claim(
                text="Base product and both low-rank products in one: x is read once",
                published="one read of x",
                source="GPU MODE lecture on fusing kernels",
            ),
            Gain(
                least=1.0,
                reason="x and the partial result cost little beside the weights or the arithmetic; the "
                "launches count most with few tokens.",
            ),
        ),
    ],
    _cases,
)
CASES = _cases
