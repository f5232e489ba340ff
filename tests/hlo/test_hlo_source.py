"""Source frames: in both dialects, and against the lines of the programs themselves."""

from pathlib import Path

import hlo_programs
import pytest
from test_hlo_errors import TABLES
from test_hlo_grammar import TEXTS

from hlo_analysis.hlo import HloParseError, SourceFrame, parse_module

LINES = Path(hlo_programs.__file__).read_text().splitlines()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_frames_lead_to_the_line_that_made_the_instruction(texts, platform):
    found = {"dot_general": 0, "rsqrt": 0, "tanh": 0}
    wanted = {"dot_general": "@", "rsqrt": "rsqrt", "tanh": "tanh"}
    for program in ("block", "scan_grad"):
        for text in texts(platform, program).values():
            for computation in parse_module(text).computations.values():
                for instruction in computation.instructions.values():
                    primitive = instruction.op_name.rpartition("/")[2]
                    if primitive not in wanted or "vmap" in instruction.op_name:
                        continue
                    frame = instruction.metadata.frames[0]
                    assert Path(frame.file).name == "hlo_programs.py"
                    assert wanted[primitive] in LINES[frame.line - 1], instruction.text
                    found[primitive] += 1
    assert all(count >= 1 for count in found.values()), found


def test_frames_run_outwards(texts):
    text = next(text for name, text in texts("cpu", "block").items() if "before_optimizations" in name)
    module = parse_module(text)
    stacks = {
        tuple(LINES[frame.line - 1].strip() for frame in instruction.metadata.frames[:2])
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.metadata and instruction.op_name.endswith("/rsqrt")
    }
    assert {("jax.lax.rsqrt(" in inner, "norm(x)" in outer) for inner, outer in stacks} == {(True, True)}


def test_tables():
    # XLA prints the caller's id plus one: frame 2, which prints 2, was called by frame 1, and 1 by none.
    module = parse_module(TABLES)
    frame = SourceFrame(file="a.py", line=3)
    assert module.source.frames == {1: (frame, 0), 2: (frame, 1)}
    metadata = module.entry.root_instruction.metadata
    assert metadata is not None
    assert metadata.frames == (frame, frame)
    assert metadata.op_name == "jit(f)/neg"
    parameter = module.entry.instructions["p"]
    assert parameter.op_name == "p"
    assert parameter.metadata is not None
    assert parameter.metadata.frames == ()


def test_old_dialect():
    metadata = parse_module(TEXTS["old metadata"]).entry.root_instruction.metadata
    assert metadata is not None
    assert metadata.op_name == "jit(f)/block/neg"
    assert metadata.frames == (SourceFrame(file='a "b".py', line=12),)


def test_escapes_are_undone():
    text = TABLES.replace('"a.py"', r'"d\303\251j\303\240 vu\\\"\x41\n.py"')
    assert parse_module(text).source.stack(1)[0].file == 'déjà vu\\"A\n.py'


def test_text_without_tables_has_no_frames():
    text = 'HloModule m\n\nENTRY e {\n  p = f32[] parameter(0), metadata={op_name="a/b" stack_frame_id=7}\n}\n'
    metadata = parse_module(text).entry.root_instruction.metadata
    assert metadata is not None
    assert (metadata.op_name, metadata.frames) == ("a/b", ())


def test_a_circle_of_frames_ends():
    text = TABLES.replace("1 {file_location_id=1 parent_frame_id=1}", "1 {file_location_id=1 parent_frame_id=3}")
    assert len(parse_module(text).source.stack(2)) == 2


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("FunctionNames", "FunctionName", 6, "expected the table FunctionNames"),
        ("file_location_id=1 parent_frame_id=2", "file_location_id=4", 14, "names a file_location_id that"),
        ("parent_frame_id=2", "parent_frame_id=3", 14, "stack frame 2 is its own caller"),
        ("line=3 ", "line=x ", 10, "expected a number for line, found 'x'"),
        ('1 "a.py"', "1 a.py", 4, "expected a string"),
    ],
)
def test_broken_tables(old, new, line, message):
    with pytest.raises(HloParseError) as caught:
        parse_module(TABLES.replace(old, new, 1))
    assert message in str(caught.value)
    assert caught.value.line == line
