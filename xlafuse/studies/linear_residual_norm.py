"""Study of a product, a residual sum and RMSNorm: what reading the stream twice costs."""

from __future__ import annotations

from pallas_kernels import linear_residual_norm
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import ROWS, apart, at, bf16, dot, rms
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS = 4096, 4096


def _unfused(x, w, residual, scale):
    stream = apart(apart(dot(x, w)) + residual)
    return rms(stream, scale), stream


def _xla(x, w, residual, scale):
    stream = dot(x, w) + residual
    return rms(stream, scale), stream


def _fused(x, w, residual, scale):
    from pallas_kernels import rms_norm

    product = linear_residual_norm(x, w, residual=residual, implementation="mosaic")[0]
    return rms_norm(product, scale, implementation="mosaic"), product


def _torch(torch, x, w, residual, scale):
    stream = torch.addmm(residual, x, w)
    return torch.nn.functional.rms_norm(stream, (stream.shape[-1],), scale, 1e-6), stream


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=_unfused),
        XLA: Variant(function=_xla),
        FUSED: Variant(function=_fused),
        "sum and mean square in the product": Variant(
            function=lambda x, w, residual, scale: linear_residual_norm(
                x, w, residual=residual, implementation="mosaic"
            )[::-1]
        ),
        "torch.compile": torch_variants(_torch)["torch.compile"],
    }
    return [
        Case(
            name=f"{rows} tokens",
            arguments=(bf16(rows, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(rows, _OUTPUTS), bf16(_OUTPUTS)),
            variants=at(rows, variants),
            is_counted=rows in (16, 8192),
        )
        for rows in ROWS
    ]


STUDY = comparison(
    "linear_residual_norm",
    "Product, residual and RMSNorm",
    [
        (
            Claim(
                text="Matmul + residual + RMSNorm saves two reads of the residual stream",
                published="two reads",
                source="Writing Fused Kernels with Triton",
            ),
            Gain(
                least=1.0,
                reason="The norm needs a whole row, which several blocks compute: it stays a launch, or "
                "moves into the next product, as a row scale.",
            ),
        ),
        (
            Claim(text="Residual + LayerNorm in one", published="about 1.1 ×", source="Fusion as annotated code"),
            Gain(over=XLA, least=1.1),
        ),
    ],
    _cases,
)
CASES = _cases
