"""`xlafuse kernels`: the operations as a user looks them up, and the choice explained for one call."""

from __future__ import annotations

import pytest

from pallas_kernels import REGISTRY

QKV = ("--arg", "query=bf16[4,4096,32,128]", "--arg", "key=bf16[4,4096,8,128]", "--arg", "value=bf16[4,4096,8,128]")
ROWS = ("--arg", "x=bf16[64,4096]", "--arg", "scale=bf16[4096]")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def taken(result):
    """Implementations and what is said of each."""
    assert result.exit_code == 0, result.output
    lines = result.output.rpartition("─")[2].splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines if line.strip()}


def test_every_operation_is_listed_with_its_summary(invoke):
    result = invoke("kernels")
    assert result.exit_code == 0
    for name in REGISTRY:
        (line,) = [line for line in result.output.splitlines() if line.startswith(f" {name} ")]
        assert "mosaic" in line.split("  ")[-1] or "mosaic" in line
        assert len(line.split()) > 5  # a summary, too


def test_an_operation_shows_its_signature_and_what_its_calls_take(invoke):
    result = invoke("kernels", "linear")
    assert result.output.startswith("linear(x: ")
    assert "Raises:" in result.output
    for spec in REGISTRY["linear"].tagged("bench"):
        assert spec.name in result.output


def test_a_call_is_told_what_it_takes_and_why_nothing_else(invoke):
    answers = taken(invoke("kernels", "attention", *QKV, "--arg", "is_causal=True", "--arg", "softcap=30.0"))
    assert answers == {"mosaic": "is taken", "xla": "runs, too", "cudnn": "it has no softcap"}
    answers = taken(invoke("kernels", "attention", *QKV))
    assert answers == {"mosaic": "is taken", "cudnn": "runs, too", "xla": "runs, too"}


def test_another_target_has_another_answer(invoke):
    answers = taken(invoke("kernels", "rms_norm", *ROWS, "--target", "a100"))
    assert answers["xla"] == "is taken"
    assert "Hopper" in answers["mosaic"]
    assert taken(invoke("kernels", "rms_norm", *ROWS))["mosaic"] == "is taken"


def test_parts_of_objects_are_named_as_the_registry_has_them(invoke):
    given = ("x=bf16[8,4096]", "w=bf16[4096,4096]", "norm=rms", "norm_scale=bf16[4096]")
    words = [word for text in given for word in ("--arg", text)]
    assert taken(invoke("kernels", "norm_linear", *words))["mosaic"] == "is taken"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("atention",), "did you mean 'attention'"),
        (("rms_norm", "--target", "h300"), "h300"),
        (("rms_norm", "--arg", "x"), "expected --arg NAME=VALUE"),
        (("rms_norm", "--arg", "y=bf16[4]"), "rms_norm() got an unexpected keyword argument 'y'"),
        (("rms_norm", "--arg", "x=bf16[64,4096]"), "rms_norm() missing 1 required positional argument: 'scale'"),
        (("rms_norm", *ROWS, "--arg", "x=bf16[2]"), "given twice"),
        (("rms_norm", *ROWS[:3], "scale=bf16[100]"), "one value a feature"),
        (("rms_norm", *ROWS[:3], "scale=bf17[4096]"), "unknown element type 'bf17'"),
        (("attention", *QKV, "--arg", "scale=large"), "scale"),
        (("norm_linear", "--arg", "x=bf16[8,4096]"), "norm_linear() missing 1 required positional argument: 'w'"),
        (("--arg", "x=bf16[2]"), "name it"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(words, message, invoke):
    result = invoke("kernels", *words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
