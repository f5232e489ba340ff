"""Tables in narrow terminals, and output without UTF-8."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from hlo_analysis.report import render_terminal
from tests.report.examples import llama_comparison


@pytest.mark.parametrize("width", [40, 60, 80, 116, 200])
def test_no_number_is_cut(width):
    file = io.StringIO()
    render_terminal(llama_comparison(), Console(file=file, width=width))
    text = file.getvalue()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    for number in ("31.68 +166%", "3.32  −72%", "4.49  −22%", "5.75 −0.6%", "11.95"):
        assert number in text


def test_columns_are_left_out_before_rows_are_listed():
    texts = {}
    for width in (140, 80, 75, 40):
        file = io.StringIO()
        render_terminal(llama_comparison(), Console(file=file, width=width))
        texts[width] = file.getvalue().partition("* baseline")[0]
    has = {name: [name in text for text in texts.values()] for name in ("launches by kind", " saved ", "peak GB")}
    assert has == {
        "launches by kind": [False, True, True, True],  # as a table of its own
        " saved ": [True, True, False, False],
        "peak GB": [True, True, True, False],
    }
    assert "\n  HBM GB counted: 3.32  −72%" in texts[40]


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("words", [["targets"], ["kernels"], ["strategies"], ["study", "--list"]])
def test_without_utf_8_what_can_be_written_is(words):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    command = [sys.executable, "-m", "xlafuse.cli", *words]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii")
