"""`make mutations` finds the code that it changes: an edit of that code must take the mutation along."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_code_that_a_mutation_changes_stands_in_its_file_once(name: str) -> None:
    file, old, _, tests = MUTATIONS[name]
    assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1
    assert (ROOT / tests.split()[0]).is_file()
