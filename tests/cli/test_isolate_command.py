"""`xlafuse isolate`: the program that it writes computes the same, and XLA decides the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_analysis import Capture, analyze, capture, parse_module
from hlo_analysis.explain import edges_of
from hlo_analysis.isolate import CannotIsolateError, isolate


def program(x, w, row, short):
    """Every argument has another shape; the results need transposes, slices, padding and sums."""
    y = jax.nn.softmax(x.T * row, axis=-1)
    joined = jnp.concatenate([y[:, ::2], jnp.pad(short, ((0, 0), (1, 2)), constant_values=3.0)], axis=1)
    kept = jnp.where(jnp.arange(joined.shape[1]) % 3 == 0, joined, -jnp.inf)
    return (jnp.sin(x.T) @ w).astype(jnp.bfloat16), kept.max(-1), jnp.flip(joined, 0).sum(0).astype(jnp.int32)


SHAPES: tuple[tuple[int, ...], ...] = ((96, 40), (96, 24), (96,), (40, 13))


@pytest.fixture(scope="module")
def captured() -> Capture:
    return capture(program, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES), target="h200")


def test_the_function_computes_what_the_launches_do(captured: Capture):
    launches = [each for each in analyze(captured).launches if each.kind not in ("cublas", "cublaslt")]
    made = isolate(parse_module(captured.text("final_hlo") or ""), launches)
    space: dict = {"lax": jax.lax, "np": np}
    exec(made.source, space)
    rng = np.random.default_rng(0)
    given = {shape: rng.standard_normal(shape, "float32") for shape in SHAPES}
    found = jax.tree.leaves(space["fn"](*(given[shape] for shape, _ in made.arguments if shape in given)))
    wanted = [np.asarray(each, "float32") for each in program(*(given[shape] for shape in SHAPES))]
    for each in wanted:
        close = [
            np.allclose(np.asarray(other, "float32").reshape(each.shape), each, rtol=1e-2, atol=1e-4)
            for other in found
            if other.size == each.size
        ]
        assert any(close), f"no result is the one of shape {each.shape}"


def test_a_library_call_has_no_function(captured: Capture):
    text = (captured.text("final_hlo") or "").replace(" reduce(", " sort(")
    launches = analyze(captured).launches
    with pytest.raises(CannotIsolateError, match="is a sort, which cannot be written as a JAX function"):
        isolate(parse_module(text), launches)


def test_an_edge_is_the_same_alone_and_its_script_says_so(invoke, captured: Capture, tmp_path: Path):
    captured.save(tmp_path / "program.zip")
    edge = edges_of(analyze(captured))[0]
    words = (edge.producer, edge.consumer, "--capture", tmp_path / "program.zip", "-o", tmp_path / "out")
    result = invoke("isolate", *words)
    assert result.exit_code == 0, result.output
    assert "the same, alone: #0 " in result.stdout
    assert "because: " in result.stdout
    assert "HloModule" not in (tmp_path / "out" / "launches.hlo").read_text()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, tmp_path / "out" / "reproduce.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same launches"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0",), "expected one of --fn, --block and --capture"),
        (("0", "--capture", "report.json"), "a report.json has no module"),
    ],
)
def test_bad_input(invoke, report: str, words: tuple[str, ...], message: str):
    result = invoke("isolate", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
