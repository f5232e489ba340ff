"""Arguments that are read again: what one launch could have read once, and what none could."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import MIB, Program, text_of

from hlo_analysis.remedies import texts


def norm(size: int, sums: str, mib: int = 1) -> Program:
    """An argument, its sums, what is made of them, and both put together."""
    program = Program().launch("sum", {"x": size}, mib, "reduction", opcodes=("reduce",), shape=sums)
    program.launch("scale", {"sum": mib}, mib, opcodes=("rsqrt",), shape=sums)
    program.launch("y", {"x": size, "scale": mib}, size, opcodes=("multiply",))
    for index, launch in enumerate(program.launches):
        inputs = tuple(
            replace(value, shape=f"f32[{size},512,512]" if value.name == "x" else sums) for value in launch.inputs
        )
        program.launches[index] = replace(launch, inputs=inputs)
    return program


@pytest.mark.parametrize(
    ("sums", "mib", "is_missed"),
    [
        ("f32[100,512]", 1, True),  # of the last axis: 2 KiB a row
        ("f32[100]", 1, False),  # 1 MiB a row is more than a block's shared memory
        ("f32[512,512]", 1, True),  # of the first: 400 B a column, eight of which lie together
        ("f32[100,512]", 50, False),  # half of what is read is handed on: no sum
    ],
)
def test_an_argument_is_read_again_after_sums_over_its_rows(sums: str, mib: int, is_missed: bool) -> None:
    found = [missed for missed in norm(100, sums, mib).rank() if missed.value == "x"]
    assert bool(found) == is_missed
    for missed in found:
        assert missed.consumers == (0, 2)
        assert missed.bytes_at_stake == 100 * MIB
        assert missed.time_at_stake_us == pytest.approx(100 + 2 * 2)
        assert missed.remedy.startswith("rms_norm")


def test_sums_that_wait_for_those_of_other_arrays_are_of_no_single_kernel() -> None:
    """The norm of all gradients, by which each of them is scaled."""
    program = norm(100, "f32[100,512]")
    assert any(missed.value == "x" for missed in program.rank())
    alone = program.launches[1]
    other = Program().launch("sum", {"x": 100}, 1, "reduction", opcodes=("reduce",), shape="f32[100,512]")
    other.launch("sum2", {"x2": 100}, 1, "reduction", opcodes=("reduce",))
    other.launch("scale", {"sum": 1, "sum2": 1}, 1, opcodes=("rsqrt",), shape="f32[100,512]")
    other.launch("y", {"x": 100, "scale": 1}, 100, opcodes=("multiply",))
    assert alone.name == other.launches[2].name
    for index, launch in enumerate(other.launches):
        inputs = (
            replace(value, shape="f32[100,512,512]" if value.name in ("x", "x2") else "f32[100,512]")
            for value in launch.inputs
        )
        other.launches[index] = replace(launch, inputs=tuple(inputs))
    assert all(missed.value != "x" for missed in other.rank())


def test_sums_that_are_summed_again_over_all_rows_are_of_no_single_row() -> None:
    """Adafactor divides its sums over rows by their mean, before it reads the gradient again."""
    program = norm(100, "f32[100,512]")
    mean = Program().launch("sum", {"x": 100}, 1, "reduction", opcodes=("reduce",))
    mean.launch("mean", {"sum": 1}, 1, "reduction", opcodes=("reduce",))
    mean.launch("scale", {"sum": 1, "mean": 1}, 1, opcodes=("rsqrt",))
    mean.launch("y", {"x": 100, "scale": 1}, 100, opcodes=("multiply",))
    shapes = {"x": "f32[100,512,512]", "mean": "f32[]"}
    for index, launch in enumerate(mean.launches):
        inputs = tuple(replace(value, shape=shapes.get(value.name, "f32[100,512]")) for value in launch.inputs)
        mean.launches[index] = replace(launch, inputs=inputs)
    assert [any(missed.value == "x" for missed in found.rank()) for found in (program, mean)] == [True, False]


@pytest.mark.parametrize(("axis", "is_missed"), [("1", True), ("0", False)])
def test_sums_of_rows_and_of_columns_are_of_no_single_block(axis: str, is_missed: bool) -> None:
    """x / (x.sum(0) * x.sum(1)[:, None]); the sums of a row and of its squares are one block's."""

    def summed(axis: str) -> str:
        return f"%x = f32[512,512]{{1,0}} parameter(0)\n%s = f32[512]{{0}} reduce(%x, %z), dimensions={{{axis}}}"

    program = Program().launch("rows", {"x": 100}, 1, "reduction", opcodes=("reduce",), hlo=summed("1"))
    program.launch("others", {"x": 100}, 1, "reduction", opcodes=("reduce",), hlo=summed(axis))
    program.launch("y", {"x": 100, "rows": 1, "others": 1}, 100, opcodes=("divide",))
    for index, launch in enumerate(program.launches):
        sizes = ("512,512" if value.name == "x" else "512" for value in launch.inputs)
        inputs = (replace(value, shape=f"f32[{size}]") for value, size in zip(launch.inputs, sizes, strict=True))
        program.launches[index] = replace(launch, inputs=tuple(inputs))
    found = [missed for missed in program.rank() if missed.value == "x" and "sums over its rows" in missed.reason]
    assert bool(found) == is_missed


def test_what_needs_a_sorted_array_is_no_one_launch_with_the_sorts_first_pass() -> None:
    """A sort first copies its input: so does none that reads the input again beside what was sorted."""
    program = Program().launch("sort", {"x": 100}, 100, "copy", opcodes=("copy",))
    program.launch("sort", {}, 100, "sort", opcodes=("sort",))
    program.launch("cut", {"sort": 100}, 1, "reduction", opcodes=("reduce",))
    program.launch("y", {"x": 100, "cut": 1}, 100, opcodes=("select",))
    assert all(missed.value != "x" for missed in program.rank())


def test_the_clipping_of_a_norm_is_no_norm_of_rows() -> None:
    """The gradients of each example, scaled to a norm of one at most."""
    program = Program().launch("sum", {"g": 100}, 1, "reduction", opcodes=("reduce", "rsqrt"))
    program.launch("clip", {"sum": 1}, 1, opcodes=("minimum",))
    program.launch("mean", {"g": 100, "clip": 1}, 2, "reduction", opcodes=("multiply", "reduce"))
    assert not any(missed.remedy.startswith("rms_norm") for missed in program.rank())


@pytest.mark.parametrize(("kind", "is_missed"), [("loop", True), ("triton_gemm", False)])
def test_sums_that_a_product_puts_together_are_of_no_single_row(kind: Any, is_missed: bool) -> None:
    """Squeeze and excitation: an image's channels are scaled by what two layers make of their means."""
    program = norm(100, "f32[100,512]")
    program.launches[1] = replace(program.launches[1], kind=kind)
    assert any(missed.value == "x" for missed in program.rank()) == is_missed


@pytest.mark.parametrize(("roots", "is_batch"), [("f32[64]", True), ("f32[1,1,1,64]", True), ("f32[16,64]", False)])
def test_the_variances_of_each_image_are_no_batch_normalizations(roots: str, is_batch: bool) -> None:
    sums = "%x = f32[16,9,64]{2,1,0} parameter(0)\n%s = f32[16,64]{1,0} reduce(%x, %z), dimensions={1}"
    program = Program().launch("var", {"x": 30}, 1, "reduction", opcodes=("reduce", "subtract"), hlo=sums)
    program.launch("root", {"var": 1}, 1, opcodes=("rsqrt",), shape=roots)
    program.launch("y", {"x": 30, "root": 1}, 30, opcodes=("multiply", "subtract"))
    (remedy,) = {missed.remedy for missed in program.rank() if missed.value == "root"}
    assert remedy == text_of(texts.BATCH_NORM if is_batch else texts.GROUP_NORM)


@pytest.mark.parametrize(("weights", "remedy"), [(384, texts.LAYER_NORM), (32, texts.GROUP_NORM)])
def test_rows_that_lie_as_columns_are_known_by_their_weights(weights: int, remedy: texts.Remedy) -> None:
    """XLA keeps the tokens of a vision transformer with the images last in memory."""
    sums = "%x = f32[197,384,32]{2,1,0} parameter(0)\n%s = f32[197,32]{1,0} reduce(%x, %z), dimensions={1}"
    program = Program().launch("var", {"x": 30}, 1, "reduction", opcodes=("reduce", "subtract"), hlo=sums)
    program.launch("root", {"var": 1}, 1, opcodes=("rsqrt",), shape="f32[197,32]")
    program.launch("y", {"x": 30, "root": 1, "scale": 1}, 30, opcodes=("multiply", "subtract"))
    *others, scale = program.launches[2].inputs
    program.launches[2] = replace(program.launches[2], inputs=(*others, replace(scale, shape=f"f32[{weights}]")))
    (found,) = {missed.remedy for missed in program.rank() if missed.value == "root"}
    assert found == text_of(remedy)
