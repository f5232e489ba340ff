from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hlo_analysis.saved import save
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

    def compare(program: Any, shapes: Any, *, progress: Callable[[str, str], None], ready: Any, **options: Any):
        calls.append({"program": program, "shapes": shapes, **options})
        for state in ("compiling", "analysing", "done"):
            progress("xla", state)
        progress("", "numerics")
        progress("pallas", "not applicable")
        progress("unfused", "failed")
        return llama_comparison()

    monkeypatch.setattr(import_module("xlafuse.comparison"), "compare", compare)
    return calls


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A report.json in this folder: unfused, xla (the baseline, 13 launches), xla_cudnn and pallas."""
    monkeypatch.chdir(tmp_path)
    save(llama_comparison(), "report.json")
    return "report.json"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The options that name a softmax and an unrelated sine, in a file of this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # --fn puts the current folder on it
    Path("softmax_and_sine.py").write_text(_PROGRAM)
    return ("--fn", "softmax_and_sine.py:both", "--shape", "f32[512,1024]", "--shape", "f32[4096]")


_PROGRAM = """\
import jax
import jax.numpy as jnp


def both(x, y):
    with jax.named_scope("softmax"):
        x = jax.nn.softmax(x)
    with jax.named_scope("sine"):
        return x, jnp.sin(jnp.sort(y))
"""
