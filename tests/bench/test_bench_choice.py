"""The benchmark of the choice without a GPU: what it draws, checks, records and says, with invented kernel times."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from test_bench_results import H200, measured, results, shape
from typer.testing import CliRunner

import pallas_kernels
from pallas_kernels import REGISTRY, get_op, testing
from pallas_kernels.specs import plain
from xlafuse.bench import choice, random_calls, supervisor
from xlafuse.bench.candidates import callable_of, check_close, inputs_of
from xlafuse.bench.choice import bench_call, bench_choice, drawn
from xlafuse.bench.random_calls import Limits, random_call
from xlafuse.bench.results import Problem, Run, load
from xlafuse.bench.settings import MODES, ChoiceSettings
from xlafuse.bench.text import result_lines, summary
from xlafuse.cli import app

SETTINGS = ChoiceSettings(rounds=1, calls=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(choice, "buffer_sets", lambda _: 1)


@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_a_seed_draws_the_same_calls_within_the_limits(op):
    calls = [drawn(op, 3, number) for number in range(8)]
    assert calls == [drawn(op, 3, number) for number in range(8)]
    assert all(choice.TIMED.allow(op, call) for call in calls)
    others = [drawn(op, 4, number) for number in range(8)]
    assert not {str(call.arguments) for call in calls} & {str(call.arguments) for call in others}
    assert len({call.name for call in calls}) == 8


def test_a_seed_draws_the_same_calls_on_any_machine():
    query, key = "query=3x3456x12x64-bfloat16", "key=3x56x12x64-bfloat16"
    assert drawn(REGISTRY["attention"], 0, 1).name == f"0.1 {query}-{key}-value{key[3:]}"


def test_limits_that_leave_nothing_are_told(monkeypatch):
    monkeypatch.setattr(random_calls, "_DRAWS", 3)
    with pytest.raises(ValueError, match="none of 3 drawn calls of linear is within"):
        random_call(REGISTRY["linear"], 0, Limits(length=8, rows=8, columns=64, flops=(1e12, math.inf)))


def with_stand_ins(wrong, fails=None):
    """rms_norm, whose Mosaic and Triton kernels are XLA's program; twice its values for the implementation `wrong`."""
    op = get_op("rms_norm")

    def function(*, implementation=None, **arguments):
        if implementation == fails is not None:
            raise RuntimeError("out of memory")
        known = None if implementation is None else "xla"
        outputs = op.function(**arguments, implementation=known)
        return jax.tree.map(lambda array: 2 * array, outputs) if implementation == wrong else outputs

    return dataclasses.replace(op, function=function)


@pytest.mark.usefixtures("invented_times")
@pytest.mark.parametrize("mode", MODES)
def test_what_none_takes_is_timed_beside_all_that_can_be_named(mode, spec):
    result = bench_call(with_stand_ins(wrong="nothing"), spec, mode, SETTINGS)
    names = ["xla", "mosaic", "triton", "None: xla"]
    assert [c.name for c in result.candidates] == names
    assert [c.kind for c in result.candidates] == ["implementation"] * 3 + ["default"]
    assert result.problems == ()
    assert (result.op, result.phase, result.spec) == ("rms_norm", mode, "4x256")
    assert choice.is_measured(result)
    assert choice.ratio(result) == 1
    assert result.bytes == (4 if mode == "forward" else 8) * 4 * 256 * 2


def test_the_outputs_and_all_gradients_are_compared(spec):
    op = get_op("rms_norm")
    case = testing.make_case(op, spec, 0)
    function = callable_of(op, "grad", None)
    outputs = function(*inputs_of(case, "grad"))
    assert "optimization_barrier" in str(
        jax.make_jaxpr(lambda x: function({**case.arguments, "x": x}, case.cotangents))(case.arguments["x"])
    )
    expected = {**testing.forward(case, "xla"), **testing.gradient(case, "xla")}
    assert len(outputs) == 5
    for array, name in zip(outputs, expected, strict=True):
        assert (array == expected[name]).all(), name


def test_what_is_but_rounding_is_held_to_the_largest():
    large, nothing = jnp.ones(100), jnp.zeros(50)
    check_close((large, nothing + 3e-5), (large, nothing), smallest=2e-3)
    with pytest.raises(AssertionError, match=r"output 1 is off by 0\.025 of its norm from cudnn's"):
        check_close((large, nothing + 5e-5), (large, nothing), of="cudnn", smallest=2e-3)
    with pytest.raises(AssertionError, match="output 1"):
        check_close((large, nothing + 3e-5), (large, nothing))


@pytest.mark.usefixtures("invented_times")
def test_what_cannot_run_here_is_named_and_the_others_go_on(spec):
    op = get_op("rms_norm")
    result = bench_call(op, spec, "forward", SETTINGS)
    made = pallas_kernels.choice(op.function, **plain(spec.structs()))
    assert (made.taken, tuple(made.reasons)) == ("xla", ("mosaic", "triton", "xla"))
    assert [c.name for c in result.candidates] == ["xla", "None: xla"]
    assert {p.candidate: p.kind for p in result.problems} == {"mosaic": "unsupported", "triton": "unsupported"}
    assert choice.is_measured(result)


@pytest.mark.usefixtures("invented_times")
@pytest.mark.parametrize("wrong", ["mosaic", None])
def test_a_wrong_implementation_is_a_problem_and_not_timed(wrong, spec):
    result = bench_call(with_stand_ins(wrong, fails="triton"), spec, "forward", SETTINGS)
    name = wrong or "None: xla"
    assert name not in [c.name for c in result.candidates]
    assert {p.candidate: p.kind for p in result.problems} == {"triton": "failed", name: "failed"}
    assert "output 0 is off by 1 of its norm from xla's" in result.problems[-1 if wrong is None else 0].message
    assert not choice.is_measured(result)
    assert not choice.is_kept(results(result))


@pytest.mark.usefixtures("interpreter", "invented_times")
def test_xla_is_no_rival_where_it_takes_much_memory(monkeypatch, spec):
    monkeypatch.setattr(choice, "_MOST_TEMPORARY_BYTES", -1)
    result = bench_call(get_op("rms_norm"), spec, "forward", SETTINGS)
    assert [c.name for c in result.candidates] == ["mosaic", "None: mosaic"]
    assert [(p.candidate, p.kind) for p in result.problems] == [("xla", "unsupported"), ("triton", "unsupported")]
    assert "temporary buffers" in result.problems[0].message


def test_a_call_whose_arrays_cannot_be_made_is_a_problem(spec, monkeypatch):
    monkeypatch.setattr(choice, "copies", lambda *_: 1 / 0)
    result = bench_call(get_op("rms_norm"), spec, "forward", SETTINGS)
    assert [p.message for p in result.problems] == ["ZeroDivisionError: division by zero"]
    assert not choice.is_measured(result)


def test_modes_of_a_call_and_the_time(monkeypatch):
    monkeypatch.setattr(choice, "bench_call", lambda op, call, mode, *_: f"{op.name} {mode} {call.name[:4]}")
    assert list(bench_choice("linear 7", ChoiceSettings(seed=2))) == ["linear forward 2.7 ", "linear grad 2.7 "]
    assert list(bench_choice("decode_attention 0", ChoiceSettings())) == ["decode_attention forward 0.0 "]
    (late,) = bench_choice("linear 7", ChoiceSettings(until=0.0, modes=("grad",)))
    assert late == f"linear grad {drawn(REGISTRY['linear'], 0, 7).name}: not begun, the time was up"


def test_calls_are_compiled_ahead_in_batches_and_timed_as_they_are(monkeypatch, spec):
    settings, items = ChoiceSettings(jobs=2), [f"linear {n}" for n in range(9)] + ["decode_attention 0"]
    begun: list[str] = []

    def compiled(op, call, mode, seed):
        begun.append(call.name)
        return {"xla": f"{op.name} {call.name[:3]} {mode}"}

    monkeypatch.setattr(choice, "compiled", compiled)
    ahead = choice.compile_ahead(items, settings)
    assert next(ahead) == {mode: {"xla": f"linear 0.0 {mode}"} for mode in MODES}
    assert len(begun) == 2 * 2 * choice._AHEAD
    *_, ninth, last = ahead
    assert (ninth["grad"], last) == (
        {"xla": "linear 0.8 grad"},
        {"forward": {"xla": "decode_attention 0.0 forward"}},
    )
    assert list(choice.compile_ahead(items, ChoiceSettings())) == [{}] * 10
    assert list(choice.compile_ahead(items, dataclasses.replace(settings, until=0.0))) == [{}] * 10
    assert len(begun) == 19
    result = bench_call(get_op("rms_norm"), spec, "forward", SETTINGS, None, {"xla": RuntimeError("no memory")})
    assert [(p.candidate, p.message) for p in result.problems] == [("xla", "RuntimeError: no memory")]


def call(none: float, mosaic: float, xla: float, **more):
    """A result with such times in microseconds."""
    candidates = (
        measured("xla", "implementation", xla),
        measured("mosaic", "implementation", mosaic),
        measured("None: mosaic", "default", none),
    )
    return shape(**{"spec": "0.3 x=8x8-bfloat16", "candidates": candidates, "ceiling": None, **more})


def test_a_call_s_title_has_the_ratio():
    title, *lines = result_lines(call(10.0, 10.1, 9.0))
    assert title == " forward rms_norm 0.3 x=8x8-bf16; best / None 0.900 !!"
    assert [line.split("  ")[3] for line in lines] == ["xla", "mosaic", "None: mosaic"]
    title, *_ = result_lines(call(10.0, 10.1, 20.0, is_steady=False))
    assert title == " forward rms_norm 0.3 x=8x8-bf16; best / None 1.010; not steady"


@pytest.mark.parametrize(
    ("ours", "theirs", "behind"), [(10.0, 9.0, True), (1.4, 1.0, False), (100.0, 98.0, False), (20.0, 19.4, True)]
)
def test_behind_is_both_3_percent_and_half_a_microsecond(ours, theirs, behind):
    assert choice.is_behind(call(ours, ours, theirs)) == behind


def test_the_summary_has_the_least_ratio_and_all_below_the_bar():
    kept, slow = call(10.0, 9.81, 20.0), call(10.0, 10.0, 9.0, spec="0.4")
    assert choice.is_kept(results(kept))
    assert summary(results(kept)) == [
        "rms_norm forward: 1 calls, best / None at least 0.981, mean 0.981",
        "1 of 1 calls measured, 0 more than 3 % and 0.5 µs behind the fastest, the least ratio 0.981, their mean 0.981",
    ]
    assert not choice.is_kept(results(kept, slow))
    assert summary(results(kept, slow))[1:] == [
        *result_lines(slow),
        "2 of 2 calls measured, 1 more than 3 % and 0.5 µs behind the fastest, the least ratio 0.900, their mean 0.940",
    ]
    broken = call(1.0, 1.0, 1.0, candidates=(), problems=(Problem(candidate="None", message="no memory"),))
    assert not choice.is_kept(results(kept, broken))
    assert summary(results(kept, broken, left_out=("linear 3: died",)))[1:] == [
        " forward rms_norm 0.3 x=8x8-bf16; not measured",
        "      failed: None: no memory",
        "1 of 2 calls measured, 0 more than 3 % and 0.5 µs behind the fastest, the least ratio 0.981, their mean 0.981",
        "left out: linear 3: died",
    ]
    assert not choice.is_kept(results(kept, left_out=("linear 3: died",)))


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs `xlafuse bench choice` with calls that take such times; returns what it wrote."""

    def run(*words, times=None):
        def measured(measure, benchmark, items, settings, stall, keep):
            assert benchmark == "choice"
            shapes = [
                call(*times[int(item.split()[1])], op=item.split()[0], phase=mode, spec=f"{settings.seed}.{item[-1]}")
                for item in items
                for mode in settings.modes
            ]
            return Run(started="", environment=H200, settings={}, shapes=tuple(shapes)), None

        if times is not None:
            monkeypatch.setattr(supervisor, "_measured", measured)
        return CliRunner().invoke(app, ["bench", "choice", "-o", str(tmp_path / "out.json"), *words])

    return run


def test_the_command_writes_what_it_measured_and_exits_by_the_bar(invoke, tmp_path):
    times = [(10.0, 10.0, 20.0), (10.0, 9.0, 20.0)]
    done = invoke("--op", "linear", "--count", "1", "--seed", "5", "--modes", "forward", times=times)
    assert done.exit_code == 0, done.output
    (run,) = load(tmp_path / "out.json").runs
    assert [result.key for result in run.shapes] == [("linear", "5.0", "forward")]
    assert choice.ratio(run.shapes[0]) == 1
    done = invoke("--op", "linear", "--op", "rope", "--count", "2", "--seconds", "9", times=times)
    assert done.exit_code == 1, done.output
    assert "rope grad: 2 calls, best / None at least 0.900" in done.output
    assert "8 of 8 calls measured, 4 more than 3 % and 0.5 µs behind the fastest, the least ratio 0.900" in done.output
    assert len(load(tmp_path / "out.json").shapes) == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "measures on an attached NVIDIA GPU, and JAX sees only 'cpu' here"),
        (("--op", "liner"), "unknown operation 'liner'; did you mean 'linear'"),
        (("--modes", "backward"), "unknown mode 'backward'"),
    ],
)
def test_bad_input_and_no_gpu_are_told(invoke, words, told):
    done = invoke(*words)
    assert done.exit_code == 2
    assert told in done.stderr


def test_without_a_gpu_nothing_is_measured(invoke, tmp_path):
    assert invoke("--op", "linear").exit_code == 2
    assert not (tmp_path / "out.json").exists()
