"""Classifies instructions as XLA's fusion passes see them: matrix product, library call, custom kernel or other."""

from __future__ import annotations

from typing import Literal

from hlo_analysis.decisions.align import contents
from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.attributes import PYTHON_TARGETS, custom_call_target, fusion_config, gemm_config

_LIBRARIES = (
    "__cublas",
    "__cudnn",
    "__cusolver",
    "__cub",
    "__onednn",
    "__ynn",
    "__xnn",
    "cublas_",
    "cusolver_",
    "cusparse_",
)

# Collectives take no producer either. XLA lists the opposite, the opcodes that can (PriorityFusion::IsFusible).
_CONTROL = frozenset({"while", "conditional", "call", "async-start", "copy-start", "infeed", "outfeed"})
_WHOLE = frozenset(
    {"custom-call", "sort", "dot", "convolution", "fft", "cholesky", "triangular-solve", "rng-bit-generator"}
)
UNFUSIBLE_CONSUMERS = _CONTROL | _WHOLE
"""Opcodes that no producer can be fused into."""

_EPILOGUES = {"BIAS": "a bias", "GELU": "GELU", "RELU": "ReLU", "SILU": "SiLU"}
_TOP_K = "__gpu$TopK"

Role = Literal["product", "library", "kernel", "other"]


def role_of(module: Module, instruction: Instruction) -> Role:
    """Returns the role of an instruction of the module."""
    if instruction.opcode == "custom-call":
        return "library" if custom_call_target(instruction).startswith(_LIBRARIES) else "kernel"
    generator = generator_of(instruction) if instruction.opcode == "fusion" else ""
    if generator.startswith(_LIBRARIES):
        return "library"
    if generator.startswith("__custom"):
        return "kernel"
    has_dot = generator.startswith("__triton") and any(
        inner.opcode in ("dot", "scaled-dot") for inner in contents(module, instruction)
    )
    return "product" if has_dot else "other"


def origin_of_kernel(instruction: Instruction) -> str:
    """Describes where a kernel that takes no fusion comes from."""
    target = custom_call_target(instruction)
    if target.startswith(PYTHON_TARGETS):
        return "a call back to Python on the host"
    return "a finished kernel of XLA's own" if target == _TOP_K else "a kernel from outside XLA"


def library_epilogue(call: Instruction) -> list[str]:
    """Names the work that XLA fused into a product of cuBLASLt."""
    config = gemm_config(call)
    found = ["the sum with another matrix"] if config.get("beta") else []
    return found + [text for name, text in _EPILOGUES.items() if name in config.get("epilogue", "")]


def generator_of(fusion: Instruction) -> str:
    """Returns XLA's name for a fusion's code generator ('__triton', '__cudnn$fusion'); '' for XLA's own emitters."""
    return str(fusion_config(fusion).get("kind", ""))
