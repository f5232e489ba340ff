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
from hlo_analysis.isolate import isolate
from hlo_analysis.lax_calls import CannotIsolateError


def program(x, w, row, short):
    """Every argument has another shape; the results need transposes, slices, padding and sums."""
    y = jax.nn.softmax(x.T * row, axis=-1)
    joined = jnp.concatenate([y[:, ::2], jnp.pad(short, ((0, 0), (1, 2)), constant_values=3.0)], axis=1)
    kept = jnp.where(jnp.arange(joined.shape[1]) % 3 == 0, joined, -jnp.inf)
    return (jnp.sin(x.T) @ w).astype(jnp.bfloat16), kept.max(-1), jnp.flip(joined, 0).sum(0).astype(jnp.int32)


def indexed(table, ids):
    """Gathers, scatters, sorts, running sums, bytes read as another type."""
    rows, update = jax.vjp(lambda t: jnp.tanh(t[ids]), table)
    order = jnp.argsort(rows, axis=-1)
    halves = jax.lax.bitcast_convert_type(table.astype(jnp.bfloat16).reshape(-1, 2), jnp.uint32)
    picked = jnp.take_along_axis(rows, order[:, ::-1], axis=-1)
    return update(rows * 2)[0], jnp.cumsum(picked, axis=-1)[:, 3:], jnp.argmax(rows, -1), halves


def floats(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


PROGRAMS = {
    "plain": (program, floats((96, 40), (96, 24), (96,), (40, 13))),
    "indexed": (
        indexed,
        [*floats((50, 16)), jax.ShapeDtypeStruct((33,), jnp.int32)],
    ),
}


@pytest.fixture(scope="module")
def captured() -> Capture:
    fn, arguments = PROGRAMS["plain"]
    return capture(fn, *arguments, target="h200")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_function_computes_what_the_launches_do(captured: Capture, name: str):
    fn, arguments = PROGRAMS[name]
    found = captured if name == "plain" else capture(fn, *arguments, target="h200")
    launches = [each for each in analyze(found).launches if each.kind not in ("cublas", "cublaslt")]
    made = isolate(parse_module(found.text("final_hlo") or ""), launches)
    space: dict = {"lax": jax.lax, "np": np, "jax": jax}
    exec(made.source, space)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 50, each.shape).astype(each.dtype) if each.dtype == jnp.int32
             else rng.standard_normal(each.shape, each.dtype) for each in arguments]  # fmt: skip
    given = {each.shape: each for each in drawn}
    results = jax.tree.leaves(space["fn"](*(given[shape] for shape, _ in made.arguments if shape in given)))
    for each in jax.tree.leaves(fn(*drawn)):
        wanted = np.asarray(each, "float32")
        close = [
            np.allclose(np.asarray(other, "float32").reshape(wanted.shape), wanted, rtol=1e-2, atol=1e-3)
            for other in results
            if other.size == wanted.size
        ]
        assert any(close), f"no result is the one of shape {wanted.shape}"


def test_what_jax_has_no_function_for_is_named(captured: Capture):
    text = (captured.text("final_hlo") or "").replace(" reduce(", " cholesky(")
    launches = analyze(captured).launches
    with pytest.raises(CannotIsolateError, match="is a cholesky, which JAX has no function for"):
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
