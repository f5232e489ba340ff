"""No generated program is rewritten to another one. GENERATED=10000 in the environment draws so many, other ones."""

from __future__ import annotations

import os

from generated_programs import Program, programs
from hypothesis import given, settings
from rewriting import checked


@settings(max_examples=int(os.environ.get("GENERATED", "60")), deadline=None, derandomize="GENERATED" not in os.environ)
@given(programs())
def test_generated_programs_keep_their_meaning(program: Program):
    checked(program.fn, *program.arguments)
