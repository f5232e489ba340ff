"""Studies: records, conclusions, the cart-pole kernel, and pages that follow from the committed results."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from pallas_kernels.primitives.random import key_words, mixed_words
from xlafuse.bench import timing
from xlafuse.cli import app
from xlafuse.errors import UnknownNameError
from xlafuse.files import to_json
from xlafuse.studies import STUDIES, cartpole, get_study, run_study, variants
from xlafuse.studies.cartpole import FALLEN, START, apart, drawn, drawn_apart, precomputed
from xlafuse.studies.comparisons import FUSED, UNFUSED, Gain, finding
from xlafuse.studies.records import Part, Row, StudyError, StudyResult, load, merged
from xlafuse.studies.variants import Case, Variant

ROOT = Path(__file__).resolve().parents[2]


def result_of(*rows, basis="measured", name="softmax"):
    part = Part(basis=basis, target="h200", started="2026-11-24T12:00:00+00:00", rows=rows)
    return StudyResult(study=name, parts=(part,))


def row(variant, case="a", **values):
    return Row(case=case, variant=variant, values=values)


def start(environments):
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.uniform(key, (environments,), minval=-START, maxval=START) for key in keys)


def test_ways_to_write_the_simulation_agree():
    words = mixed_words(key_words(jax.random.key(3)))
    numbers = jnp.arange(64, dtype=jnp.int32)
    actions, resets = jax.vmap(lambda step: drawn(words, numbers, step))(jnp.arange(200, dtype=jnp.int32))
    states = start(64)
    expected = apart()(states, actions, resets)
    together = precomputed(2)(jnp.stack(states, 1), actions, jnp.stack(resets, -1))
    inside = drawn_apart(steps=200)(states, key_words(jax.random.key(3)))
    for i in range(4):
        np.testing.assert_allclose(together[:, i], expected[i], atol=1e-4)
        np.testing.assert_allclose(inside[i], expected[i], atol=1e-4)
    assert (jnp.abs(expected[2]) <= FALLEN).all()


def test_drawn_randoms_are_uniform():
    numbers = jnp.arange(2**16, dtype=jnp.int32)
    actions, resets = drawn(mixed_words(key_words(jax.random.key(1))), numbers, jnp.int32(40))
    assert abs(float(jnp.mean(actions)) - 0.5) < 0.01
    for values in resets:
        assert float(jnp.max(jnp.abs(values))) <= START
        assert abs(float(jnp.mean(values))) < START / 100
        assert abs(float(jnp.std(values)) - START / math.sqrt(3)) < START / 100


def test_kernel_refuses_other_sizes():
    with pytest.raises(ValueError, match="multiple of 128 environments"):
        cartpole.simulate_drawn(start(100), jnp.zeros(2, jnp.uint32), steps=8)


def test_variants_that_fail_or_differ_have_no_times(monkeypatch):
    def records(run_once, calls):
        for _ in range(calls):
            run_once()
        return [("kernel", 2e-3)] * calls

    monkeypatch.setattr(timing, "_kernel_records", records)
    monkeypatch.setattr(variants, "buffer_sets", lambda _: 1)
    made = {
        "first": Variant(function=lambda x: x + 1),
        "same": Variant(function=lambda x: 1 + x),
        "other": Variant(function=lambda x: x + 2),
        "other results": Variant(function=lambda x: (x, x), is_checked=False),
        "fails": Variant(function=lambda x: 1 / 0),
    }
    case = Case(name="a case", arguments=(jax.ShapeDtypeStruct((8, 8), jnp.float32),), variants=made)
    found = list(variants.time_variants([case]))
    assert [each.variant for each in found if isinstance(each, Row)] == ["first", "same", "other results"]
    assert {each.values["us"] for each in found if isinstance(each, Row)} == {2.0}
    told = [each for each in found if isinstance(each, str)]
    assert told[0].startswith("a case, other: AssertionError: output 0 is off by ")
    assert told[1] == "a case, fails: RuntimeError: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("fused", "verdict"), [((10.0, 10.0), "holds"), ((10.0, 18.0), "holds in part"), ((40.0, 40.0), "does not hold")]
)
def test_verdicts_follow_from_times(fused, verdict):
    rows = [row(UNFUSED, case, us=20.0) for case in "ab"]
    rows += [row(FUSED, case, us=us) for case, us in zip("ab", fused, strict=True)]
    assert finding(result_of(*rows), Gain(least=1.9)).verdict == verdict
    assert finding(result_of(row(UNFUSED, us=1.0)), Gain()).verdict == "not measured"


def test_results_round_trip_and_merge(tmp_path):
    counted = result_of(row(FUSED, launches=1.0), basis="counted")
    older, newer = result_of(row(FUSED, us=3.0)), result_of(row(FUSED, us=2.0))
    both = merged([counted, older, newer])
    path = tmp_path / "softmax.json"
    path.write_text(to_json(both), encoding="utf-8")
    again = load(path)
    assert again == both
    assert len(again.parts) == 2
    assert (again.value("a", FUSED, "us"), again.value("a", FUSED, "launches")) == (2.0, 1.0)
    with pytest.raises(StudyError, match="one study"):
        merged([counted, result_of(name="mlp")])
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(StudyError, match="schema version"):
        load(path)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_concludes_without_a_gpu(name):
    """From what is committed; a comparison from its counted part alone, too."""
    study, result = get_study(name), load(ROOT / f"notebooks/results/studies/{name}.json")
    counted = StudyResult(study=name, parts=tuple(part for part in result.parts if part.basis == "counted"))
    for each in (counted, result) if study.cases() else (result,):
        conclusion = study.conclude(each)
        assert len(conclusion.findings) == len(study.claims)
        assert all(sentence.endswith(".") and "nan" not in sentence for sentence in conclusion.sentences)


def test_a_recorded_study_counts_in_no_time():
    result = run_study(get_study("compile_time"))
    assert result.parts[0].basis == "counted"
    assert result.has("compile_s", "us")


def test_pages_are_current():
    spec = importlib.util.spec_from_file_location("write_studies", ROOT / "scripts/write_studies.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for path, text in script.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run `make results`"


def test_command():
    run = CliRunner().invoke
    listed = run(app, ["study", "--list"])
    assert listed.exit_code == 0
    assert "cartpole: " in listed.output
    assert "10.56" in listed.output
    wrong = run(app, ["study", "cartpol"])
    assert wrong.exit_code == 2
    assert "cartpole" in wrong.output
    with pytest.raises(UnknownNameError):
        get_study("cartpol")
