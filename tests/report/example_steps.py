"""The launches of a Llama-size block at B2 S4096 in bf16, in brief and by strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hlo_analysis.records import LaunchKind

ROWS, MODEL, HIDDEN, HEADS, KV, HEAD = 8192, 4096, 14336, 32, 8, 128
X = f"bf16[{ROWS},{MODEL}]"
X_BYTES = ROWS * MODEL * 2
SCORES = "bf16[2,32,4096,4096]"
SCORES_BYTES = 2 * HEADS * 4096 * 4096 * 2
WIDE = f"bf16[{ROWS},{HIDDEN}]"
WIDE_BYTES = ROWS * HIDDEN * 2
GEMM = 2 * ROWS * MODEL


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch in brief: what it is called, where it belongs, what it reads (names of steps or arguments)."""

    name: str
    kind: LaunchKind
    scope: str
    shape: str
    size: int
    reads: tuple[str, ...]
    flops: int = 0
    unfused: float = 1.0
    hlo: str = ""
    also: tuple[str, ...] = ()
    """Other scopes whose work the launch does."""


ARGUMENTS: dict[str, tuple[str, int]] = {
    "x": (X, X_BYTES),
    "w_qkv": ("bf16[4096,6144]", 4096 * 6144 * 2),
    "w_out": ("bf16[4096,4096]", 4096 * 4096 * 2),
    "w_gate_up": ("bf16[4096,28672]", 4096 * 28672 * 2),
    "w_down": ("bf16[14336,4096]", 4096 * 14336 * 2),
    "norm_scale": ("bf16[4096]", 8192),
}

XLA_STEPS = (
    Step(
        name="input_reduce_fusion",
        kind="reduction",
        scope="block/attention_norm",
        shape="f32[8192]",
        size=32768,
        reads=("x",),
        unfused=5,
    ),
    Step(
        name="loop_multiply_fusion",
        kind="loop",
        scope="block/attention_norm",
        shape=X,
        size=X_BYTES,
        reads=("x", "input_reduce_fusion", "norm_scale"),
        unfused=2.4,
    ),
    Step(
        name="cublas-gemm.1",
        kind="cublaslt",
        scope="block/qkv_projection",
        shape="bf16[8192,6144]",
        size=ROWS * 6144 * 2,
        reads=("loop_multiply_fusion", "w_qkv"),
        flops=GEMM * 6144,
    ),
    Step(
        name="loop_concatenate_fusion",
        kind="concatenate",
        scope="block/rope",
        shape="bf16[2,4096,40,128]",
        size=2 * 4096 * 40 * 128 * 2,
        reads=("cublas-gemm.1",),
        unfused=4.1,
    ),
    Step(
        name="gemm_fusion_dot.2",
        kind="triton_gemm",
        scope="block/attention",
        shape=SCORES,
        size=SCORES_BYTES,
        reads=("loop_concatenate_fusion",),
        flops=4096 * 4096 * HEAD * HEADS * 4,
    ),
    Step(
        name="softmax_fusion",
        kind="triton",
        scope="block/attention",
        shape=SCORES,
        size=SCORES_BYTES,
        reads=("gemm_fusion_dot.2",),
        unfused=4.6,
        hlo="%fused_softmax { ROOT exponential = bf16[2,32,4096,4096] exponential(p0) }",
    ),
    Step(
        name="gemm_fusion_dot.3",
        kind="triton_gemm",
        scope="block/attention",
        shape=X,
        size=X_BYTES,
        reads=("softmax_fusion", "cublas-gemm.1"),
        flops=4096 * 4096 * HEAD * HEADS * 4,
    ),
    Step(
        name="cublas-gemm.4",
        kind="cublaslt",
        scope="block/output_projection",
        shape=X,
        size=X_BYTES,
        reads=("gemm_fusion_dot.3", "w_out"),
        flops=GEMM * MODEL,
    ),
    Step(
        name="input_add_reduce_fusion",
        kind="reduction",
        scope="block/mlp_norm",
        shape="(f32[8192], bf16[8192,4096])",
        size=X_BYTES,
        reads=("x", "cublas-gemm.4"),
        unfused=4.2,
        hlo='%fused { add = bf16[8192,4096] add(p0, p1), metadata={op_name="jit(f)/block/attention_residual/add"} }',
        also=("block/attention_residual",),
    ),
    Step(
        name="loop_multiply_fusion.1",
        kind="loop",
        scope="block/mlp_norm",
        shape=X,
        size=X_BYTES,
        reads=("input_add_reduce_fusion", "norm_scale"),
        unfused=2.4,
    ),
    Step(
        name="cublas-gemm.5",
        kind="cublas",
        scope="block/gate_up_projection",
        shape="bf16[8192,28672]",
        size=ROWS * 28672 * 2,
        reads=("loop_multiply_fusion.1", "w_gate_up"),
        flops=GEMM * 28672,
    ),
    Step(
        name="loop_multiply_fusion.2",
        kind="loop",
        scope="block/activation",
        shape=WIDE,
        size=WIDE_BYTES,
        reads=("cublas-gemm.5",),
        unfused=3.5,
    ),
    Step(
        name="gemm_fusion_dot.6",
        kind="triton_gemm",
        scope="block/down_projection",
        shape=X,
        size=X_BYTES,
        reads=("loop_multiply_fusion.2", "w_down", "input_add_reduce_fusion"),
        flops=GEMM * HIDDEN,
        unfused=1.3,
        hlo='%gemm { add = bf16[8192,4096] add(dot, p2), metadata={op_name="jit(f)/block/mlp_residual/add"} }',
        also=("block/mlp_residual",),
    ),
)

CUDNN_STEPS = (
    *XLA_STEPS[:4],
    Step(
        name="custom-call.1",
        kind="cudnn",
        scope="block/attention",
        shape=X,
        size=X_BYTES,
        reads=("loop_concatenate_fusion", "cublas-gemm.1"),
        flops=4096 * 4096 * HEAD * HEADS * 8,
    ),
    replace(XLA_STEPS[7], reads=("custom-call.1", "w_out")),
    *XLA_STEPS[8:],
)

PALLAS_STEPS = (
    Step(
        name="rms_norm",
        kind="mosaic",
        scope="block/attention_norm",
        shape=X,
        size=X_BYTES,
        reads=("x", "norm_scale"),
        unfused=6,
    ),
    replace(XLA_STEPS[2], reads=("rms_norm", "w_qkv")),
    *XLA_STEPS[3:8],
    Step(
        name="rms_norm.1",
        kind="mosaic",
        scope="block/mlp_norm",
        shape="(bf16[8192,4096], bf16[8192,4096])",
        size=2 * X_BYTES,
        reads=("x", "cublas-gemm.4", "norm_scale"),
        unfused=4,
        hlo='metadata={op_name="jit(f)/block/attention_residual/add"}',
        also=("block/attention_residual",),
    ),
    replace(XLA_STEPS[10], reads=("rms_norm.1", "w_gate_up")),
    XLA_STEPS[11],
    replace(XLA_STEPS[12], reads=("loop_multiply_fusion.2", "w_down", "rms_norm.1")),
)

UNFUSED_STEPS = tuple(
    replace(
        step,
        name=f"{step.name}.{part}" if part else step.name,
        kind="loop" if part else step.kind,
        reads=step.reads if not part else (step.name if part == 1 else f"{step.name}.{part - 1}",),
        flops=0 if part else step.flops,
        unfused=1,
        hlo="",
        also=(),
    )
    for step in XLA_STEPS
    for part in range(max(1, round(step.unfused)))
)
