"""JSON: whole, stable, valid, and refused in words when it is not ours."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest

from hlo_analysis import Analysis, Comparison, DumpError, from_json, json_schema, to_json
from hlo_analysis.records import Numerics, StrategyResult
from hlo_analysis.schema import schema_path

RECORDS = (Analysis, Comparison)


@pytest.fixture(scope="module")
def comparison(analyses) -> Comparison:
    results = [
        StrategyResult(name=name, description="", analysis=analyses[name])
        for name in ("scan", "cudnn_attention", "sort")
    ]
    failed = StrategyResult(
        name="failed",
        description="",
        analysis=None,
        error="no",
        numerics=Numerics(shape="1x8", dtype="bfloat16", error=0.5, baseline_error=0.25, passed=True),
    )
    return Comparison(title="three", baseline="scan", strategies=(*results, failed))


@pytest.mark.parametrize("cls", RECORDS)
def test_committed_schemas_are_current(cls):
    assert json.loads(schema_path(cls).read_text()) == json_schema(cls), "run: python -m hlo_analysis.schema"
    jsonschema.Draft202012Validator.check_schema(json_schema(cls))


@pytest.mark.slow
def test_every_analysis_comes_back_equal_and_validates(analyses):
    validator = jsonschema.Draft202012Validator(json.loads(schema_path(Analysis).read_text()))
    for name, analysis in analyses.items():
        text = to_json(analysis)
        assert from_json(Analysis, text) == analysis, name
        assert to_json(from_json(Analysis, text)) == text
        validator.validate(json.loads(text))


def test_a_comparison_comes_back_equal_and_validates(comparison):
    text = to_json(comparison)
    assert from_json(Comparison, text) == comparison
    jsonschema.validate(json.loads(text), json.loads(schema_path(Comparison).read_text()))


def test_numbers_that_json_lacks_are_kept(comparison):
    numerics = Numerics(shape="", dtype="", error=float("inf"), baseline_error=0.0, passed=False)
    result = StrategyResult(name="x", description="", analysis=None, numerics=numerics)
    text = to_json(Comparison(title="", baseline="x", strategies=(result,)))
    assert from_json(Comparison, text)["x"].numerics == numerics
    jsonschema.validate(json.loads(text), json.loads(schema_path(Comparison).read_text()))
    assert "Infinity" not in text


@pytest.mark.slow
def test_the_schema_refuses_what_is_missing_or_wrong(analyses):
    data = json.loads(to_json(analyses["softmax"]))
    schema = json.loads(schema_path(Analysis).read_text())
    for change in ({"launches": None}, {"schema_version": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data | change, schema)
    del data["traffic"]
    with pytest.raises(jsonschema.ValidationError, match="traffic"):
        jsonschema.validate(data, schema)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected Analysis JSON: "),
        ('{"schema_version": 1,', "expected Analysis JSON: "),
        ("[1]", "an object; got list"),
        ("{}", "of schema version 3, got None"),
        ('{"schema_version": 1}', "of schema version 3, got 1; make the report again"),
        ('{"schema_version": 3, "label": 3}', "label: Input should be a valid string"),
    ],
)
def test_other_json_is_refused(text, words):
    with pytest.raises(DumpError, match=words):
        from_json(Analysis, text)


def test_reading_json_needs_no_jax():
    code = "import sys, hlo_analysis; hlo_analysis.from_json; hlo_analysis.Analysis; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_keeps_its_function_when_its_folder_is_imported():
    code = (
        "import hlo_analysis.analysis, hlo_analysis.capture, inspect, hlo_analysis\n"
        "assert inspect.isfunction(hlo_analysis.capture)\n"
        "from hlo_analysis.capture import Capture\n"
        "assert set(hlo_analysis.__all__) <= set(dir(hlo_analysis))\n"
        "assert all(getattr(hlo_analysis, name) for name in hlo_analysis.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import hlo_analysis

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = hlo_analysis.nothing_of_the_kind
