"""Ranking of missed fusions: stakes, the fusion test, values that must exist, shared inputs, remedies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_analysis import Analysis
from hlo_analysis.decisions import CATEGORIES, categories
from hlo_analysis.missed import rank
from hlo_analysis.records import Decision, Device, Intermediate, Launch, MissedFusion, Value

MIB = 2**20
DEVICE = Device(
    name="d",
    description="1 MiB a microsecond, 2 µs a launch",
    memory_bandwidth=MIB * 1e6,
    matrix_flops=(("bf16", 1e15),),
    vector_flops=1e14,
    launch_overhead_us=2.0,
    source="",
)


class Program:
    """Builds launches and the values between them; sizes are in MiB."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.values: dict[str, tuple[int, int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.decisions: list[Decision] = []

    def launch(self, name: str, reads: dict[str, int], writes: int, kind: Any = "loop", **fields: Any) -> Program:
        index = len(self.launches)
        inputs = tuple(
            Value(name=value, shape=f"f32[{size}]", bytes=size * MIB, producer=self.values.get(value, (None,))[0])
            for value, size in reads.items()
        )
        for value in reads:
            self.readers.setdefault(value, []).append(index)
        self.values[name] = (index, writes)
        repeat = fields.get("repeat", 1)
        total = sum(reads.values()) + writes
        self.launches.append(
            Launch(
                index=index,
                thunk_id=index,
                name=name,
                kind=kind,
                computation=fields.pop("computation", "main"),
                inputs=inputs,
                outputs=(Value(name=name, shape=fields.pop("shape", f"f32[{writes}]"), bytes=writes * MIB),),
                bytes_read=sum(reads.values()) * MIB,
                bytes_written=writes * MIB,
                roofline_us=fields.pop("roofline_us", total + 2.0),
                opcodes=tuple((opcode, 1) for opcode in fields.pop("opcodes", ("add",))),
                **fields,
            )
        )
        assert repeat >= 1
        return self

    def decide(self, producer: int, consumer: int, category: str, reason: str = "because") -> Program:
        self.decisions.append(
            Decision(
                producer=self.launches[producer].name,
                consumer=self.launches[consumer].name,
                verdict="ineligible",
                reason=reason,
                category=category,
                pass_name="priority-fusion",
                producer_launch=producer,
                consumer_launch=consumer,
            )
        )
        return self

    def rank(self, **options: Any) -> tuple[MissedFusion, ...]:
        between = []
        for name, (index, size) in self.values.items():
            readers = self.readers.get(name, [])
            repeats = self.launches[index].repeat + sum(self.launches[reader].repeat for reader in readers)
            if readers:
                between.append(
                    Intermediate(
                        name=name,
                        shape=f"f32[{size}]",
                        bytes=size * MIB,
                        producer=index,
                        consumers=tuple(readers),
                        bytes_moved=size * MIB * repeats,
                    )
                )
        return rank(self.launches, between, self.decisions, DEVICE, **options)


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


def test_nothing_is_fused_across_a_loops_boundary() -> None:
    assert Program().launch("a", {"x": 9}, 9).launch("b", {"a": 9}, 9, computation="body", repeat=4).rank() == ()


def attention(phase: Any = "forward") -> Program:
    return (
        Program()
        .launch("q", {"x": 10}, 10)
        .launch("k", {"x": 10}, 10)
        .launch("s", {"q": 10, "k": 10}, 800, "triton_gemm", scope="attention", shape="f32[8,64,64]")
        .launch("p", {"s": 800}, 400, "triton", scope="attention", opcodes=("exponential", "reduce", "divide"))
        .launch("o", {"p": 400, "v": 10}, 10, "triton_gemm", scope="attention", phase=phase)
    )


def test_attention_scores_have_the_remedy_of_attention() -> None:
    first, second, *_ = attention().rank()
    assert (first.value, second.value) == ("s", "p")
    for missed in (first, second):
        assert missed.remedy_kind == "kernel"
        assert missed.remedy.startswith("attention:")
        assert "cudnn" in missed.remedy


def test_attention_scores_need_not_be_kept_for_the_backward_pass() -> None:
    first, second, *_ = attention(phase="backward").rank()
    assert (first.value, second.value) == ("s", "p")
    assert second.bytes_at_stake == 800 * MIB


def test_a_gate_is_no_attention() -> None:
    """Its product grows too, but it is made with a weight."""
    program = (
        Program()
        .launch("h", {"x": 10}, 10)
        .launch("g", {"h": 10, "wg": 50}, 400, "triton_gemm", scope="mlp")
        .launch("u", {"h": 10, "wu": 50}, 400, "triton_gemm", scope="mlp")
        .launch("m", {"g": 400, "u": 400}, 400, opcodes=("multiply", "logistic"), scope="mlp")
    )
    remedies = {missed.value: missed.remedy for missed in program.rank() if missed.category != categories.SHARED_INPUT}
    assert remedies["g"].startswith("gated_linear:")
    assert remedies["u"].startswith("gated_linear:")


def test_two_halves_of_one_product_are_a_gate_and_an_activation_alone_is_not() -> None:
    def remedy(*opcodes: str) -> str:
        program = Program().launch("g", {"h": 10, "w": 50}, 400, "triton_gemm").launch("r", {"x": 400}, 400)
        program.launch("m", {"g": 400, "r": 400}, 400, opcodes=opcodes)
        return next(missed.remedy for missed in program.rank() if missed.value == "g")

    assert remedy("multiply", "exponential", "slice").startswith("gated_linear:")
    assert remedy("multiply", "tanh", "add").startswith("linear:")


def test_products_with_a_shared_input_can_be_merged_by_an_option() -> None:
    program = (
        Program()
        .launch("h", {"x": 100}, 100, opcodes=("rsqrt", "reduce"))
        .launch("g", {"h": 100, "wg": 50}, 40, "triton_gemm", shape="bf16[128,64]")
        .launch("u", {"h": 100, "wu": 50}, 40, "cublaslt", shape="bf16[128,32]")
        .launch("d", {"h": 100, "g": 40}, 40, "triton_gemm", shape="bf16[7,9]")
    )
    (shared,) = (missed for missed in program.rank() if missed.category == categories.SHARED_INPUT)
    assert shared.consumers == (1, 2)
    assert shared.bytes_at_stake == 100 * MIB
    assert shared.remedy_kind == "option"
    assert shared.remedy.startswith("xla_gpu_dot_merger_threshold_mb=")


def test_products_of_other_rows_and_columns_cannot_be_merged() -> None:
    program = (
        Program()
        .launch("h", {"x": 100}, 100)
        .launch("g", {"h": 100, "w": 50}, 40, "triton_gemm", shape="bf16[128,64]")
        .launch("u", {"h": 100, "y": 50}, 40, "triton_gemm", shape="bf16[64,32]")
    )
    assert all(missed.category != categories.SHARED_INPUT for missed in program.rank())


def test_siblings_read_a_shared_argument_once() -> None:
    program = Program().launch("a", {"x": 100, "y": 100}, 10).launch("b", {"x": 100, "y": 100}, 10)
    found = program.launch("c", {"b": 10, "x": 100}, 1).rank()
    (missed,) = (missed for missed in found if missed.category == categories.SHARED_INPUT)
    assert missed.consumers == (0, 1)  # c needs what b makes
    assert missed.bytes_at_stake == 200 * MIB
    assert missed.time_at_stake_us == pytest.approx(200 + 2)
    assert missed.remedy_kind == "kernel"


@pytest.mark.parametrize(
    ("producer", "reader", "category", "kind", "remedy"),
    [
        (("loop", ("rsqrt",)), ("triton_gemm", ("dot",)), categories.MATRIX_PRODUCT, "kernel", "norm_linear:"),
        (("loop", ("tanh",)), ("triton_gemm", ("dot",)), categories.MATRIX_PRODUCT, "kernel", "linear:"),
        (("triton_gemm", ("dot",)), ("loop", ("add",)), categories.MATRIX_PRODUCT, "kernel", "linear:"),
        (("reduction", ("reduce",)), ("loop", ("rsqrt",)), categories.AFTER_REDUCTION, "kernel", "rms_norm:"),
        (("reduction", ("reduce",)), ("loop", ("rsqrt", "subtract")), categories.SLOWER, "kernel", "layer_norm:"),
        (("reduction", ("reduce",)), ("loop", ("exponential",)), categories.SLOWER, "kernel", "softmax:"),
        (("loop", ("transpose",)), ("triton_gemm", ("dot",)), categories.TILING, "rewrite", "give the operation"),
        (("copy", ("copy",)), ("loop", ("add",)), categories.INSERTED, "rewrite", "donate"),
        (("loop", ("convert",)), ("cublaslt", ()), categories.LIBRARY_CALL, "option", "xla_gpu_cublas_fallback"),
        (("loop", ("add",)), ("loop", ("add",)), categories.SWITCHED_OFF, "option", "leave XLA's fusion passes on"),
        (("loop", ("add",)), ("loop", ("add",)), categories.OTHER_RULE, "kernel", "one kernel"),
    ],
)
def test_remedies(producer: Any, reader: Any, category: str, kind: str, remedy: str) -> None:
    program = Program().launch("a", {"x": 100}, 100, producer[0], opcodes=producer[1])
    (missed,) = program.launch("b", {"a": 100}, 100, reader[0], opcodes=reader[1]).decide(0, 1, category).rank()
    assert missed.category == category
    assert missed.remedy_kind == kind
    assert missed.remedy.startswith(remedy)


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
    times = [found.time_at_stake_us for found in missed]
    assert times == sorted(times, reverse=True)
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
        assert first.remedy.startswith("attention:")
        assert first.category != categories.UNRECORDED
        for missed in analysis.missed:
            assert missed.bytes_at_stake <= analysis.traffic.bytes
            assert missed.time_at_stake_us <= analysis.roofline_us
    merged = {missed.remedy for missed in analyzed("forward").missed}
    assert any(remedy.startswith(("norm_linear:", "linear:")) for remedy in merged)
