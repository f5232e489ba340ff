"""No generated program is rewritten to another one."""

from __future__ import annotations

from generated_programs import Program, programs
from hypothesis import given, settings
from rewriting import checked


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_generated_programs_keep_their_meaning(program: Program):
    checked(program.fn, *program.arguments)
