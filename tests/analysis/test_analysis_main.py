"""`python -m hlo_analysis`."""

from __future__ import annotations

import pytest

from hlo_analysis import Analysis, from_json
from hlo_analysis.__main__ import main


def test_a_dump_prints_a_report(corpus, capsys):
    assert main([str(corpus["cublas_batch"].path)]) == 0
    assert "1 launch" in capsys.readouterr().out


def test_json_is_the_analysis(corpus, analyses, capsys):
    assert main([str(corpus["cublas_batch"].path), "--json"]) == 0
    assert from_json(Analysis, capsys.readouterr().out).launches == analyses["cublas_batch"].launches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-there"], "does not exist"),
        (["no.such.module:function"], "no module 'no'"),
        (["math:no_such"], "no_such"),
        (["math:pi"], "expected a function from PROGRAM math:pi, got float"),
        (["math:sin", "--shape", "q7[8]"], "unknown element type 'q7'"),
        (["math:sin", "--shape", "c128[8]"], "unless JAX_ENABLE_X64=1"),
        (["math:sin", "--shape", "(f32[8])"], "expected --shape as"),
        (["math:sin", "--option", "broken"], "expected --option NAME=VALUE"),
    ],
)
def test_bad_input_is_said_in_words(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_what_a_module_prints_does_not_stand_before_the_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "talks.py").write_text("print('hello')\ndef f(x): return x\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit('a script')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["talks:f", "--json"]) == 2  # f lacks its argument
    assert main(["leaves.py:f", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "hello" in err
    assert "a script" in err


def test_a_function_is_compiled(corpus, capsys):
    assert main(["jax.nn:gelu", "--shape", "bf16[256,512]", "--json"]) == 0
    analysis = from_json(Analysis, capsys.readouterr().out)
    assert [launch.bytes_read for launch in analysis.launches] == [256 * 512 * 2]
