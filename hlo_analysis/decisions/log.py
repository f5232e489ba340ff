"""Reads the messages about fusion that other passes wrote to the compiler's log.

The Triton matrix-product rewriter (`gemm_fusion.cc`) names each producer and user that it kept out of a product, with
the reason. The softmax rewriter (`softmax_rewriter_triton.cc`) says why an instruction is not the root of a
normalization. They write at `TF_CPP_VMODULE` level 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GEMM_PASS = "triton-gemm-rewriter"
SOFTMAX_PASS = "triton-softmax-rewriter"

# The first two are the wording of jaxlib 0.11.2, the others that of 0.12.
_DECISION = re.compile(" due to (?:the |profitability |tileability )?decision: ")

# Messages of the softmax rewriter which only say that an instruction is not part of a normalization.
_NOT_A_CANDIDATE = ("Root is not elementwise binary.", "Could not find a trivial connection from root to a broadcast.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One refusal of one pass. Names are those of the module at that pass."""

    pass_name: str
    role: Literal["prologue", "epilogue", "root"]
    """The position of `instruction`: before or after the matrix product, or last in a candidate normalization."""
    instruction: str
    """'' if the pass names no instruction: the refusal then concerns the instruction that the pass visited next."""
    product: str | None
    """The matrix product that the refusal concerns."""
    reason: str
    op_name: str = ""
    """JAX's name of the instruction; it identifies the instruction even if a pass renamed it."""


def read_log(text: str) -> tuple[Refusal, ...]:
    """Collects the messages of the passes; lines in any other format are ignored, since the log is free text."""
    refusals: list[Refusal] = []
    product: str | None = None
    for line in text.splitlines():
        prefix, found, body = line.partition("] ")
        if not found:
            continue
        source = prefix.rsplit(" ", 1)[-1].partition(":")[0]
        if source == "gemm_fusion.cc":
            if body.startswith("%") and " dot(" in body:
                product = _name(body)
            elif refusal := _gemm_refusal(body, product):
                refusals.append(refusal)
        elif source == "softmax_rewriter_triton.cc" and (refusal := _softmax_refusal(body)):
            refusals.append(refusal)
    return tuple(dict.fromkeys(refusals))


def _name(instruction: str) -> str:
    return instruction.removeprefix("%").partition(" ")[0]


def _gemm_refusal(body: str, product: str | None) -> Refusal | None:
    if not body.startswith("Not fusing "):
        return None
    text, *reason = _DECISION.split(body.removeprefix("Not fusing "), maxsplit=1)
    is_user = text.startswith("user: ")  # the rewriter that xla_gpu_experimental_gemm_fusion_v2 selects
    if is_user and not reason:
        text, reason = "", [text.removeprefix("user: ")]
    if not reason:
        return None
    # "to the output" ends the search from the product towards its operands, "to the input" towards its users.
    role = "epilogue" if is_user or text.endswith(" to the input") else "prologue"
    text = text.removeprefix("operand: ").removeprefix("user: ")
    behind = text.partition(" bitcast(%")[2].partition(")")[0]
    op_name = "" if behind else text.partition('op_name="')[2].partition('"')[0]
    return Refusal(
        pass_name=GEMM_PASS,
        role=role,
        instruction=behind or _name(text),
        product=product,
        reason=reason[0],
        op_name=op_name,
    )


def _softmax_refusal(body: str) -> Refusal | None:
    instruction, found, reason = body.rpartition(" Reason: ")
    start = "Cannot match the diamond pattern for instruction "
    if not found or not instruction.startswith(start) or reason in _NOT_A_CANDIDATE:
        return None
    name = _name(instruction.removeprefix(start))
    return Refusal(pass_name=SOFTMAX_PASS, role="root", instruction=name, product=None, reason=reason)
