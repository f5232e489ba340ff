"""Strategies side by side: what is compiled, what is refused, and what a failure costs the others."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from test_replay import assert_kernels_save_launches_and_traffic

from hlo_analysis.errors import UnknownTargetError
from hlo_analysis.records import Comparison, Numerics
from hlo_analysis.saved import load
from xlafuse.comparison import compare
from xlafuse.errors import ComparisonError, UnknownNameError
from xlafuse.models import get_preset
from xlafuse.strategies import Strategy, resolve_strategies

SITES = ("attention_norm", "qkv_projection", "output_projection", "mlp_norm", "gate_up_projection", "down_projection")
ROWS = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)

STRATEGIES = [each.name for each in resolve_strategies(None)]


def softmax(x):
    with jax.named_scope("softmax"):
        return jax.nn.softmax(x, axis=-1)


@pytest.fixture(scope="module")
def block() -> Comparison:
    """What `make report` compares; REPORT names its file where it has run, as in `.ci/run`: 70 s of CPU time."""
    if file := os.environ.get("REPORT"):
        loaded = load(file)
        assert isinstance(loaded, Comparison)
        return loaded
    return compare("llama3-8b", (2, 4096), strategies=STRATEGIES)


@pytest.mark.slow
class TestBlock:
    def test_every_strategy_compiles_the_block_for_the_h200(self, block):
        assert sorted(strategy.name for strategy in block.strategies) == sorted(STRATEGIES)
        assert {strategy.error for strategy in block.strategies} == {None}
        assert block.title == "llama3-8b block, 2x4096, forward, h200"
        assert block.baseline == "xla"

    def test_strategies_do_what_they_say(self, block):
        kinds = {strategy.name: strategy.analysis.launches_by_kind for strategy in block.strategies}
        counts = {name: sum(kind.values()) for name, kind in kinds.items()}
        assert counts["unfused"] > 3 * counts["xla"]
        assert "triton_gemm" not in kinds["unfused"] | kinds["xla_cublas"]
        assert kinds["xla_cudnn"]["cudnn"] == 1
        assert kinds["pallas"] == {"mosaic": 7, "loop": 1}  # in eight launches; the loop fills in rope's angles
        assert kinds["pallas_cudnn"] == {"mosaic": 6, "cudnn": 1, "loop": 1}
        assert kinds["best"] == kinds["pallas"]
        assert not any("mosaic" in kind or "cudnn" in kind for name, kind in kinds.items() if name == "xla")

    def test_fusion_saves_traffic(self, block):
        traffic = {strategy.name: strategy.analysis.traffic.bytes for strategy in block.strategies}
        assert traffic["unfused"] > 1.3 * traffic["xla"]
        # The scores of attention never reach HBM.
        assert traffic["xla_cudnn"] < traffic["xla"]

    def test_kernels_save_launches_and_traffic(self, block):
        assert_kernels_save_launches_and_traffic({each.name: each.analysis for each in block.strategies})

    def test_no_operation_is_fused_with_another_when_unfused(self, block):
        analysis = block["unfused"].analysis
        several = {
            launch.name: launch.opcodes
            for launch in analysis.launches
            if launch.kind not in ("cublas", "cublaslt") and sum(count for _, count in launch.opcodes) > 1
        }
        # Only a reduction holds a second operation, the one that it reduces with.
        assert several == {}

    def test_launches_align_by_site(self, block):
        kinds = {}
        for row in block.rows:
            for cell in row.cells:
                launches = block[cell.strategy].analysis.launches
                for site in (*SITES, "attention", "activation"):
                    if f"block/{site}" == row.scope or row.scope.startswith(f"block/{site}/"):
                        kinds.setdefault((cell.strategy, site), []).extend(launches[i].kind for i in cell.launches)
        for site in SITES:
            angles = ["loop"] if site == "qkv_projection" else []
            assert kinds["pallas_cudnn", site] == [*angles, "mosaic"]
        for taken_in in ("rope", "activation"):
            assert not kinds.get(("pallas_cudnn", taken_in))
        assert kinds["xla", "attention_norm"] == ["loop", "triton"]
        assert "cudnn" in kinds["xla_cudnn", "attention"]
        # `fuse` takes the residual sum into that product, and the launch is named after the sum.
        assert all(kinds[name, "down_projection"] for name in STRATEGIES if name != "fused")

    def test_numerics_are_of_the_plan(self, block):
        found = {strategy.name: strategy.numerics for strategy in block.strategies}
        unchecked = ("xla_cudnn", "pallas_cudnn", "fused")
        assert all(isinstance(each, Numerics) and each.passed for name, each in found.items() if name not in unchecked)
        assert {found[name] for name in unchecked} == {None}
        assert "cuDNN attention runs on a GPU only" in block["xla_cudnn"].description
        assert "interpret mode" in found["pallas"].note
        assert found["unfused"].error == found["xla"].baseline_error


@pytest.mark.slow
def test_best_leaves_small_products_to_xla():
    told: list[tuple[str, str]] = []
    comparison = compare("tiny", (2, 128), strategies=["best"], progress=lambda name, state: told.append((name, state)))
    # Our kernels' tiles would leave most of the GPU idle: they are norms, rope, attention and activation.
    kinds = comparison["best"].analysis.launches_by_kind
    assert kinds.get("mosaic", 0) + kinds.get("cudnn", 0) == 5
    assert ("", "numerics") in told
    for name in ("xla", "best"):
        assert [state for each, state in told if each == name] == ["compiling", "analysing", "done"]


def test_any_function_can_be_compared():
    comparison = compare(softmax, (ROWS,), strategies=["xla", "unfused", "pallas"], mode="grad")
    assert comparison.title == "softmax, grad, h200"
    assert comparison["unfused"].analysis.launch_count > comparison["xla"].analysis.launch_count
    assert comparison["pallas"].analysis is None
    assert "a plain function has no such sites" in comparison["pallas"].error
    assert comparison["xla"].numerics is None
    assert {(row.scope, row.phase) for row in comparison.rows} >= {("softmax", "backward")}


def test_what_xla_puts_in_is_not_of_our_own_source():
    """A copy of what travels round a ring of devices bears the frames around the call of the function alone."""
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    def travels(x):
        def step(_, state):
            total, part = state
            return total + part, jax.lax.ppermute(part, "d", [(i, (i + 1) % 8) for i in range(8)])

        return jax.lax.fori_loop(0, 8, step, (x, x))[0]

    analysis = compare(travels, (jax.ShapeDtypeStruct((4096, 1024), "float32"),), strategies=["xla"])["xla"].analysis
    assert any(launch.kind == "copy" and launch.op_name for launch in analysis.launches)
    assert {launch.source.partition(":")[0] for launch in analysis.launches if launch.source} == {"test_compare.py"}


def test_one_failure_leaves_the_others_their_result():
    told = []
    broken = Strategy(name="broken", description="An option misspelt.", compiler_options={"xla_gpu_no_such_thing": 1})
    comparison = compare(
        softmax,
        (ROWS,),
        strategies=[broken],
        progress=lambda name, state: told.append((name, state)),
    )
    # The baseline comes along, asked for or not.
    assert [strategy.name for strategy in comparison.strategies] == ["xla", "broken"]
    assert comparison["broken"].analysis is None
    assert "xla_gpu_no_such_thing" in comparison["broken"].error
    assert comparison["xla"].analysis.launch_count >= 1
    assert ("broken", "failed") in told
    assert ("xla", "done") in told


def test_another_strategy_stands_in_for_a_baseline_that_failed():
    broken = Strategy(name="broken", description="An option misspelt.", compiler_options={"xla_gpu_no_such_thing": 1})
    comparison = compare(softmax, (ROWS,), strategies=[broken, "xla"], baseline="broken")
    assert comparison.baseline == "xla"


def test_a_function_that_does_not_trace_fails_once_for_all():
    def wrong(x):
        return x @ x

    with pytest.raises(ComparisonError, match=r"xla, xla_cublas: .*wrong could not be traced") as caught:
        compare(wrong, (ROWS,), strategies=["xla", "xla_cublas"])
    assert set(caught.value.reasons) == {"xla", "xla_cublas"}


def test_a_function_fails_for_the_same_reason_with_and_without_fuse():
    def decides(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(ComparisonError, match=r"xla, fused: .*decides could not be traced") as caught:
        compare(decides, (ROWS,), strategies=["xla", "fused"])
    assert len(set(caught.value.reasons.values())) == 1


def test_a_lone_array_is_one_argument():
    comparison = compare(softmax, ROWS, strategies=["xla"])
    assert comparison["xla"].analysis.provenance.arguments == ("x: bf16[256,512]",)


@pytest.mark.slow
def test_what_cudnn_cannot_do_is_said_in_its_own_words():
    comparison = compare("tiny", (1, 1), strategies=["xla", "xla_cudnn"], mode="grad", numerics=False)
    assert comparison["xla_cudnn"].error == "InapplicablePlanError: Unsupported sequence length Q 1, KV 1."
    assert comparison["xla"].analysis.launch_count > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("tinny", (1, 8)), UnknownNameError, "unknown preset 'tinny'; did you mean 'tiny'"),
        (("tiny", (8,)), ValueError, r"\(batch, length\)"),
        (("tiny", "1x8"), ValueError, r"\(batch, length\)"),
    ],
)
def test_bad_blocks_are_refused_before_anything_is_compiled(arguments, error, message):
    with pytest.raises(error, match=message):
        compare(*arguments, progress=lambda name, state: pytest.fail("something was compiled"))


def test_bad_names_are_refused_before_anything_is_compiled():
    def fail(name, state):
        pytest.fail("something was compiled")

    with pytest.raises(UnknownNameError, match="unknown strategy 'xlaa'"):
        compare("tiny", (1, 8), strategies=["xlaa"], progress=fail)
    with pytest.raises(UnknownNameError, match="unknown strategy 'base'"):
        compare("tiny", (1, 8), baseline="base", progress=fail)
    with pytest.raises(UnknownTargetError, match="h2000"):
        compare("tiny", (1, 8), target="h2000", progress=fail)


def test_config_may_be_given_in_place_of_a_name():
    comparison = compare(get_preset("tiny"), (1, 8), strategies=["xla"], target="cpu", numerics=False)
    assert comparison.title == "tiny block, 1x8, forward, cpu"
    assert comparison["xla"].analysis.launch_count > 0
