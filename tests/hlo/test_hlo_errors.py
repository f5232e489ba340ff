"""Broken text raises HloParseError with a position, never anything else, and never hangs."""

import pickle
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_hlo_grammar import TEXTS

from hlo_analysis.errors import HloAnalysisError
from hlo_analysis.hlo import HloParseError, Module, parse_module, parse_shape

TABLES = """HloModule m, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

FileNames
1 "a.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}


ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), metadata={op_name="p"}
  ROOT %q = f32[2]{0} negate(%p), metadata={op_name="jit(f)/neg" stack_frame_id=2}
}
"""
SEEDS = (TABLES, *TEXTS.values())
FRAGMENTS = (
    *"(){}[]\"'\\/,=%#:;<>?*-. \n\t0129aZ_\x00é",
    *("/*", "*/", "//", "->", "<=", "f32[", "ROOT ", "ENTRY ", "HloModule", "{...}", "9" * 5000, "#7", "metadata={"),
    *("stack_frame_id=", "StackFrames\n", "calls=%", "\ud800", "parameter(", "constant(", "token[]", "b("),
)


def assert_parsed_or_refused(text: str) -> Module | None:
    """Asserts that what parses can be read, and that what does not is refused at a place in the text."""
    try:
        module = parse_module(text)
    except HloParseError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines)
        assert 1 <= error.column <= len(lines[error.line - 1]) + 1
        return None
    for computation in module.computations.values():  # what parsed can be read
        assert computation.root in computation.instructions
        assert computation.parameters is not None
        for instruction in computation.instructions.values():
            assert set(computation.users(instruction.name)) <= set(computation.instructions)
            assert set(instruction.called) <= set(module.computations)
            assert instruction.text in text
            assert isinstance(instruction.backend_config, dict)
            assert parse_shape(instruction.shape.text) == instruction.shape
    return module


def test_seeds_parse():
    for text in SEEDS:
        assert assert_parsed_or_refused(text) is not None


@pytest.mark.parametrize("text", SEEDS, ids=["tables", *TEXTS])
def test_every_truncation(text):
    refused = sum(assert_parsed_or_refused(text[:length]) is None for length in range(len(text)))
    # Only what ends after a whole computation is a module.
    assert refused >= 0.7 * len(text)


@settings(max_examples=400, deadline=5000)
@given(data=st.data(), seed=st.sampled_from(SEEDS))
def test_mutations(data, seed):
    text = seed
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(st.sampled_from(FRAGMENTS)) + text[stop:]
    assert_parsed_or_refused(text)


@settings(max_examples=200, deadline=5000)
@given(
    parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=30), seed=st.sampled_from(SEEDS)
)
def test_any_text(parts, seed):
    assert_parsed_or_refused("".join(parts))
    assert_parsed_or_refused("HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0)\n  %q = " + "".join(parts) + "\n}\n")


@settings(max_examples=200, deadline=5000)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join)))
@example("f32[8]{0:T(")
@example("f32[8]{0:S(99999999999999999999)}")
@example("(" * 70 + ")" * 70)
def test_any_shape(text):
    try:
        shape = parse_shape(text)
    except HloParseError:
        return
    assert parse_shape(shape.text) == shape


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutations_of_a_real_module(texts, data):
    text = list(texts("cpu", "block_grad").values())[-1]
    start = data.draw(st.integers(0, len(text)))
    stop = min(len(text), start + data.draw(st.integers(0, 400)))
    assert_parsed_or_refused(text[:start] + data.draw(st.sampled_from(FRAGMENTS)) + text[stop:])


HEAD = "HloModule m\n\nENTRY %e {\n  %p = "


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "(" * 500_000,
        HEAD + "f32[] constant(" + "{" * 500_000,
        HEAD + "f32[] constant(" + "{" * 250_000 + "}" * 250_000 + ")\n}\n",
        HEAD + "f32[] parameter(0), a=" + "[{(" * 200_000,
        HEAD + "f32[] parameter(0)" + ", a/*" * 200_000,
        HEAD + "f32[] parameter(0), a=" + "/" * 500_000,
        HEAD + "f32[] parameter(0), metadata={" + "a=" * 250_000,
        HEAD + "f32[] parameter(0), metadata={a=" + "{" * 250_000,
        HEAD + 'f32[] parameter(0), a="' + "\\" * 500_000,
        HEAD + "f32[" + "1," * 250_000,
        HEAD + "f32[] add(" + "%p," * 200_000,
        HEAD + "f32[] add(%p" + "#0" * 200_000,
        HEAD + "f32[]" + " " * 500_000 + "/* " * 200_000,
        "/*" * 500_000,
        "HloModule m" + ", a=1" * 1_000,
        "HloModule m\n" + "\n".join(f"%c{n} {{" for n in range(100_000)),
    ],
)
def test_no_hang(text):
    start = time.perf_counter()
    assert_parsed_or_refused_quietly(text)
    assert time.perf_counter() - start < 10  # a second or so at most; quadratic time would take minutes


def assert_parsed_or_refused_quietly(text: str) -> None:
    try:
        parse_module(text)
    except HloParseError as error:
        assert len(str(error)) < 200


def test_the_error_is_of_the_family_and_pickles():
    with pytest.raises(HloParseError) as caught:
        parse_module("HloModule m\n?")
    error = caught.value
    assert isinstance(error, HloAnalysisError)
    assert isinstance(error, ValueError)
    assert str(error) == "line 2, column 1: expected a computation, found '?'"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.line, copy.column, copy.message) == (str(error), 2, 1, error.message)
