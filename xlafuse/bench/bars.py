"""The speeds the kernels are held to. `xlafuse.bench.verdicts` says which measured shapes reach them.

Where memory sets the time, a bar is a share of the copy ceiling (a plain copy of as many bytes, of the same run) and a
ratio to XLA; where matrix products do, a ratio to the fastest of XLA and the peers, or to one that the bar names. At
small sizes a call may take at most a microsecond longer than XLA's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pallas_kernels import REGISTRY

SMALL_ROWS = 64
SMALL_US = 1.0
"""How much longer than XLA's a call of at most `SMALL_ROWS` rows may take."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What operations must reach in each of some phases. shapes: patterns of spec names, `*` for any part."""

    operations: tuple[str, ...]
    phases: tuple[str, ...]
    shapes: tuple[str, ...]

    def covers(self, op: str, spec: str) -> bool:
        """Whether this bar is about the operation on that shape, in its phases."""
        return op in self.operations and any(fnmatchcase(spec, shape) for shape in self.shapes)

    def calls(self) -> Iterator[tuple[str, str]]:
        """Operation and spec of each timed call that this bar is about, in the registry's order."""
        for op in REGISTRY.values():
            for spec in op.tagged("bench"):
                if self.covers(op.name, spec.name):
                    yield op.name, spec.name


@dataclass(frozen=True, kw_only=True)
class CopyBar(Bar):
    """A share of the copy's speed.

    over_xla: also this ratio to XLA, or None where none is asked for; over_xla_dtypes: the dtypes that it is asked of.
    """

    share: float
    over_xla: float | None = None
    over_xla_dtypes: tuple[str, ...] = ("bfloat16", "float32")

    @property
    def asked(self) -> str:
        """In words."""
        return f"{self.share:.2f} of the copy" + (f", {self.over_xla:.1f} × XLA" if self.over_xla else "")


@dataclass(frozen=True, kw_only=True)
class SpeedBar(Bar):
    """A ratio of speeds.

    least: the ratio. rivals: what it is to be measured against. against: "fastest" of all that were measured beside
    ours, these or others; or of "named" rivals alone. together: whether the times of all phases are added up, each
    rival's and ours of one visit.
    """

    least: float
    rivals: tuple[str, ...]
    against: Literal["fastest", "named"] = "fastest"
    together: bool = False


@dataclass(frozen=True, kw_only=True)
class DropoutBar(Bar):
    """A share of the own speed on the spec without the end `suffix` of its name, in one visit.

    least: None where the share is to be told and nothing asked.
    """

    least: float | None
    suffix: str


@dataclass(frozen=True, kw_only=True)
class ChoiceBar(Bar):
    """A share of the speed of the fastest implementation or kernel variant of the run, by what `implementation=None`
    takes. rivals: what else than ours is to be measured."""

    least: float
    rivals: tuple[str, ...]


_FORWARD, _BACKWARD = ("forward",), ("backward",)
_BOTH = ("forward", "backward")
_ROWS = ("32768x4096-bfloat16*", "8192x8192-bfloat16*", "16384x4096-float32*")
_FEW = ("16-*", "1-*")
COPY_BARS = (
    CopyBar(operations=("rms_norm", "layer_norm"), phases=_FORWARD, share=0.97, over_xla=1.4, shapes=_ROWS),
    CopyBar(operations=("rms_norm", "layer_norm"), phases=_BACKWARD, share=0.88, over_xla=3.0, shapes=_ROWS),
    CopyBar(operations=("softmax",), phases=_FORWARD, share=0.96, over_xla=1.3, shapes=_ROWS),
    CopyBar(operations=("softmax",), phases=_BACKWARD, share=0.92, over_xla=1.3, shapes=_ROWS),
    CopyBar(operations=("bias_activation", "gated_activation"), phases=_BOTH, share=0.96, over_xla=1.4,
            over_xla_dtypes=("bfloat16",), shapes=_ROWS),
    CopyBar(operations=("rope",), phases=_BOTH, share=0.96, over_xla=1.4, over_xla_dtypes=("bfloat16",),
            shapes=("2x4096*", "8x4096*", "4x4096*")),
    CopyBar(operations=("cross_entropy",), phases=_BACKWARD, share=0.90, over_xla=1.8,
            shapes=("8192x128256-bfloat16-reduction_mean",)),
    CopyBar(operations=("dropout_residual_norm",), phases=_FORWARD, share=0.95, over_xla=2.0, shapes=_ROWS),
    CopyBar(operations=("linear", "gated_linear", "norm_linear"), phases=_FORWARD, share=0.93, shapes=_FEW),
    CopyBar(operations=("qkv_projection",), phases=_FORWARD, share=0.90, shapes=_FEW),
    CopyBar(operations=("linear_residual_norm",), phases=_FORWARD, share=0.93, shapes=("16-14336-*", "1-14336-*")),
    CopyBar(operations=("decode_attention",), phases=_FORWARD, share=0.90, shapes=("16x32768-*",)),
)  # fmt: skip

_COMPILERS = ("xla", "torch_compile")
PRODUCT_BARS = (
    SpeedBar(operations=("linear",), phases=_FORWARD, least=1.00, rivals=_COMPILERS,
             shapes=("8192-4096-4096-bfloat16", "512-4096-4096-bfloat16")),
    SpeedBar(operations=("linear",), phases=_FORWARD, least=1.06, rivals=_COMPILERS,
             shapes=("8192-4096-16384-bfloat16-bias-*",)),
    SpeedBar(operations=("linear",), phases=_FORWARD, least=1.02, rivals=_COMPILERS,
             shapes=("8192-14336-4096-bfloat16-residual",)),
    SpeedBar(operations=("linear",), phases=_FORWARD, least=1.10, rivals=_COMPILERS,
             shapes=("512-4096-16384-bfloat16-bias-*", "512-14336-4096-bfloat16-residual")),
    SpeedBar(operations=("gated_linear",), phases=_FORWARD, least=1.05, rivals=_COMPILERS, shapes=("8192-*",)),
    SpeedBar(operations=("gated_linear",), phases=_FORWARD, least=1.10, rivals=_COMPILERS, shapes=("512-*",)),
    SpeedBar(operations=("qkv_projection",), phases=_FORWARD, least=1.06, rivals=_COMPILERS, shapes=("8192-*",)),
    SpeedBar(operations=("qkv_projection",), phases=_FORWARD, least=1.10, rivals=_COMPILERS, shapes=("512-*",)),
    SpeedBar(operations=("linear_residual_norm",), phases=_FORWARD, least=1.02, rivals=_COMPILERS,
             shapes=("8192-14336-*",)),
    SpeedBar(operations=("linear_residual_norm",), phases=_FORWARD, least=1.10, rivals=_COMPILERS,
             shapes=("512-14336-*",)),
    SpeedBar(operations=("quantized_linear",), phases=_FORWARD, least=1.00, rivals=("xla_bf16",), against="named",
             shapes=("8192-*-int8*",)),
    SpeedBar(operations=("quantized_linear",), phases=_FORWARD, least=1.10, rivals=("xla_bf16",), against="named",
             shapes=("512-*-int8*",)),
    SpeedBar(operations=("quantized_linear",), phases=_FORWARD, least=1.70, rivals=("xla_bf16",), against="named",
             shapes=("16-*-int8*", "1-*-int8*")),
    SpeedBar(operations=("lora_linear",), phases=_FORWARD, least=1.08, rivals=_COMPILERS, shapes=("8192-*-rank16-*",)),
    SpeedBar(operations=("lora_linear",), phases=_FORWARD, least=1.20, rivals=_COMPILERS, shapes=("512-*-rank16-*",)),
    # Of a reduced loss this phase is the loss and all gradients.
    SpeedBar(operations=("linear_cross_entropy",), phases=_BACKWARD, least=1.03, rivals=("xla",), against="named",
             shapes=("4096-4096-128256-bfloat16-reduction_mean",)),
)  # fmt: skip

_FULL, _CAUSAL = ("cudnn", "torch_eager", "jax_mosaic"), ("cudnn", "torch_eager", "jla")
"""Rivals without a mask, and under a causal one in both passes; forward JAX's own kernel is one of these, too."""
_CAUSAL_FORWARD = (*_CAUSAL, "jax_mosaic")
_FULL_128 = ("4x4096x4096x32x8x128-bfloat16", "1x16384x16384x32x8x128-bfloat16")
_CAUSAL_128 = (
    *(f"{full}-causal" for full in _FULL_128),
    "2x4096x4096x32x8x128-bfloat16-causal",
)
_OTHER_FULL = ("4x4096x4096x32x8x64-bfloat16", "4x4096x4096x16x4x256-bfloat16")
_OTHER_CAUSAL = ("4x4096x4096x32x8x64-bfloat16-causal",)
_WIDE_CAUSAL = ("4x4096x4096x16x4x256-bfloat16-causal",)
"""Of a head size that jla does not take."""
_WINDOW = "1x16384x16384x32x8x128-bfloat16-causal-window_1023_0"
_PACKED = "1x16384x16384x32x8x128-bfloat16-8_documents-causal"
_DROPOUT = "-dropout_0.1"
_SHORT = (
    "16x1x1x*", "1x1x1x*", "16x1x4096x*", "16x16x4096x*", "16x16x16x*", "16x128x128x*", "1x512x512x*", "16x512x512x*",
)  # fmt: skip
ATTENTION_BARS = (
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.05, rivals=_FULL, shapes=_FULL_128),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.05, rivals=_CAUSAL_FORWARD, shapes=_CAUSAL_128),
    SpeedBar(operations=("attention",), phases=_BOTH, together=True, least=1.03, rivals=_FULL, shapes=_FULL_128),
    SpeedBar(operations=("attention",), phases=_BOTH, together=True, least=1.03, rivals=_CAUSAL, shapes=_CAUSAL_128),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.00, rivals=_FULL, shapes=_OTHER_FULL),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.00, rivals=_CAUSAL_FORWARD, shapes=_OTHER_CAUSAL),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.00, rivals=_FULL, shapes=_WIDE_CAUSAL),
    SpeedBar(operations=("attention",), phases=_BACKWARD, least=0.95, rivals=_FULL, shapes=_OTHER_FULL),
    SpeedBar(operations=("attention",), phases=_BACKWARD, least=0.95, rivals=_CAUSAL, shapes=_OTHER_CAUSAL),
    SpeedBar(operations=("attention",), phases=_BACKWARD, least=0.95, rivals=("cudnn", "torch_eager"),
             shapes=_WIDE_CAUSAL),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=1.05, rivals=("cudnn", "jla"),
             shapes=(_WINDOW, _PACKED)),
    SpeedBar(operations=("attention",), phases=_FORWARD, least=3.0, rivals=("cudnn_dense_mask",), against="named",
             shapes=(_WINDOW,)),
    # The peer cuDNN has a dense mask here.
    SpeedBar(operations=("attention",), phases=_FORWARD, least=3.0, rivals=("cudnn",), against="named",
             shapes=(_PACKED,)),
    DropoutBar(operations=("attention",), phases=_FORWARD, least=0.85, suffix=_DROPOUT, shapes=(f"*{_DROPOUT}",)),
    DropoutBar(operations=("attention",), phases=_BACKWARD, least=None, suffix=_DROPOUT, shapes=(f"*{_DROPOUT}",)),
    ChoiceBar(operations=("attention",), phases=_BOTH, least=0.98, rivals=("xla", "cudnn"),
              shapes=(*_FULL_128, *_CAUSAL_128, *_OTHER_FULL, *_OTHER_CAUSAL, *_WIDE_CAUSAL, _WINDOW, *_SHORT)),
    # cuDNN is no implementation of these: no dropout with our mask, no segments.
    ChoiceBar(operations=("attention",), phases=_BOTH, least=0.98, rivals=("xla",), shapes=(_PACKED, f"*{_DROPOUT}")),
    ChoiceBar(operations=("decode_attention",), phases=_FORWARD, least=0.98, rivals=("xla",), shapes=("*",)),
)  # fmt: skip
MEMORY_BARS = (
    # Without logits in memory, of the loss and of both passes: see `xlafuse.bench.memory`.
    Bar(operations=("linear_cross_entropy",), phases=_BOTH, shapes=("4096-4096-128256-bfloat16-reduction_mean",)),
)
BARS: tuple[Bar, ...] = (*COPY_BARS, *PRODUCT_BARS, *ATTENTION_BARS, *MEMORY_BARS)
