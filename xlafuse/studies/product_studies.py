"""Studies that time a matrix product with what is around it: apart, as XLA fuses it, and in our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from pallas_kernels import Norm, QuantizedWeight
from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, Gain, claim, comparison
from xlafuse.studies.products import ROWS, apart, bf16, dot, layer, rms
from xlafuse.studies.records import Claim, Study
from xlafuse.studies.variants import Case, Variant, torch_variants

_FEATURES, _OUTPUTS, _WIDE, _KEYS, _RANK = 4096, 4096, 16384, 1024, 16
_TORCH_ROWS = (16, 512, 8192)
"""Rows at which PyTorch is timed too; torch.compile takes seconds a shape."""
_TILE = 256
"""Outputs that a block of a product computes. Each of the 16 blocks side by side would norm the same rows."""
_ANNOTATED, _TRITON = "Fusion as annotated code", "Writing Fused Kernels with Triton"
_KERNEL_FUSION, _LECTURE = "Kernel Fusion", "GPU MODE lecture on fusing kernels"


def _study(
    name: str,
    title: str,
    claims: Sequence[tuple[Claim, Gain]],
    inputs: Callable[[int], tuple[Any, ...]],
    variants: Mapping[str, Callable[..., Any] | Variant],
    *,
    torch: Callable[..., Any],
    eager: bool = True,
    rows: Iterable[int] = ROWS,
    counted: Iterable[int] = (16, 8192),
    case: str = "{} tokens",
    others: Sequence[Case] = (),
    reason: str = "",
) -> Study:
    """Makes a study with a case for each number of tokens.

    inputs: makes the arguments of so many tokens. torch: the function in PyTorch, compiled and, if `eager`, as it is.
    """
    plain = {key: each if isinstance(each, Variant) else Variant(function=each) for key, each in variants.items()}
    torched = {key: each for key, each in torch_variants(torch).items() if eager or key == "torch.compile"}
    cases = [
        Case(
            name=case.format(n),
            arguments=inputs(n),
            variants=plain | (torched if n in _TORCH_ROWS else {}),
            is_counted=n in set(counted),
        )
        for n in rows
    ]
    return comparison(name, title, claims, lambda: [*cases, *others], reason=reason)


def _split(product: jax.Array) -> list[jax.Array]:
    return jnp.split(product, (_OUTPUTS, _OUTPUTS + _KEYS), axis=1)


_QKV = _study(
    "qkv",
    "Query, key and value in one product",
    [
        claim("One wider product for three", "about 1.2 ×", _ANNOTATED,
               Gain(least=1.2, reason="x is a small part of the traffic; few tokens gain launches, many whole waves.")),
        claim("One kernel reads x once and writes three outputs", "fewer reads", _KERNEL_FUSION,
               Gain(over=XLA, least=1.0)),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(_FEATURES, _KEYS), bf16(_FEATURES, _KEYS)),
    {
        UNFUSED: Variant(
            function=lambda x, *weights: tuple(apart(dot(x, w)) for w in weights),
            options={"xla_gpu_dot_merger_threshold_mb": 0},
        ),
        XLA: lambda x, *weights: tuple(dot(x, w) for w in weights),
        "joined each time": lambda x, *weights: _split(dot(x, jnp.concatenate(weights, axis=1))),
        FUSED: lambda x, *weights: kernels.qkv_projection(x, *weights, implementation="mosaic"),
    },
    torch=lambda torch, x, *weights: tuple(x @ w for w in weights),
    others=[
        Case(
            name=f"{n} tokens, weights stored joined",
            arguments=(bf16(n, _FEATURES), bf16(_FEATURES, _OUTPUTS + 2 * _KEYS)),
            variants={
                "one wider product": Variant(function=lambda x, w: dot(x, w)),
                "one wider product, split": Variant(function=lambda x, w: _split(dot(x, w))),
            },
            is_counted=False,
        )
        for n in ROWS
    ],
)  # fmt: skip

_MLP = _study(
    "mlp",
    "Bias and GELU in the product before them",
    [
        claim("GELU fused into the MLP's first product", "1.1 to 1.2 ×", _ANNOTATED,
               Gain(least=1.1, reason="The product's own time sets how much its epilogue can save.")),
        claim("Product, bias and activation: three launches become one", "3 → 1 launches", _LECTURE,
               Gain(over="PyTorch eager", least=1.0)),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES, _WIDE), bf16(_WIDE)),
    {
        UNFUSED: lambda x, w, bias: jax.nn.gelu(apart(apart(dot(x, w)) + bias), approximate=True),
        XLA: lambda x, w, bias: jax.nn.gelu(dot(x, w) + bias, approximate=True),
        FUSED: lambda x, w, bias: kernels.linear(
            x, w, bias=bias, activation="gelu_tanh", implementation="mosaic"
        ),
    },
    torch=lambda torch, x, w, bias: torch.nn.functional.gelu(torch.addmm(bias, x, w), approximate="tanh"),
)  # fmt: skip

_NORM_LINEAR = _study(
    "norm_linear",
    "RMSNorm in front of a product",
    [
        claim("RMSNorm + linear: x is read once, the normed x is never in memory", "one read of x", _TRITON, Gain(
            least=1.0,
            best_verdict="holds in part",
            reason="Few rows are normed in the product's launch. With many, every block of outputs would norm its "
            "rows again, and a launch for the norm, with its result in memory, is the faster way. The product's "
            "blocks read x repeatedly: of 1024 tokens from the L2 cache (50 MB come from DRAM, each array once), "
            "of 8192 tokens not only (291 MB; the arrays have 168).",
        )),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(_FEATURES)),
    {
        UNFUSED: lambda x, w, scale: dot(apart(rms(x, scale)), w),
        XLA: lambda x, w, scale: dot(rms(x, scale), w),
        FUSED: lambda x, w, scale: kernels.norm_linear(
            x, w, norm=Norm(scale=scale, epsilon=1e-6), implementation="mosaic"
        ),
    },
    torch=lambda torch, x, w, scale: torch.nn.functional.rms_norm(x, (x.shape[-1],), scale, 1e-6) @ w,
    eager=False,
    rows=(1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192),
    counted=(1, 8192),
)  # fmt: skip


def _summed(x: jax.Array, w: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    return kernels.linear_residual_norm(x, w, residual=residual, implementation="mosaic")


def _with_stream(stream: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rms(stream, scale), stream


def _fused_sum(x: jax.Array, w: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[Any, jax.Array]:
    product = _summed(x, w, residual)[0]
    return kernels.rms_norm(product, scale, implementation="mosaic"), product


def _torch_sum(torch: Any, x: Any, w: Any, residual: Any, scale: Any) -> tuple[Any, Any]:
    stream = torch.addmm(residual, x, w)
    return torch.nn.functional.rms_norm(stream, (stream.shape[-1],), scale, 1e-6), stream


_LINEAR_RESIDUAL_NORM = _study(
    "linear_residual_norm",
    "Product, residual and RMSNorm",
    [
        claim("Matmul + residual + RMSNorm saves two reads of the residual stream", "two reads", _TRITON, Gain(
            least=1.0,
            reason="The norm needs a whole row, which several blocks compute: it stays a launch, or "
            "moves into the next product, as a row scale.",
        )),
        claim("Residual + LayerNorm in one", "about 1.1 ×", _ANNOTATED, Gain(over=XLA, least=1.1)),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(n, _OUTPUTS), bf16(_OUTPUTS)),
    {
        UNFUSED: lambda x, w, residual, scale: _with_stream(apart(apart(dot(x, w)) + residual), scale),
        XLA: lambda x, w, residual, scale: _with_stream(dot(x, w) + residual, scale),
        FUSED: _fused_sum,
        # Its results are others: a mean square in place of the norm.
        "sum and mean square in the product": Variant(
            function=lambda x, w, residual, scale: _summed(x, w, residual), is_checked=False
        ),
    },
    torch=_torch_sum,
    eager=False,
)  # fmt: skip


def _weight(values: Any, scales: Any) -> QuantizedWeight:
    return QuantizedWeight(values=values, scales=scales, bits=8, group_size=None)


_INT8 = _study(
    "int8",
    "Weights dequantised in registers",
    [
        claim("Dequantise in registers inside the product: one read of the weights", "one read", _TRITON,
               Gain(least=2.0, reason="With many tokens the product's arithmetic hides the weights' traffic.")),
    ],
    lambda n: (
        bf16(n, _FEATURES),
        jax.ShapeDtypeStruct((_OUTPUTS, _FEATURES), jnp.int8),
        jax.ShapeDtypeStruct((1, _OUTPUTS), jnp.float32),
    ),
    {
        UNFUSED: lambda x, values, scales: dot(x, apart(_weight(values, scales).dequantized(x.dtype))),
        XLA: lambda x, values, scales: dot(x, _weight(values, scales).dequantized(x.dtype)),
        FUSED: lambda x, values, scales: kernels.quantized_linear(x, _weight(values, scales), implementation="mosaic"),
    },
    torch=lambda torch, x, values, scales: x @ (values.to(torch.float32) * scales.T).to(x.dtype).T,
    eager=False,
    rows=(1, 4, 16, 64, 256, 512, 2048, 8192),
)  # fmt: skip

_LORA = _study(
    "lora",
    "A low-rank update in the product",
    [
        claim("Base product and both low-rank products in one: x is read once", "one read of x", _LECTURE, Gain(
            least=1.0,
            reason="x and the partial result cost little beside the weights or the arithmetic; the "
            "launches count most with few tokens.",
        )),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES, _OUTPUTS), bf16(_FEATURES, _RANK), bf16(_RANK, _OUTPUTS)),
    {
        UNFUSED: lambda x, w, a, b: apart(dot(x, w)) + apart(dot(apart(dot(x, a)), b)) / _RANK,
        XLA: lambda x, w, a, b: dot(x, w) + dot(dot(x, a), b) / _RANK,
        FUSED: lambda x, w, a, b: kernels.lora_linear(x, w, a, b, alpha=1 / _RANK, implementation="mosaic"),
    },
    torch=lambda torch, x, w, a, b: x @ w + (x @ a) @ b / _RANK,
    case=f"{{}} tokens, rank {_RANK}",
)  # fmt: skip


def _activated(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(layer(x, scale, bias), approximate=True)


def _three_kernels(x: jax.Array, scale: jax.Array, bias: jax.Array, w: jax.Array) -> jax.Array:
    normed = kernels.layer_norm(x, scale, bias, epsilon=1e-5, implementation="mosaic")
    assert not isinstance(normed, tuple)  # there is no residual
    return kernels.linear(kernels.bias_activation(normed, None, implementation="mosaic"), w, implementation="mosaic")


def _torch_vertical(torch: Any, x: Any, scale: Any, bias: Any, w: Any) -> Any:
    normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), scale, bias, 1e-5)
    return torch.nn.functional.gelu(normed, approximate="tanh") @ w


_VERTICAL = _study(
    "vertical",
    "LayerNorm, GELU and a product",
    [
        claim("LayerNorm → GELU → linear without a round trip through memory", "one launch", _KERNEL_FUSION,
               Gain(least=1.0, reason="Norm and activation in one launch, the product in another.")),
    ],
    lambda n: (bf16(n, _FEATURES), bf16(_FEATURES), bf16(_FEATURES), bf16(_FEATURES, _OUTPUTS)),
    {
        UNFUSED: lambda x, scale, bias, w: dot(
            apart(jax.nn.gelu(apart(layer(x, scale, bias)), approximate=True)), w
        ),
        XLA: lambda x, scale, bias, w: dot(_activated(x, scale, bias), w),
        FUSED: lambda x, scale, bias, w: kernels.linear(
            apart(_activated(x, scale, bias)), w, implementation="mosaic"
        ),
        "three kernels": _three_kernels,
    },
    torch=_torch_vertical,
    eager=False,
    reason=f"In one launch each of the {_OUTPUTS // _TILE} blocks that share a row of x would norm and activate it "
    f"again, {_OUTPUTS // _TILE} times the exponentials, on the units that feed the tensor cores; the round trip that "
    f"two launches take is {4 * 8192 * _FEATURES / 1e6:.0f} MB of 8192 tokens, "
    f"{4 * 8192 * _FEATURES / 4.8e12 * 1e6:.0f} µs of an H200's bandwidth.",
)  # fmt: skip


def _compute_bound_cases() -> list[Case]:
    variants = {
        UNFUSED: Variant(function=lambda x, w: jax.nn.relu(apart(dot(x, w)))),
        XLA: Variant(function=lambda x, w: jax.nn.relu(dot(x, w))),
        FUSED: Variant(function=lambda x, w: kernels.linear(x, w, activation="relu", implementation="mosaic")),
        "product alone": Variant(function=dot, is_checked=False),
        **torch_variants(lambda torch, x, w: torch.relu(x @ w)),
    }
    sizes = ((8192, 8192, 8192), (16384, 16384, 4096), (8192, 1024, 8192))
    return [
        Case(name=f"{m} × {k} × {n}", arguments=(bf16(m, k), bf16(k, n)), variants=variants, is_counted=m == k == n)
        for m, k, n in sizes
    ]


_COMPUTE_BOUND = comparison(
    "compute_bound",
    "A large product and a ReLU",
    [
        claim("A bias or a ReLU after a large product: fusion saves little", "little", _KERNEL_FUSION, Gain(
            over=UNFUSED, most=1.1, reason="Below 1.1 counts as little; the gain is larger the shorter the sum."
        )),
    ],
    _compute_bound_cases,
)  # fmt: skip

PRODUCT_STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (_QKV, _MLP, _NORM_LINEAR, _LINEAR_RESIDUAL_NORM, _INT8, _LORA, _VERTICAL, _COMPUTE_BOUND)
}
"""The studies by name."""
