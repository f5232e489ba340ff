"""A product of low rank beside another, as low-rank adaptation (LoRA) makes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_programs import Program, text_of

from hlo_analysis.remedies import texts

SHAPES = {
    "x": "bf16[2048,4096]", "w": "bf16[4096,4096]", "a": "bf16[4096,16]", "b": "bf16[16,4096]", "h": "bf16[2048,16]",
    "cast": "bf16[2048,16]", "low": "bf16[2048,4096]", "wide": "bf16[2048,4096]", "sum": "bf16[4096,4096]",
    "z": "bf16[2048,4096]",
}  # fmt: skip
PLAIN = """
  %p = bf16[9]{0} parameter(0)
  %q = bf16[9]{0} parameter(1)
  %c = f32[9]{0} convert(%q)
"""
ADDED = PLAIN + "  %s = f32[9]{0} add(%p, %c)\n  ROOT %t = f32[9]{0} tanh(%s)"
GATED = PLAIN + "  %m = f32[9]{0} multiply(%p, %c)\n  ROOT %s = f32[9]{0} add(%m, %one)"


def shaped(program: Program) -> Program:
    for index, launch in enumerate(program.launches):
        inputs = tuple(replace(value, shape=SHAPES.get(value.name, value.shape)) for value in launch.inputs)
        outputs = tuple(replace(value, shape=SHAPES.get(value.name, value.shape)) for value in launch.outputs)
        program.launches[index] = replace(launch, inputs=inputs, outputs=outputs)
    return program


@pytest.mark.parametrize(
    ("of", "between", "hlo", "remedy"),
    [
        ("x", "convert", ADDED, texts.LORA_LINEAR),
        ("z", "convert", ADDED, texts.LINEAR_EPILOGUE),  # of other rows than the product beside it
        ("x", "tanh", ADDED, texts.LINEAR_EPILOGUE),  # of two layers
        ("x", "convert", GATED, texts.LINEAR_EPILOGUE),
    ],
)
def test_a_correction_of_low_rank_is_added_in_one_kernel(of: str, between: str, hlo: str, remedy: texts.Remedy) -> None:
    program = Program().launch("h", {of: 16, "a": 1}, 1, "triton_gemm", opcodes=("dot",))
    program.launch("cast", {"h": 1}, 1, opcodes=(between,))
    program.launch("low", {"cast": 1, "b": 1}, 16, "triton_gemm", opcodes=("dot", "multiply"))
    program.launch("wide", {"x": 16, "w": 32}, 16, "triton_gemm", opcodes=("dot",))
    program.launch("y", {"wide": 16, "low": 16}, 16, opcodes=("add", "tanh"), hlo=hlo, passed={"p": "wide", "q": "low"})
    remedies = {missed.value: missed.remedy for missed in shaped(program).rank()}
    assert remedies["low"].startswith(text_of(remedy))
    assert remedies["wide"].startswith(text_of(remedy))


@pytest.mark.parametrize(("rank", "remedy"), [(16, texts.LORA_LINEAR), (1024, texts.ONE_KERNEL)])
def test_a_correction_of_weights_is_better_made_of_rows(rank: int, remedy: texts.Remedy) -> None:
    """x @ (w + a @ b); a rank of 1024 is none."""
    program = Program().launch("sum", {"a": 1, "b": 1, "w": 32}, 32, "triton_gemm", opcodes=("dot", "add"))
    program.launch("y", {"x": 16, "sum": 32}, 16, "triton_gemm", opcodes=("dot",))
    (launch, product) = shaped(program).launches
    sizes = {"a": f"bf16[4096,{rank}]", "b": f"bf16[{rank},4096]"}
    inputs = tuple(replace(value, shape=sizes.get(value.name, value.shape)) for value in launch.inputs)
    program.launches[:] = [replace(launch, inputs=inputs), product]
    (missed,) = program.rank()
    assert missed.remedy.startswith(text_of(remedy))
