"""`xlafuse report` with the compiling left out: what it writes, prints and refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from importlib import import_module
from pathlib import Path

import pytest

from hlo_analysis.records import Comparison
from hlo_analysis.schema import from_json
from tests.report.examples import llama_comparison
from xlafuse.errors import ComparisonError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # --fn puts the current folder on it


def test_it_prints_the_comparison_and_writes_both_files(invoke, compared, tmp_path: Path):
    result = invoke("report", "-o", "out")
    assert result.exit_code == 0
    assert "XLA makes 13 launches" in result.stdout.replace("\n", " ")
    assert "replayed 6 of 6" in result.stdout
    assert "wrote out/report.html" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]
    assert (tmp_path / "out/report.html").read_text().endswith("</html>\n")
    comparison = from_json(Comparison, (tmp_path / "out/report.json").read_text())
    assert comparison["xla"].analysis.launch_count == 13  # type: ignore[union-attr]
    assert compared[0]["program"] == "llama3-8b"
    assert compared[0]["shapes"] == (2, 4096)
    assert compared[0]["strategies"] is None


def test_options_reach_the_comparison(invoke, compared):
    words = [
        "--block",
        "tiny",
        "--shape",
        "3x64",
        "--mode",
        "grad",
        "--target",
        "h100",
        "--baseline",
        "unfused",
        "--no-numerics",
        "--timeout",
        "7",
    ]
    result = invoke("report", *words, "--strategies", "xla, pallas")
    assert result.exit_code == 0
    assert compared == [
        {
            "program": "tiny",
            "shapes": (3, 64),
            "mode": "grad",
            "target": "h100",
            "strategies": ("xla", "pallas"),
            "baseline": "unfused",
            "numerics": False,
            "tries": 0,
            "keep_captures": None,
            "timeout": 7.0,
            "layout": None,
        }
    ]


def test_a_block_on_a_mesh(invoke, compared):
    result = invoke("report", "--mesh", "data=2,tensor=2", "--parallel", "sp")
    assert result.exit_code == 0
    assert str(compared[0]["layout"]) == "sp, data=2,tensor=2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "data=2"], "go together"),
        (["--parallel", "tp"], "go together"),
        (["--mesh", "rows=2", "--parallel", "tp"], "mesh axis 'rows'"),
        (["--mesh", "data=2", "--parallel", "tp"], "the mesh axis 'tensor'"),
        (["--mesh", "data=2", "--parallel", "dp", "--fn", "math:sin"], "leave out --fn"),
    ],
)
def test_a_mesh_that_does_not_fit(words, message, invoke, compared):
    result = invoke("report", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not compared


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 5),
        (("--try", "0"), 0),
        (("--try", "2"), 2),
        (("--baseline", "unfused"), 0),  # its remedies are XLA as it comes
        (("--baseline", "unfused", "--try", "3"), 3),
    ],
)
def test_remedies_are_tried_on_xla_by_default(invoke, compared, words, count):
    assert invoke("report", "--target", "h200", *words).exit_code == 0
    assert compared[0]["tries"] == count


def test_a_redacted_report_has_no_names_of_the_program(invoke, compared, tmp_path: Path):
    assert invoke("report", "--block", "tiny", "--redact", "-o", "out").exit_code == 0
    assert "redacted program" in (tmp_path / "out/report.html").read_text()
    assert "tiny" not in (tmp_path / "out/report.json").read_text()


def test_the_page_is_there_before_remedies_are_tried(invoke, compared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    comparison = import_module("xlafuse.comparison")
    whole, seen = comparison.compare, []

    def compare(*given, ready, **options):
        ready(llama_comparison())
        seen.append((tmp_path / "out/report.html").read_text())
        return whole(*given, ready=ready, **options)

    monkeypatch.setattr(comparison, "compare", compare)
    result = invoke("report", "--redact", "-o", "out")
    assert result.exit_code == 0
    assert "report.html, without tried remedies" in result.stderr
    assert "redacted program" in seen[0]
    assert "xla: done after 0.0 s (1 of 10)" in result.stderr


def test_json_is_all_there_is_on_stdout(invoke, compared, tmp_path: Path):
    result = invoke("report", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["baseline"] == "xla"
    assert "xla: done after" in result.stderr
    assert "pallas: not applicable" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_module_prints_is_no_json(invoke, compared, tmp_path: Path):
    (tmp_path / "loud.py").write_text("print('hello')\ndef f(x): return x\n")
    result = invoke("report", "--json", "--fn", "loud.py:f", "--shape", "f32[4]")
    assert json.loads(result.stdout)["baseline"] == "xla"
    assert "hello" in result.stderr


def test_a_script_that_leaves_while_it_is_imported_is_told(invoke, compared, tmp_path: Path):
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    result = invoke("report", "--fn", "script.py:f", "--shape", "f32[4]")
    assert (result.exit_code, compared) == (2, [])
    assert "running script.py failed: SystemExit: 3" in result.stderr


def test_json_with_a_folder_writes_the_files_too(invoke, compared, tmp_path: Path):
    result = invoke("report", "--json", "-o", "out")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out/report.json").read_text())
    assert "wrote out/report.html" in result.stderr


def test_files_are_replaced_whole_and_readable_by_others(invoke, compared, tmp_path: Path):
    old = tmp_path / "out"
    old.mkdir()
    (old / "report.html").write_text("old")
    (old / "mine.txt").write_text("mine")
    assert invoke("report", "-o", "out").exit_code == 0
    assert (old / "report.html").read_text() != "old"
    assert (old / "mine.txt").read_text() == "mine"
    assert stat.S_IMODE((old / "report.html").stat().st_mode) & stat.S_IRUSR
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((old / "report.json").stat().st_mode) == 0o666 & ~umask


def test_without_words_it_prints_its_help(invoke, compared, tmp_path: Path):
    assert invoke("report").output.startswith("Usage: ")
    assert (compared, list(tmp_path.iterdir())) == ([], [])


def test_only_a_named_folder_is_overwritten(invoke, compared, tmp_path: Path):
    for number in (1, 2, 3):
        result = invoke("report", "--block", "tiny", "--shape", "1x8")
        assert f"wrote xlafuse-report{f'-{number}' * (number > 1)}/report.html" in result.stdout
    (tmp_path / "xlafuse-report-2/report.html").write_text("old")
    invoke("report", "--block", "tiny", "--shape", "1x8", "-o", "xlafuse-report-2")
    assert (tmp_path / "xlafuse-report-2/report.html").read_text() != "old"
    assert len(list(tmp_path.iterdir())) == 3


def test_an_output_folder_that_cannot_be_made_is_said_before_compiling(invoke, compared, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    result = invoke("report", "-o", "file/below/out")
    assert result.exit_code == 2
    assert result.stderr == "xlafuse: cannot write to the output folder file/below/out: Not a directory\n"
    assert compared == []


def test_nothing_stays_when_no_strategy_compiles(invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(*_, **__):
        raise ComparisonError({"xla": "CaptureError: XLA died", "pallas": "CaptureError: no ptxas"})

    monkeypatch.setattr(import_module("xlafuse.comparison"), "compare", fail)
    result = invoke("report", "-o", "new/out")
    assert result.exit_code == 1
    assert "xla: CaptureError: XLA died" in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_no_strategy_takes_is_bad_input(invoke, monkeypatch: pytest.MonkeyPatch):
    def fail(*_, progress, **__):
        for name, state in (("xla", "failed"), ("unfused", "failed"), ("pallas", "not applicable")):
            progress(name, state)
        alike = "CaptureError: f does not trace"
        raise ComparisonError({"xla": alike, "unfused": alike, "pallas": "'pallas' needs a block."})

    monkeypatch.setattr(import_module("xlafuse.comparison"), "compare", fail)
    result = invoke("report", "--json")
    assert result.exit_code == 2
    assert result.stderr.endswith("xlafuse: f does not trace\n")
    assert result.stderr.count("f does not trace") == 1
    assert "needs a block" not in result.stderr


def test_nothing_half_written_stays_when_the_disk_is_full(invoke, compared, tmp_path: Path, monkeypatch):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    result = invoke("report", "-o", "out")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_open_shows_the_page(invoke, compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert invoke("report", "--open").exit_code == 0
    assert opened == [(tmp_path / "xlafuse-report/report.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "h20"), "did you mean 'h200'"),
        (("--target", "mi300x"), "unknown target 'mi300x'"),
        (("--block", "llama3"), "did you mean 'llama3-8b'"),
        (("--strategies", "xla,palas"), "did you mean 'pallas'"),
        (("--baseline", "unfusd"), "did you mean 'unfused'"),
        (("--shape", "4096"), "expected one shape BATCHxLENGTH"),
        (("--shape", "0x4096"), "expected one shape BATCHxLENGTH"),
        (("--shape", "2x4096", "--shape", "2x4096"), "expected one shape BATCHxLENGTH"),
        (("--block", "tiny", "--fn", "a:b"), "expected --block or --fn, got both"),
        (("--args", "a:b"), "--args gives the arguments of --fn"),
        (("--timeout", "0"), "expected a --timeout above zero"),
        (("--timeout", "nan"), "expected a --timeout above zero"),
        (("--fn", "json"), "expected --fn package.module:name"),
        (("--fn", "nosuchmodule:f"), "no module 'nosuchmodule'"),
        (("--fn", "nosuchfile.py:f"), "no file nosuchfile.py"),
        (("--fn", "json:dumsp"), "no 'dumsp' in json; did you mean 'dump' or 'dumps'"),
        (("--fn", "json:dumps.nothing"), "no 'nothing' in dumps"),
        (("--fn", "jax.numpy:tanh", "--shape", "f64[4]"), "JAX makes float32 of it unless JAX_ENABLE_X64=1 is set"),
        (("--fn", "json:__name__"), "expected a function from --fn json:__name__, got str"),
        (("--fn", "jax.numpy:tanh", "--shape", "bf17[4]"), "unknown element type 'bf17' in 'bf17[4]'; did you mean"),
        (("--fn", "jax.numpy:tanh", "--shape", "4x4"), "expected --shape as 'bf16[8192,4096]'"),
        (("--fn", "jax.numpy:tanh", "--shape", "f32[4,-1]"), "expected whole numbers"),
        (("--fn", "jax.nn:glu"), "cannot be called with 0 arguments: missing a required argument: 'x'"),
    ],
)
def test_bad_input_is_one_line_with_the_nearest_names(invoke, compared, tmp_path: Path, words, said):
    result = invoke("report", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("xlafuse: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert compared == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--mode", "backward"),
        ("report", "--try", "-1"),
        ("report", "--try", "x"),
        ("report", "--blok", "tiny"),
        ("reprot",),
    ],
)
def test_usage_errors_exit_with_two(invoke, words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_file_that_names_function_and_arguments_is_run_once(invoke, compared, tmp_path: Path):
    """What it keeps in a global, as the graph of an NNX module, and its classes are those of both."""
    (tmp_path / "once.py").write_text(
        "import jax\n"
        "kept = []\n"
        "def step(x): return x * kept[0]\n"
        "def given(): kept.append(2); return (jax.ShapeDtypeStruct((4,), 'float32'),)\n"
    )
    assert invoke("report", "--fn", "once.py:step", "--args", "once.py:given").exit_code == 0
    program = compared[0]["program"]
    assert program(3) == 6


def test_any_function_can_be_reported(invoke, compared, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import jax\n"
        "class Net:\n"
        "    @staticmethod\n"
        "    def loss(tree, y): return tree['a'] @ y\n"
        "def given(): return {'a': jax.ShapeDtypeStruct((4, 4), 'float32')}, jax.ShapeDtypeStruct((4,), 'float32')\n"
    )
    assert invoke("report", "--fn", "mine.py:Net.loss", "--args", "mine.py:given").exit_code == 0
    tree, y = compared[0]["shapes"]
    assert (tree["a"].shape, y.shape, compared[0]["program"].__name__) == ((4, 4), (4,), "loss")
    assert {"xla", "unfused"} <= set(compared[0]["strategies"])
    assert not {"pallas", "best"} & set(compared[0]["strategies"])  # they are a block's
    result = invoke("report", "--fn", "jax.numpy:matmul", "--shape", "bf16[8, 4]", "--shape", "s4[4,2]")
    assert result.exit_code == 0
    first, second = compared[1]["shapes"]
    assert (first.shape, str(first.dtype), second.shape, str(second.dtype)) == ((8, 4), "bfloat16", (4, 2), "int4")


def test_options_are_one_strategy_more(invoke, compared):
    options = ("--option", "xla_gpu_enable_triton_gemm=False", "--option", "--xla_gpu_dot_merger_threshold_mb=1024")
    result = invoke("report", "--block", "tiny", "--shape", "1x8", "--strategies", "xla", *options)
    assert result.exit_code == 0, result.stderr
    plain, added = compared[0]["strategies"]
    assert (plain.name, added.name) == ("xla", "xla_options")
    assert added.compiler_options == {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": "1024"}
    result = invoke("report", "--option", "xla_gpu_enable_triton_gemm")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "expected --option NAME=VALUE" in result.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--strategies", "xla,xla_gemm_v2"), "xla_gemm_v2"),
        (("--strategies", "xla", "--option", "xla_gpu_no_such=1"), "xla_options"),
    ],
)
def test_a_strategy_asked_for_without_an_analysis_is_an_error(invoke, monkeypatch, tmp_path: Path, words, name):
    def compare(*_, progress, **__):
        progress(name, "failed")
        made = llama_comparison()
        failed = dataclasses.replace(made.strategies[-1], name=name, error="XLA has no compiler option 'x'")
        return dataclasses.replace(made, strategies=(*made.strategies[:-1], failed))

    monkeypatch.setattr(import_module("xlafuse.comparison"), "compare", compare)
    result = invoke("report", *words, "-o", "out")
    assert result.exit_code == 1
    assert result.stderr.endswith(f"xlafuse: {name} has no analysis: XLA has no compiler option 'x'\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]


def test_a_strategy_that_does_not_apply_is_an_error_only_where_it_was_asked_for(invoke, compared):
    assert invoke("report", "--target", "h200").exit_code == 0
    assert invoke("report", "--strategies", "xla,xla_gemm_v2").exit_code == 1


def test_keyword_arguments_need_a_function_around(invoke, compared, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def f(x, *, y): return x + y\n")
    result = invoke("report", "--fn", "mine.py:f", "--shape", "f32[8]")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Name a function that gives y by keyword" in result.stderr


def test_a_module_that_fails_on_import_is_cli_errors(invoke, tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    result = invoke("report", "--fn", "broken.py:f")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "running broken.py failed: RuntimeError: first line (broken.py:1, in <module>: raise" in result.stderr


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one saved capture, in two places."""
    import jax
    import jax.numpy as jnp

    from hlo_analysis.capture import capture

    folder = tmp_path_factory.mktemp("captures")
    made = capture(jnp.tanh, jax.ShapeDtypeStruct((64,), "float32"), target="cpu")
    for name in ("old", "new"):
        (folder / name).mkdir()
        made.save(folder / name / "f.zip")
    return folder


def test_saved_captures_are_compared_without_compiling(invoke, compared, captures: Path, tmp_path: Path):
    result = invoke("report", "--capture", captures / "old/f.zip", "--capture", captures / "new/f.zip", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert compared == []
    comparison = from_json(Comparison, (tmp_path / "out/report.json").read_text())
    assert [strategy.name for strategy in comparison.strategies] == ["old/f", "new/f"]
    assert comparison.baseline == "old/f"
    assert comparison["new/f"].analysis.launch_count == 1  # type: ignore[union-attr]
    result = invoke("report", "--capture", captures / "old/f.zip", "--module", "jit_other")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--module names one of the modules in a folder that xla_dump_to wrote; f holds one program" in result.stderr


def test_the_module_of_a_dump_is_named_and_can_be_chosen(invoke, tmp_path: Path):
    dump = tmp_path / "dump"
    dump.mkdir()
    for number, (name, size) in enumerate({"jit_step": 64, "jit_init": 8}.items()):
        text = (
            f"HloModule {name}\n\nENTRY main {{\n  p = f32[{size}] parameter(0)\n  ROOT n = f32[{size}] negate(p)\n}}\n"
        )
        (dump / f"module_000{number}.{name}.cpu_after_optimizations.txt").write_text(text)
    for words, said in (((), "module_0000.jit_step, the largest"), (("--module", "jit_init"), "jit_init, asked for")):
        result = invoke("report", "--capture", dump, *words, "-o", "out")
        assert result.exit_code == 0, result.stderr
        assert said in " ".join(result.stdout.split())
    result = invoke("report", "--capture", dump, "--module", "jit_nothing")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "it has jit_step, jit_init" in result.stderr
    (dump / "module_0002.jit_init.cpu_after_optimizations.txt").write_text("HloModule jit_init")
    result = invoke("report", "--capture", dump, "--module", "jit_nothing")
    assert "it has jit_step, module_0001.jit_init, module_0002.jit_init" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--module", "jit_f"), "--module names one of the modules in a --capture"),
        (("--capture", "nosuch"), "nosuch does not exist"),
        (("--capture", "out/report.json"), "out/report.json is a report already"),
        (("--capture", "."), "xla_dump_to"),
        (("--capture", "a.zip", "--capture", "a.zip"), "the same --capture twice"),
        (("--capture", "a.zip", "--baseline", "b"), "expected --baseline to be one of the captures a, got 'b'"),
        (("--capture", "a.zip", "--block", "tiny", "--shape", "1x8"), "--block, --shape cannot change it"),
        (("--capture", "a.zip", "--try", "2"), "--try compiles the program again, and a --capture has none to compile"),
        (("--capture", "a.zip", "--target", "b200", "--mode", "grad"), "--target, --mode cannot change it"),
    ],
)
def test_bad_captures_are_one_line(invoke, compared, tmp_path: Path, words, said):
    result = invoke("report", *words, "-o", "out")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
