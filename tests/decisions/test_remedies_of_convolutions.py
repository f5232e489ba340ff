"""Remedies of what goes into a convolution or comes out of it, each followed in a program of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import Program, text_of

from hlo_analysis.remedies import texts

FORWARD = '%c = bf16[8] custom-call(%a, %w), custom_call_target="__cudnn$convForward"'


def conv(program: Program, reads: dict[str, int], hlo: str = FORWARD, **fields: Any) -> Program:
    return program.launch("c", reads, 100, "cudnn", opcodes=("custom-call",), hlo=hlo, **fields)


@pytest.mark.parametrize(
    ("padding", "opcodes", "phase", "remedy"),
    [
        ("0_0_0x2_2_1x2_2_1x0_0_0", ("pad",), "forward", texts.SPREAD),
        ("0_0_0x2_2_1x2_2_1x0_0_0", ("pad", "tanh", "multiply"), "forward", texts.SPREAD),
        ("0_0_0x2_2_1x2_2_1x0_0_0", ("pad",), "backward", texts.PARTS),
        ("0_0_0x3_0_0x0_0_0", ("pad", "tanh"), "forward", texts.OWN_KERNEL),
    ],
)
def test_zeros_between_elements_are_of_a_transposed_convolution(
    padding: str, opcodes: tuple[str, ...], phase: Any, remedy: texts.Remedy
) -> None:
    """Filters of 4 x 4 and a stride of two: 105.2 to 26.3 GFLOP, 150 to 42 MB with the other filter."""
    hlo = f"ROOT %p = bf16[8,115,115,256]{{3,2,1,0}} pad(%x, %zero), padding={padding}, metadata={{}}"
    program = Program().launch("p", {"x": 25}, 100, opcodes=opcodes, hlo=hlo, phase=phase)
    (missed,) = conv(program, {"p": 100, "w": 1}, phase=phase).rank()
    assert missed.remedy == text_of(remedy)


@pytest.mark.parametrize(
    ("window", "groups", "remedy"),
    [
        ("size=4", 1536, texts.SHIFTED),
        ("size=3 pad=1_1", 2048, texts.SHIFTED),
        ("size=3 pad=1_1", 512, texts.OWN_KERNEL),  # four features a group
        ("size=4 stride=2", 1536, texts.OWN_KERNEL),
        ("size=64", 96, texts.OWN_KERNEL),  # one long convolution
        ("size=2x2", 1536, texts.OWN_KERNEL),
    ],
)
def test_a_short_convolution_of_each_feature_alone_is_a_sum(window: str, groups: int, remedy: texts.Remedy) -> None:
    """Mamba's, of four taps: 4 launches to 1, 302 to 101 MB, and with its gradient 705 to 356 MB."""
    hlo = FORWARD + f", window={{{window}}}, dim_labels=b0f_o0i->b0f, feature_group_count={groups}"
    program = conv(Program(), {"x": 100, "w": 1}, hlo)
    x, w = program.launches[0].inputs
    program.launches[0] = replace(program.launches[0], inputs=(x, replace(w, shape="bf16[1536,4,1]")))
    (missed,) = program.launch("y", {"c": 100}, 100, opcodes=("logistic", "multiply")).rank()
    assert missed.remedy == text_of(remedy)


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ("b01f_o01i->b01f", "('NHWC', 'OHWI', 'NHWC')"),
        ("bf01_oi01->bf01", "('NCHW', 'OIHW', 'NCHW')"),  # float32 on Ampere
        ("bf012_oi012->bf012", "('NCDHW', 'OIDHW', 'NCDHW')"),
        ("b0f_o0i->b0f", "('NWC', 'OWI', 'NWC')"),
    ],
)
def test_images_are_to_lie_as_they_are_taken_here(labels: str, numbers: str) -> None:
    """Three dimensions in 5 launches, transposed before and after, or in 2."""
    program = Program().launch("t", {"x": 100}, 100, "transpose", opcodes=("transpose",))
    (missed,) = conv(program, {"t": 100, "w": 1}, f"{FORWARD}, dim_labels={labels}").rank()
    assert f"dimension_numbers={numbers} of" in missed.remedy
