"""The benchmark without a GPU: what it computes, checks and records, with invented kernel times."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import get_op, testing
from pallas_kernels.specs import plain
from xlafuse.bench import kernels, peers, timing
from xlafuse.bench.candidates import check_close
from xlafuse.bench.environment import environment
from xlafuse.bench.kernels import (
    NoGpuError,
    bench_operation,
    bench_shape,
    check_match,
    is_wanted,
    require_gpu,
)
from xlafuse.bench.results import Results, Run, rivals
from xlafuse.bench.settings import Settings
from xlafuse.bench.tables import overview
from xlafuse.bench.text import result_lines
from xlafuse.bench.timing import Candidate
from xlafuse.errors import UnknownNameError

SETTINGS = Settings(rounds=1, calls=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(kernels, "buffer_sets", lambda _: 1)


@pytest.mark.usefixtures("interpreter", "invented_times")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_shape_is_checked_and_timed(phase, spec):
    result = bench_shape(get_op("rms_norm"), spec, phase, SETTINGS)
    assert result.problems == ()
    arrays = {"forward": "2 read 2 written", "backward": "3 read 1 written"}[phase]
    assert [c.name for c in result.candidates] == ["copy", f"elementwise, {arrays}", "xla", "mosaic"]
    assert [c.kind for c in result.candidates] == ["ceiling", "ceiling", "implementation", "implementation"]
    assert result.bytes == 4 * 4 * 256 * 2
    assert result.chosen == "mosaic"
    assert result.gigabytes_per_second("mosaic") == pytest.approx(result.bytes / 3e-6 / 1e9)
    assert result.ceiling_share("mosaic") == result.speed_up("mosaic", "xla") == 1


@pytest.mark.usefixtures("invented_times")
def test_what_cannot_run_here_is_unsupported_and_the_others_go_on(spec):
    result = bench_shape(get_op("rms_norm"), spec, "forward", SETTINGS)
    (problem,) = result.problems
    assert (problem.candidate, problem.kind) == ("mosaic", "unsupported")
    assert result.chosen == "xla"


@pytest.mark.usefixtures("invented_times")
def test_a_variant_that_is_wrong_is_reported_and_not_timed(spec):
    def twice(**arguments):
        return tuple(2 * value for value in pallas_kernels.rms_norm(**plain(arguments)))

    variants = MappingProxyType({"twice": twice})
    op = dataclasses.replace(get_op("rms_norm"), implementations=("xla",), variants=lambda *_: variants)
    result = bench_shape(op, spec, "forward", dataclasses.replace(SETTINGS, variants=True))
    assert result.of_kind("variant") == ()
    (problem,) = result.problems
    assert problem.candidate == "variant: twice"
    assert "output 0 is off by 1 of its norm" in problem.message


@pytest.mark.usefixtures("invented_times")
def test_a_peer_is_checked_timed_and_may_fail(spec, monkeypatch):
    def named(outputs):
        return {f"output {i}": output for i, output in enumerate(outputs)}

    class Half:
        @staticmethod
        def candidate(operation, phase, cases):
            assert (operation, phase) == ("rms_norm", "forward")
            call = jax.jit(lambda a: tuple(v / 2 for v in pallas_kernels.rms_norm(**plain(a), implementation="xla")))
            inputs = [(case.arguments,) for case in cases]
            return Candidate(name="half", kind="peer", call=call, inputs=inputs), named(call(*inputs[0]))

    class Right:
        @staticmethod
        def candidate(operation, phase, cases):
            call = jax.jit(lambda a: pallas_kernels.rms_norm(**plain(a), implementation="xla"))
            inputs = [(case.arguments,) for case in cases]
            return Candidate(name="right", kind="peer", call=call, inputs=inputs), named(call(*inputs[0]))

    def load(name):
        if name == "missing":
            raise ImportError("No module named 'torch'")
        return {"half": Half, "right": Right}[name]

    monkeypatch.setattr(peers, "load", load)
    settings = dataclasses.replace(SETTINGS, peers=("half", "right", "missing"))
    result = bench_shape(get_op("rms_norm"), spec, "forward", settings)
    assert [c.name for c in result.of_kind("peer")] == ["right"]
    messages = {problem.candidate: problem.message for problem in result.problems}
    assert "off by 0.5 of its norm" in messages["half"]
    assert messages["missing"] == "ImportError: No module named 'torch'"


@pytest.mark.usefixtures("invented_times")
def test_integer_weights_have_16_bit_ones_beside_them():
    op = get_op("quantized_linear")
    spec = next(spec for spec in op.tagged("test") if spec.name.startswith("66-"))
    result = bench_shape(op, spec, "forward", dataclasses.replace(SETTINGS, peers=("xla_bf16",)))
    assert [c.name for c in result.of_kind("peer")] == ["xla_bf16"]


@pytest.mark.usefixtures("interpreter", "invented_times")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_jax_triton_is_the_operations_own_triton_kernel(phase, spec):
    """Timed in turns with ours where the peer is asked for, and a column of lines and table."""
    op = get_op("rms_norm")
    asked = []

    def function(*, implementation, **arguments):
        asked.append(implementation)
        return op.function(**arguments, implementation="xla" if implementation == "triton" else implementation)

    def backward(implementation, arguments, cotangents):
        asked.append(implementation)
        return op.backward("xla" if implementation == "triton" else implementation, arguments, cotangents)

    stand_in = dataclasses.replace(op, function=function, backward=backward)
    result = bench_shape(stand_in, spec, phase, dataclasses.replace(SETTINGS, peers=("jax_triton",)))
    assert result.problems == ()
    assert [c.name for c in result.of_kind("implementation")] == ["xla", "mosaic", "triton"]
    assert rivals(result) == ("triton",)
    assert any(line.split()[0] == "triton" for line in result_lines(result)[1:])
    run = Run(started="2026-01-01T00:00", environment=environment(), settings={}, shapes=(result,))
    assert "× jax-triton" in overview(Results(runs=(dataclasses.replace(run, shapes=(big(result),)),)))
    asked.clear()
    bench_shape(stand_in, spec, phase, SETTINGS)
    assert "triton" not in asked


def big(result):
    """As if it had moved a gigabyte: small calls have no columns of peers."""
    return dataclasses.replace(result, bytes=10**9)


def test_xla_failing_is_a_problem_of_the_shape(spec):
    def fail(**_):
        raise RuntimeError("out of memory")

    op = dataclasses.replace(get_op("rms_norm"), function=fail)
    result = bench_shape(op, spec, "forward", SETTINGS)
    assert result.candidates == ()
    assert result.problems[0].message == "RuntimeError: out of memory"
    assert result.chosen is None


@pytest.mark.usefixtures("invented_times")
def test_time_runs_out_between_shapes(spec):
    op = dataclasses.replace(get_op("rms_norm"), arg_specs=(spec, dataclasses.replace(spec, name="other")))
    results = list(bench_operation(op, dataclasses.replace(SETTINGS, seconds=0.0, phases=("forward",))))
    assert results == [
        "rms_norm forward 4x256: not begun within 0 s",
        "rms_norm forward other: not begun within 0 s",
    ]
    matches = {"other": ["other"], "8x8,oth": ["other"], "4x,other": ["4x256", "other"], "=4x,=other": ["other"]}
    for match, found in matches.items():
        results = list(bench_operation(op, dataclasses.replace(SETTINGS, match=match, phases=("forward",))))
        assert [result.spec for result in results if not isinstance(result, str)] == found


def test_shapes_are_named_as_specs_and_as_tables_have_them():
    spec = "4x4096x4096x32x8x64-bfloat16-causal"
    for match in ("", "=4x4096x4096x32x8x64-bf16-causal", f"={spec}", "x64-bf16", "bfloat16-causal", "no,bf16"):
        assert is_wanted(spec, match), match
    for match in ("=4x4096x4096x32x8x64-bf16", "x64-f32", "=", "causal-bf16"):
        assert not is_wanted(spec, match), match
    check_match(["rms_norm", "attention"], "=4x4096x4096x32x8x64-bf16")
    with pytest.raises(UnknownNameError, match="did you mean '4x4096x4096x32x8x64-bf16'"):
        check_match(["attention"], "=4x4096x4096x32x8x64-bf61")


def test_backward_alone_is_the_gradient():
    op = get_op("bias_activation")
    case = testing.make_case(op, op.tagged("test")[0], 3)
    dx, dbias = op.backward("xla", plain(case.arguments), case.cotangents)
    expected = testing.gradient(case, "xla")
    assert (dx == expected["gradient of x"]).all()
    assert (dbias == expected["gradient of bias"]).all()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "dropout_residual_norm"])
def test_norms_start_from_the_same_saved_statistics(name):
    op = get_op(name)
    case = testing.make_case(op, op.tagged("test")[0], 3)
    got, expected = (op.backward(each, plain(case.arguments), case.cotangents) for each in ("mosaic", "xla"))
    assert len(got) == len(expected)
    check_close(got, expected)


def test_close_is_about_norms_and_not_numbers_never_pass():
    one = jnp.ones(1000)
    check_close((one.at[0].set(1.1),), (one,))
    with pytest.raises(AssertionError, match="output 0"):
        check_close((one.at[0].set(jnp.nan),), (one,))
    with pytest.raises(AssertionError, match=r"off by 0\.03"):
        check_close((one * 1.03,), (one,))


def test_without_a_gpu_it_says_so():
    with pytest.raises(NoGpuError, match="attached NVIDIA GPU, and JAX sees only 'cpu'"):
        require_gpu()


def test_unknown_peer_has_a_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'liger'"):
        peers.load("liga")


def test_small_calls_rotate_past_the_cache():
    assert timing.buffer_sets(1 << 22) * (1 << 22) > 2 * timing.L2_CACHE_BYTES
    assert timing.buffer_sets(1 << 10) == 64
    assert timing.buffer_sets(1 << 30) == 2
