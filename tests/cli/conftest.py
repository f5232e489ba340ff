from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.report.examples import llama_comparison
from xlafuse.cli import app


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Runs `xlafuse` with the given words, in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a ready comparison in the place of compiling; the list gets what `compare` was called with."""
    calls: list[dict[str, Any]] = []

    def compare(program: Any, shapes: Any, *, progress: Callable[[str, str], None], **options: Any):
        calls.append({"program": program, "shapes": shapes, **options})
        for state in ("compiling", "analysing", "done"):
            progress("xla", state)
        progress("", "numerics")
        progress("pallas", "not applicable")
        progress("unfused", "failed")
        return llama_comparison()

    monkeypatch.setattr(import_module("xlafuse.comparison"), "compare", compare)
    return calls
