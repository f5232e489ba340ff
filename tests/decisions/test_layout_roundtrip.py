"""Caches in another order than their readers take them: all of an argument transposed for a part that is new."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_programs import MIB, Program

from hlo_analysis.decisions import categories


def cache(*, copied: bool = False) -> Program:
    """A cache that is transposed, updated in place, multiplied by, and transposed back."""
    program = Program().launch("turned", {"cache": 200}, 200, "transpose", opcodes=("transpose",))
    last = "turned"
    if copied:
        program.launch("copy", {"turned": 200}, 200, "copy", opcodes=("copy",))
        last = "copy"
    program.launch("new", {last: 200, "k": 1}, 200, "scatter", opcodes=("scatter",), shape="f32[200]")
    program.launches[-1] = replace(program.launches[-1], bytes_read=MIB, bytes_written=MIB)
    program.launch("scores", {"new": 200, "q": 1}, 10, "triton_gemm", opcodes=("dot",))
    return program.launch("back", {"new": 200}, 200, "transpose", opcodes=("transpose",))


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_that_is_turned_for_its_readers_costs_all_of_it(copied: bool) -> None:
    first, *others = cache(copied=copied).rank(outputs=("back",), donated=("cache",))
    moves = 3 if copied else 2
    assert first.value == "turned"
    assert first.bytes_at_stake == moves * 400 * MIB
    assert first.time_at_stake_us == pytest.approx(moves * 402)
    assert first.category == categories.IN_PLACE
    assert first.remedy.startswith("keep the array as its readers take it")
    assert "donate" not in first.remedy
    # What would not be there has no remedy of its own.
    assert all(missed.value not in ("turned", "copy") for missed in others)


def test_a_cache_that_is_turned_before_a_loop_and_back_behind_it() -> None:
    program = cache()
    for index in (1, 2):
        program.launches[index] = replace(program.launches[index], computation="body", repeat=32)
    first = next(missed for missed in program.rank(outputs=("back",), donated=("cache",)) if missed.value == "turned")
    assert first.bytes_at_stake == 800 * MIB
    assert first.consumers == (1, 3)


def test_a_cache_that_is_not_donated_would_be_copied_where_it_is_not_turned() -> None:
    first, *_ = cache().rank(outputs=("back",))
    assert "donate_argnums" in first.remedy


def test_an_argument_that_is_turned_and_only_read_is_no_cache() -> None:
    program = Program().launch("turned", {"w": 200}, 200, "transpose", opcodes=("transpose",))
    (missed,) = program.launch("y", {"turned": 200, "x": 10}, 10, "cublaslt", opcodes=()).rank()
    assert missed.remedy.startswith("give the operation the layout")
