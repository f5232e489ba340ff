"""Notes on a program: arrays that an optimizer updates apart, what goes to the host's memory, and calls of Python."""

from __future__ import annotations

from dataclasses import replace

from launch_programs import DEVICE, Program

from hlo_analysis.caveats import notes_of
from hlo_analysis.targets import CPU_DEVICE


def test_what_goes_over_the_hosts_bus_is_told() -> None:
    program = Program().launch("a", {"x": 1}, 1, "copy", host_bytes=3_000_000, repeat=4).launch("b", {"a": 1}, 1)
    (note,) = notes_of(program.launches, DEVICE)
    assert note.startswith("4 launches move 12 MB between the GPU's memory and the host's: counted apart")


def test_calls_of_python_are_no_unknown_kernels_and_told_of_a_cpu_here() -> None:
    hlo = '%c = f32[] custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"'
    program = Program().launch("x", {"a": 9}, 9).launch("c", {"x": 9}, 9, "custom_call", hlo=hlo, repeat=3)
    program.launch("y", {"c": 9}, 9)
    assert list(notes_of(program.launches, DEVICE)) == []
    _, note = notes_of(program.launches, CPU_DEVICE)
    assert note.startswith("The program calls back to Python on the host, 3 times in a run (c), and waits for it")
    assert program.rank() == ()


def test_kernels_that_spill_are_named_once_those_that_spill_most_first() -> None:
    program = Program().launch("a", {"x": 1}, 1).launch("b", {"a": 1}, 1, kernel="k", spill_bytes=8)
    program.launch("c", {"b": 1}, 1, kernel="k", spill_bytes=8).launch("d", {"c": 1}, 1, spill_bytes=1044)
    program.launch("e", {"d": 1}, 1, spill_bytes=0)
    (note,) = notes_of(program.launches, DEVICE)
    assert note == "Kernels that spill registers to memory: d (1044 bytes a thread), k (8 bytes a thread)."
    for number in range(4):
        program.launch(f"f{number}", {"e": 1}, 1, spill_bytes=4)
    (note,) = notes_of(program.launches, DEVICE)
    assert note.endswith("f1 (4 bytes a thread), f2 (4 bytes a thread) and 1 more.")


def test_of_a_program_for_a_cpu_no_remedy_is_listed() -> None:
    program = Program().launch("a", {"x": 100}, 100, spill_bytes=8).launch("b", {"a": 100}, 50)
    (note,) = notes_of(program.launches, CPU_DEVICE)
    assert note.startswith("The program was compiled for a CPU")
    assert program.rank()
    assert program.rank(device=CPU_DEVICE) == ()


def gathered(reads: dict[str, int], kernel: dict[str, int]) -> list[str]:
    """Notes of whole arrays in a program of an all-gather `g` and a kernel; sizes above 1 are matrices."""
    program = Program().launch("g", reads, 40, "collective", opcodes=("all-gather",), axes=(("data", 4),))
    first, second = program.launch("norm", kernel, 40, "mosaic", scope="block/norm").launches
    shapes = [f"f32[64,{value.bytes}]" if value.bytes > 1 << 20 else "f32[64]" for value in second.inputs]
    shaped = [replace(value, shape=shape) for value, shape in zip(second.inputs, shapes, strict=True)]
    return [note for note in notes_of([first, replace(second, inputs=tuple(shaped))], DEVICE) if "whole" in note]


def test_a_kernel_that_reads_nothing_but_gathered_arrays_is_told() -> None:
    (note,) = gathered({"x": 10}, {"g": 40, "scale": 1})
    assert note.startswith(
        "norm (block/norm) reads nothing but whole arrays, which XLA gathers over the mesh axis 'data'"
    )


def test_a_kernel_that_gathers_its_weights_alone_is_as_it_should_be() -> None:
    assert not gathered({"w": 10}, {"x": 8, "g": 40})


def test_what_goes_over_each_axis_is_told() -> None:
    times = {"estimated_us": 50.0, "exposed_us": 20.0}
    program = Program()
    for name, axis, repeat in (("a", "data", 1), ("b", "tensor", 3), ("c", "tensor", 1)):
        fields = {"axes": ((axis, 2),), "link_bytes": 10**6, "repeat": repeat, **times}
        program.launch(name, {"x": 1}, 1, "collective", opcodes=("all-reduce",), **fields)
    first, second = (note for note in notes_of(program.launches, DEVICE) if "collective" in note)
    assert first.startswith("1 collective over the mesh axis 'data': 1 MB sent by each GPU in 50 µs, 20 of them beside")
    assert second.startswith("4 collectives over the mesh axis 'tensor': 4 MB sent by each GPU in 200 µs, 80 of them")
