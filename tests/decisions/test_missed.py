"""Ranking of missed fusions: stakes, the fusion test, values that must exist, shared inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_programs import DEVICE, MIB, Program, text_of

from hlo_analysis import Analysis
from hlo_analysis.decisions import CATEGORIES, categories
from hlo_analysis.records import Intermediate
from hlo_analysis.remedies import texts


def test_what_is_written_and_read_again_is_at_stake() -> None:
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 50)
    (missed,) = program.decide(0, 1, categories.SLOWER, "too slow").rank()
    assert missed.bytes_at_stake == 200 * MIB
    assert missed.time_at_stake_us == pytest.approx(200 + 2)  # 200 MiB at 1 MiB/µs, and one launch less
    assert missed.share == pytest.approx(200 / 350)
    assert (missed.rank, missed.value, missed.producer, missed.consumers) == (1, "a", 0, (1,))
    assert (missed.category, missed.reason) == (categories.SLOWER, "too slow")


def test_loops_count_as_often_as_they_run() -> None:
    program = Program().launch("a", {"x": 10}, 10, repeat=5).launch("b", {"a": 10}, 10, repeat=5)
    (missed,) = program.rank()
    assert missed.bytes_at_stake == 100 * MIB
    assert missed.time_at_stake_us == pytest.approx(100 + 5 * 2)


def test_a_launch_bound_by_arithmetic_waits_for_no_byte() -> None:
    program = Program().launch("p", {"x": 10}, 100, "triton_gemm", limiter="compute", roofline_us=1000.0)
    (missed,) = program.launch("b", {"p": 100}, 100, opcodes=("add",)).rank()
    assert missed.bytes_at_stake == 200 * MIB
    assert missed.time_at_stake_us == pytest.approx(100 + 2)


def test_a_small_value_between_large_launches_fails_the_fusion_test() -> None:
    assert Program().launch("a", {"x": 1000}, 1).launch("b", {"a": 1, "y": 1000}, 1000).rank() == ()


def test_a_small_value_between_small_launches_costs_a_launch() -> None:
    program = Program().launch("a", {"x": 10}, 0).launch("b", {"a": 0}, 10)
    assert program.rank() == ()  # nothing at all is handed over
    program = Program().launch("a", {"x": 10}, 1).launch("b", {"a": 1}, 10)
    (missed,) = program.rank()
    assert missed.time_at_stake_us == pytest.approx(4)


def test_an_output_of_the_program_is_written_anyway() -> None:
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 50)
    (missed,) = program.rank(outputs={"a"})
    assert missed.bytes_at_stake == 100 * MIB
    assert missed.time_at_stake_us == pytest.approx(100 + 2)
    assert "written in any case" in missed.reason


def test_what_the_backward_pass_reads_is_written_anyway() -> None:
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 100)
    (missed,) = program.launch("c", {"a": 100}, 100, phase="backward").rank()
    assert missed.consumers == (1,)
    assert missed.bytes_at_stake == 100 * MIB
    assert "written in any case" in missed.reason


def test_a_value_for_the_backward_pass_alone_is_not_missed() -> None:
    assert Program().launch("a", {"x": 100}, 100).launch("c", {"a": 100}, 100, phase="backward").rank() == ()


def test_what_an_optimizer_makes_of_a_gradient_is_missed() -> None:
    """Nothing of its step says that it follows the backward pass, whose products could take it in their epilogues."""
    program = Program().launch("dw", {"x": 9, "dy": 9}, 100, "triton_gemm", opcodes=("dot",), phase="backward")
    (missed,) = program.launch("w", {"dw": 100, "old": 100}, 100, opcodes=("add", "multiply", "rsqrt")).rank()
    assert (missed.bytes_at_stake, missed.remedy) == (200 * MIB, text_of(texts.EPILOGUE))
    sums = Program().launch("db", {"dy": 20}, 1, "reduction", opcodes=("reduce",), phase="backward")
    (missed,) = sums.launch("b", {"db": 1, "old": 1}, 1, opcodes=("multiply", "rsqrt", "subtract")).rank()
    assert missed.remedy == text_of(texts.ONE_KERNEL)


def test_a_launch_of_several_of_one_instruction_has_its_reason() -> None:
    """A sort copies its input first; what XLA said is said of the sort, whose last launch is another."""
    program = Program().launch("a", {"x": 100}, 100).launch("s", {"a": 100}, 100, "copy").launch("t", {"s": 100}, 100)
    program.launches[2] = replace(program.launches[2], name="s", kind="sort")
    missed = next(missed for missed in program.decide(0, 2, categories.CONSUMER).rank() if missed.value == "a")
    assert (missed.reason, missed.category) == ("because", categories.CONSUMER)


@pytest.mark.parametrize(("width", "count"), [(1, 1), (64, 0)])
def test_rows_that_are_scattered_are_no_part_of_element_wise_work(width: int, count: int) -> None:
    """As into the gradient of an embedding, which a product made before; XLA gives an element a window, too."""
    scatter = f"%r.1 = f32[8,1,{width}]{{2,1,0}} convert(%b)\n  ROOT %u = f32[100,64]{{1,0}} scatter(%a, %i, %r.1), "
    scatter += "update_window_dims={1,2}, inserted_window_dims={}, to_apply=%add"
    program = Program().launch("a", {"x": 50}, 100, phase="backward")
    opcodes = ("scatter", "iota")
    program.launch("u", {"a": 1, "i": 1}, 100, "scatter", opcodes=opcodes, hlo=scatter, phase="backward")
    program.launches[1] = replace(program.launches[1], bytes_written=MIB)
    found = program.launch("y", {"u": 100}, 100, phase="backward").rank()
    assert sum(missed.category == categories.IN_PLACE for missed in found) == count


def test_what_goes_to_the_hosts_memory_or_comes_from_there_is_not_missed() -> None:
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 100, host_bytes=100 * MIB, kind="copy")
    assert program.launch("c", {"b": 100}, 100).rank() == ()


def test_what_has_no_name_belongs_to_no_pass() -> None:
    """As the indices that XLA makes of a pooling's gradient."""
    program = Program().launch("a", {"x": 100}, 100, op_name="").launch("c", {"a": 100}, 100, phase="backward")
    (missed,) = program.rank()
    assert missed.bytes_at_stake == 200 * MIB


def test_nothing_is_fused_across_a_loops_boundary() -> None:
    assert Program().launch("a", {"x": 9}, 9).launch("b", {"a": 9}, 9, computation="body", repeat=4).rank() == ()


def test_what_is_updated_in_place_is_in_the_result() -> None:
    """Zeros that a scatter adds rows to: the table of gradients is written in any case."""
    program = Program().launch("zeros", {}, 800, shape="f32[800]").launch("sum", {"zeros": 800}, 800, shape="f32[800]")
    program.launches[1] = replace(program.launches[1], bytes_read=100 * MIB, bytes_written=100 * MIB)
    between = Intermediate(
        name="zeros", shape="f32[800]", bytes=800 * MIB, producer=0, consumers=(1,), bytes_moved=900 * MIB
    )
    (missed,) = program.rank_of(between, outputs={"sum"})
    assert missed.bytes_at_stake == 100 * MIB
    assert "updates it in place" in missed.reason


def test_of_a_buffer_updated_in_place_only_the_update_is_at_stake() -> None:
    """A step of decoding writes one token into the cache that attention then reads whole: it would do so anyway."""
    program = Program().launch("cache", {"token": 1}, 1, shape="f32[800]").launch("sum", {"cache": 800}, 1)
    between = Intermediate(
        name="cache", shape="f32[800]", bytes=800 * MIB, producer=0, consumers=(1,), bytes_moved=801 * MIB
    )
    assert program.rank_of(between) == ()  # 2 of 803 MiB
    program.launches[1] = replace(program.launches[1], bytes_read=20 * MIB, roofline_us=23.0)
    (missed,) = program.rank_of(between)
    assert missed.bytes_at_stake == 2 * MIB


def test_what_a_loops_launch_hands_its_next_run_is_at_stake() -> None:
    program = Program().launch("a", {"a": 10}, 10, computation="body", repeat=5)

    def carried(shape: str) -> Intermediate:
        return Intermediate(name="a", shape=shape, bytes=10 * MIB, producer=0, consumers=(0,), bytes_moved=100 * MIB)

    (missed,) = program.rank_of(carried("f32[10]"), outputs={"a"})
    assert missed.bytes_at_stake == 50 * MIB  # unrolled by two, it hands on half
    assert missed.time_at_stake_us == pytest.approx((100 + 5 * 2) / 2)
    assert (missed.category, missed.share) == (categories.BOUNDARY, 0.5)
    assert missed.remedy.startswith("unroll the loop by two")
    assert "unroll=2" in missed.code


def test_half_of_a_counters_launches_go_where_a_loop_is_unrolled_by_two() -> None:
    program = Program().launch("i", {"i": 1}, 1, computation="body", repeat=100)
    counter = Intermediate(name="i", shape="s32[]", bytes=4, producer=0, consumers=(0,), bytes_moved=800)
    (missed,) = program.rank_of(counter)
    assert missed.remaining_us == pytest.approx(100 * DEVICE.launch_overhead_us / 2, rel=0.01)


def test_what_a_library_reads_is_written_and_others_may_join_its_maker() -> None:
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 1, opcodes=("reduce",))
    found = program.launch("c", {"a": 100}, 1, "cudnn", opcodes=("custom-call",)).rank()
    (missed,) = (missed for missed in found if missed.value == "a")
    assert missed.consumers == (1,)
    assert missed.bytes_at_stake == 100 * MIB  # one read; its writing stays
    assert missed.remedy != text_of(texts.OWN_KERNEL)


def test_copies_of_copies_are_nobodys_to_take_away() -> None:
    program = Program().launch("a", {"x": 100}, 100, "copy", opcodes=("copy",), op_name="")
    program.launch("b", {"a": 100}, 100, "copy", opcodes=("copy",), op_name="").decide(0, 1, categories.INSERTED)
    assert [missed.value for missed in program.rank() if missed.value == "a"] == []


@pytest.mark.parametrize(("opcodes", "saved"), [(("reduce",), 1), (("reduce", "add"), 0)])
def test_what_adds_a_split_products_parts_goes_if_it_does_nothing_else(opcodes: tuple[str, ...], saved: int) -> None:
    dot = '%d = f32[4,8,8]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, rhs_batch_dims={0}, metadata={op_name="f/dot"}'
    sums = '%r = f32[8,8]{1,0} reduce(%d, %zero), dimensions={0}, metadata={op_name="f/dot"}'
    program = Program().launch("p", {"x": 100}, 400, "triton_gemm", opcodes=("dot",), hlo=dot)
    (missed,) = program.launch("s", {"p": 400}, 100, "reduction", opcodes=opcodes, hlo=sums).rank()
    assert missed.options == (("xla_gpu_experimental_force_split_k", "1"),)
    assert missed.code.startswith("jax.jit(fn, compiler_options={")
    overhead = missed.time_at_stake_us - missed.bytes_at_stake / DEVICE.memory_bandwidth * 1e6
    assert overhead == pytest.approx(saved * DEVICE.launch_overhead_us)


def test_siblings_read_a_shared_argument_once() -> None:
    program = Program().launch("a", {"x": 100, "y": 100}, 10).launch("b", {"x": 100, "y": 100}, 10)
    found = program.launch("c", {"b": 10, "x": 100}, 1).rank()
    (missed,) = (missed for missed in found if missed.category == categories.SHARED_INPUT)
    assert missed.consumers == (0, 1)  # c needs what b makes
    assert missed.bytes_at_stake == 200 * MIB
    assert missed.time_at_stake_us == pytest.approx(200 + 2)
    assert missed.remedy_kind == "kernel"


def test_what_is_done_above_is_saved_once() -> None:
    """A launch whose two results go to different readers is launched once."""
    program = Program().launch("a", {"x": 100}, 100).launch("b", {"a": 100}, 50).launch("c", {"a": 100}, 10)
    found = program.rank()
    assert sum(missed.time_at_stake_us for missed in found) > sum(missed.remaining_us for missed in found)
    assert found[0].remaining_us == found[0].time_at_stake_us
    assert sum(missed.remaining_us for missed in found) <= sum(launch.roofline_us for launch in program.launches)


KINDS = st.sampled_from(["loop", "reduction", "triton", "triton_gemm", "cublaslt", "mosaic", "copy"])
ROWS = st.lists(
    st.tuples(KINDS, st.integers(0, 300), st.sets(st.integers(0, 9)), st.sampled_from(["forward", "backward"])),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_ranking_is_sound_for_any_program(rows: list[tuple[Any, int, set[int], Any]]) -> None:
    program = Program()
    for index, (kind, writes, reads, phase) in enumerate(rows):
        given_values = {f"v{r}": program.values[f"v{r}"][1] for r in reads if r < index} | {"x": 5}
        program.launch(f"v{index}", given_values, writes, kind, phase=phase)
    missed = program.rank()
    assert [found.rank for found in missed] == list(range(1, len(missed) + 1))
    times = [found.remaining_us for found in missed]
    assert all(earlier >= later - 1e-6 for earlier, later in pairwise(times))
    assert sum(times) <= sum(launch.roofline_us for launch in program.launches) + 1e-6
    assert all(found.remaining_us <= found.time_at_stake_us + 1e-6 for found in missed)
    for found in missed:
        ends = [program.launches[index] for index in {found.producer, *found.consumers}]
        assert 0 < found.bytes_at_stake <= sum(end.bytes_read + end.bytes_written for end in ends)
        assert 0 < found.share <= 1
        assert found.category in CATEGORIES
        assert found.remedy


def test_the_block(analyzed: Callable[..., Analysis]) -> None:
    for mode in ("forward", "grad"):
        analysis = analyzed(mode)
        first = analysis.missed[0]
        assert first.scope == "attention"
        assert first.remedy.startswith("one kernel that keeps the scores")
        assert first.category != categories.UNRECORDED
        for missed in analysis.missed:
            assert missed.bytes_at_stake <= analysis.traffic.bytes
            assert missed.time_at_stake_us <= analysis.roofline_us
    merged = {missed.remedy for missed in analyzed("forward").missed}
    assert any(part in remedy for remedy in merged for part in ("normalises its rows", "a product that does"))


def test_each_reader_is_charged_with_what_it_can_have_read() -> None:
    """A diagonal that a loss reads beside two sums over all logits costs these nothing."""
    program = Program().launch("l", {"x": 10}, 100, "triton_gemm", opcodes=("dot",))
    program.launch("rows", {"l": 100}, 1, "reduction", opcodes=("reduce",))
    program.launch("columns", {"l": 100}, 1, "reduction", opcodes=("reduce",))
    program.launch("diagonal", {"l": 100}, 1, opcodes=("gather",))
    program.launches[3] = replace(program.launches[3], bytes_read=MIB, phase="backward")
    read = Intermediate(
        name="l", shape="f32[100]", bytes=100 * MIB, producer=0, consumers=(1, 2, 3), bytes_moved=301 * MIB
    )
    found = {missed.category: missed for missed in program.rank_of(read)}
    assert found[categories.SHARED_INPUT].bytes_at_stake == 100 * MIB
    assert found[categories.UNRECORDED].bytes_at_stake == 200 * MIB  # the backward pass has it written


def test_a_launch_with_work_of_the_backward_pass_inside_runs_in_that_pass() -> None:
    """XLA makes one launch of an activation and of its gradient, and names it after the activation."""
    inside = '%m = f32[9]{0} multiply(%a, %b), metadata={op_name="jit(f)/transpose(jvp())/mul"}'
    for hlo, found in (("", 0), (inside, 1)):
        program = Program().launch("a", {"x": 100, "dy": 100}, 100, hlo=hlo)
        program.launch("db", {"a": 100}, 1, "reduction", opcodes=("reduce",), phase="backward")
        assert len(program.rank()) == found


def test_thousands_of_launches_are_ranked_at_once() -> None:
    program, last = Program(), "x"
    for step in range(500):
        program.launch(f"m{step}", {last: 100}, 10, "reduction", opcodes=("reduce",))
        program.launch(f"s{step}", {last: 100, f"m{step}": 10}, 10, "reduction", opcodes=("exponential", "reduce"))
        program.launch(f"y{step}", {last: 100, f"s{step}": 10}, 100, opcodes=("exponential", "divide"))
        program.launch(f"d{step}", {f"y{step}": 100}, 100, "triton_gemm", opcodes=("dot",))
        last = f"d{step}"
    start = perf_counter()
    assert len(program.rank()) == 1999
    assert perf_counter() - start < 5  # 0.3 s on a busy machine; 6.8 s when each remedy walked over all launches


@pytest.mark.parametrize("runs", [8, 4])
def test_zeros_that_a_loop_writes_over_need_not_be_written(runs: int) -> None:
    """As the arrays that `lax.scan` stacks its results in; one that the loop fills in part must be."""
    program = Program().launch("zeros", {}, 80, opcodes=("broadcast",))
    program.launch("y", {"zeros": 80, "x": 10}, 80, opcodes=("dynamic-update-slice",), computation="b", repeat=runs)
    program.launches[1] = replace(program.launches[1], bytes_read=10 * MIB, bytes_written=10 * MIB)
    found = [missed for missed in program.rank() if missed.value == "zeros"]
    assert len(found) == (runs == 8)
    for missed in found:
        assert (missed.producer, missed.consumers, missed.bytes_at_stake) == (0, (1,), 80 * MIB)
        assert missed.remedy.startswith("keep what the loop gives apart")
