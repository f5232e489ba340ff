"""Study of a large product and a ReLU: what fusion saves if arithmetic sets the time."""

from __future__ import annotations

import jax

from pallas_kernels import linear
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import apart, bf16, dot
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=lambda x, w: jax.nn.relu(apart(dot(x, w)))),
        XLA: Variant(function=lambda x, w: jax.nn.relu(dot(x, w))),
        FUSED: Variant(function=lambda x, w: linear(x, w, activation="relu", implementation="mosaic")),
        "product alone": Variant(function=dot, is_checked=False),
        **torch_variants(lambda torch, x, w: torch.relu(x @ w)),
    }
    sizes = ((8192, 8192, 8192), (16384, 16384, 4096), (8192, 1024, 8192))
    return [
        Case(
            name=f"{m} × {k} × {n}",
            arguments=(bf16(m, k), bf16(k, n)),
            variants=variants,
            is_counted=m == k == n,
        )
        for m, k, n in sizes
    ]


STUDY = comparison(
    "compute_bound",
    "A large product and a ReLU",
    [
        (
            Claim(
                text="A bias or a ReLU after a large product: fusion saves little",
                published="little",
                source="Kernel Fusion",
            ),
            Gain(over=UNFUSED, most=1.1, reason="Below 1.1 counts as little; the gain is larger the shorter the sum."),
        ),
    ],
    _cases,
)
CASES = _cases
