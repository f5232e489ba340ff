"""Study of query, key and value: three products, one wider product, or one kernel."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import qkv_projection
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, comparison
from xlafuse.studies.products import ROWS, apart, at, bf16, dot
from xlafuse.studies.records import Claim
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _QUERY, _KEY = 4096, 4096, 1024


def _three(x, w_q, w_k, w_v):
    return tuple(apart(dot(x, w)) for w in (w_q, w_k, w_v))


def _joined(x, w_q, w_k, w_v):
    product = dot(x, jnp.concatenate([w_q, w_k, w_v], axis=1))
    return jnp.split(product, (_QUERY, _QUERY + _KEY), axis=1)


def _stored_joined(x, w):
    return jnp.split(dot(x, w), (_QUERY, _QUERY + _KEY), axis=1)


def _fused(x, w_q, w_k, w_v):
    return qkv_projection(x, w_q, w_k, w_v, implementation="mosaic")


def _cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=_three, options={"xla_gpu_dot_merger_threshold_mb": 0}),
        XLA: Variant(function=lambda x, w_q, w_k, w_v: (dot(x, w_q), dot(x, w_k), dot(x, w_v))),
        "joined each time": Variant(function=_joined),
        FUSED: Variant(function=_fused),
        **torch_variants(lambda torch, x, w_q, w_k, w_v: (x @ w_q, x @ w_k, x @ w_v)),
    }
    weights = (bf16(_FEATURES, _QUERY), bf16(_FEATURES, _KEY), bf16(_FEATURES, _KEY))
    joined = bf16(_FEATURES, _QUERY + 2 * _KEY)
    return [
        *(
            Case(
                name=f"{rows} tokens",
                arguments=(bf16(rows, _FEATURES), *weights),
                variants=at(rows, variants),
                is_counted=rows in (16, 8192),
            )
            for rows in ROWS
        ),
        *(
            Case(
                name=f"{rows} tokens, weights stored joined",
                arguments=(bf16(rows, _FEATURES), joined),
                variants={
                    "one wider product": Variant(function=lambda x, w: dot(x, w)),
                    "one wider product, split": Variant(function=_stored_joined),
                },
                is_counted=False,
            )
            for rows in ROWS
        ),
    ]


STUDY = comparison(
    "qkv",
    "Query, key and value in one product",
    [
        (
            Claim(text="One wider product for three", published="about 1.2 ×", source="Fusion as annotated code"),
            Gain(least=1.2, reason="x is a small part of the traffic; few tokens gain launches, many whole waves."),
        ),
        (
            Claim(
                text="One kernel reads x once and writes three outputs", published="fewer reads", source="Kernel Fusion"
            ),
            Gain(over=XLA, least=1.0),
        ),
    ],
    _cases,
)
CASES = _cases
