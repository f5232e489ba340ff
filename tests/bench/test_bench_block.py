"""The block benchmark without a GPU: what it computes, checks and records, with invented kernel times."""

from __future__ import annotations

import dataclasses
import math

import imitation_torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.bench import block
from xlafuse.bench.block import bench_block, bench_case, case_maker
from xlafuse.bench.block_tables import block_details, block_overview
from xlafuse.bench.candidates import check_close
from xlafuse.bench.environment import environment
from xlafuse.bench.results import Measured, Results, Run
from xlafuse.bench.settings import BlockSettings
from xlafuse.bench.text import result_lines, summary
from xlafuse.models import BlockConfig, block_function, get_preset
from xlafuse.strategies import get_strategy

SETTINGS = BlockSettings(preset="tiny", strategies=("xla", "pallas"), rounds=1, calls=2)
SMALL = BlockConfig(
    name="small", hidden_size=16, mlp_size=24, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32",
    param_dtype="float32",
)  # fmt: skip
GPT = dataclasses.replace(
    SMALL, num_kv_heads=4, norm="layer_norm", mlp="gelu", rope_theta=None, use_bias=True, is_causal=False
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(block, "buffer_sets", lambda _: 1)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter", "invented_times")
def test_strategies_are_checked_and_timed():
    config = dataclasses.replace(get_preset("tiny"), hidden_size=128, mlp_size=128)
    result = bench_case(config, "1x8", "forward", dataclasses.replace(SETTINGS, strategies=("best",)))
    assert (result.op, result.phase, result.spec, result.problems) == ("tiny", "forward", "1x8", ())
    assert [(c.name, c.kind) for c in result.candidates] == [("xla", "strategy"), ("best", "strategy")]
    assert result.speed_up("best", "xla") == 1
    weights = sum(leaf.size for leaf in jax.tree.leaves(block_function(config, (1, 8))[1][0]))
    assert result.bytes == 2 * (weights + 2 * 8 * 128)
    assert block.perfect_bytes(config, (1, 8), "grad") == 2 * result.bytes


@pytest.mark.usefixtures("invented_times")
def test_what_cannot_run_here_is_unsupported_and_a_wrong_one_failed(monkeypatch):
    right = block.program

    def program(strategy, *rest):
        made = right(strategy, *rest)
        if strategy.name == "xla_cublas":
            return lambda *case: jax.tree.map(lambda leaf: leaf * 1.2, made(*case))
        return made

    monkeypatch.setattr(block, "program", program)
    settings = dataclasses.replace(SETTINGS, strategies=("pallas", "xla_cublas"))
    (result,) = bench_block("forward 1x4", settings)
    assert [c.name for c in result.candidates] == ["xla"]
    (missing, wrong) = result.problems
    assert (missing.candidate, missing.kind) == ("pallas", "unsupported")
    assert "Hopper" in missing.message
    assert (wrong.candidate, wrong.kind) == ("xla_cublas", "failed")
    assert "output 0 is off by 0.20" in wrong.message


@pytest.mark.usefixtures("invented_times")
def test_others_are_timed_where_xla_runs_out_of_memory(monkeypatch):
    right = block.program

    def program(strategy, *rest):
        if strategy.name == "xla":
            raise MemoryError("out of memory")
        return right(strategy, *rest)

    monkeypatch.setattr(block, "program", program)
    settings = dataclasses.replace(SETTINGS, strategies=("xla_cublas", "pallas"))
    (result,) = bench_block("grad 1x4", settings)
    assert [c.name for c in result.candidates] == ["xla_cublas"]
    assert [problem.candidate for problem in result.problems] == ["xla", "pallas"]
    without = Results(runs=(Run(started="", environment=environment(), settings=settings, shapes=(result,)),))
    assert "tiny" in summary(without)[0]
    failed = dataclasses.replace(result, candidates=())
    assert summary(Results(runs=(dataclasses.replace(without.runs[0], shapes=(failed,)),)))


def test_fused_is_the_rewritten_program():
    target = load_target("h200")
    config, shape = get_preset("llama3-8b"), (1, 512)
    case = jax.eval_shape(case_maker(config, shape, "grad"), jax.random.key(0))

    def traced(name):
        with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
            return str(jax.make_jaxpr(block.program(get_strategy(name), config, shape, "grad"))(*case))

    assert "qkv_projection" in traced("fused")
    assert "mosaic" not in traced("xla")


def test_no_case_begins_when_the_time_is_up():
    assert list(bench_block("forward 1x4", dataclasses.replace(SETTINGS, until=0.0))) == [
        "tiny forward 1x4: not begun, the time was up"
    ]


def test_arrays_of_rounding_alone_are_held_to_the_largest():
    large, noise = jnp.ones(4), 1e-5 * jnp.ones(4)
    limits = {"smallest": block._SMALLEST, "tolerance": block.TOLERANCE}
    check_close([large, -noise], [large, noise], **limits)
    with pytest.raises(AssertionError, match=r"output 1 is off by 9\.99"):
        check_close([large, 0.02 * large], [large, noise], **limits)
    with pytest.raises(AssertionError, match="off by nan"):
        check_close([large * math.nan], [large], **limits)
    with pytest.raises(AssertionError, match="1 arrays, expected 2"):
        check_close([large], [large, large], **limits)


def test_flops_are_those_of_unmasked_work():
    """Llama 3 8B: 218.1 million weights in matrices, 32 heads of 128."""
    config = get_preset("llama3-8b")
    rows, matrices = 2 * 4096, 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    attended = 2 * 4096 * 4097 // 2 * 32 * 128 * 4
    assert block.flops(config, (2, 4096), "forward") == 2 * rows * matrices + attended
    assert block.flops(config, (2, 4096), "grad") == 3 * (2 * rows * matrices + attended)
    full = dataclasses.replace(config, is_causal=False)
    assert block.flops(full, (1, 1), "forward") == 2 * matrices + 4 * 32 * 128
    # Mixtral's tokens go through two of eight such MLPs.
    routed = 4096 * (8 + 3 * 14336)
    assert block.flops(get_preset("mixtral-8x7b"), (2, 4096), "forward") == 2 * rows * (matrices + routed) + attended


@pytest.mark.parametrize(("peer", "config"), [("torch_eager", SMALL), ("torch_compile", GPT)])
def test_pytorchs_block_is_ours(peer, config, monkeypatch):
    imitation_torch.install(monkeypatch)
    from xlafuse.bench.peers import torch_block

    cases = list(map(case_maker(config, (2, 5), "forward"), jax.random.split(jax.random.key(1))))
    candidate, (y,) = torch_block.candidate(peer, config, "forward", cases)
    assert (candidate.name, candidate.kind, len(candidate.inputs)) == (peer, "peer", 2)
    expected = jax.jit(block_function(config, (2, 5))[0])(*cases[0])
    np.testing.assert_allclose(y, expected, atol=2e-4)
    assert np.abs(np.asarray(candidate.call(*candidate.inputs[1])[0]) - np.asarray(expected)).max() > 0.1


@pytest.mark.usefixtures("invented_times")
def test_a_peers_gradients_come_in_our_order_and_wrong_ones_are_reported(monkeypatch):
    imitation_torch.install(monkeypatch)
    from xlafuse.bench.peers import torch_block

    case = case_maker(SMALL, (1, 4), "grad")(jax.random.key(0))
    _, results = torch_block.candidate("torch_eager", SMALL, "grad", [case])
    ours = jax.tree.leaves(jax.eval_shape(block.program(block.get_strategy("xla"), SMALL, (1, 4), "grad"), *case))
    assert [each.shape for each in results] == [each.shape for each in ours]
    settings = dataclasses.replace(SETTINGS, strategies=(), peers=("torch_eager",))
    result = bench_case(SMALL, "1x4", "grad", settings)
    assert [c.name for c in result.candidates] == ["xla"]
    assert result.problems[0].candidate == "torch_eager"  # the imitation's gradients are all 2
    assert "is off by" in result.problems[0].message


@pytest.fixture
def kept() -> Results:
    def case(mode, spec, **times):
        candidates = [
            Measured(
                name=name,
                kind="strategy",
                timing=block_timing(us),
            )
            for name, us in times.items()
        ]
        return block.ShapeResult(
            op="llama3-8b", phase=mode, spec=spec, bytes=436_224_000, ceiling=None, candidates=tuple(candidates)
        )

    shapes = (
        case("grad", "2x4096", xla=20000.0, pallas=16000.0),
        case("forward", "2x4096", xla=6000.0, pallas=4000.0, torch_compile=5000.0),
        case("forward", "1x1", xla=130.0, pallas=104.0),
    )
    run = Run(started="2026-01-01T00:00", environment=environment(), settings={}, shapes=shapes, left_out=("late",))
    return Results(runs=(run,))


def block_timing(us):
    from xlafuse.bench.timing import Timing

    return Timing(median_us=us, p20_us=us, p80_us=us, wall_us=us + 10, kernels=("k",) * 3, samples=4)


def test_lines_have_times_and_rates(kept):
    title, xla, pallas, _ = result_lines(kept.shapes[1])
    assert title == " forward llama3-8b 2x4096"
    assert " ".join(xla.split()) == "xla 6000.00 µs ×1.000 641 TF/s 3 launches, wall 6010.0 µs"
    assert "×1.500" in pallas
    assert "| **4000** |" in summary(kept)[0]
    assert summary(kept)[-1] == "left out: late"


def test_table_has_a_row_a_case_and_the_fastest_is_bold(kept):
    table, details = block_overview(kept), block_details(kept)
    assert "| block | batch × length |  | `xla` | `pallas` | torch.compile |" in table
    assert "| llama3-8b | 2 × 4096 | forward | 6000 | **4000** | 5000 |" in table
    assert "| llama3-8b | 1 × 1 | forward | 130.0 | **104.0** | – |" in table
    assert "| llama3-8b | 2 × 4096 | forward + backward | 20000 | **16000** | – |" in table
    assert "| 140.0, 3356 GB/s, 3 | 114.0, 4194 GB/s, 3 |" in details
    assert "| 6010, 641 TF/s, 3 | 4010, 962 TF/s, 3 |" in details


def test_what_was_not_measured_is_told(kept):
    problem = block.Problem(candidate="xla_cudnn", message="ValueError: one\ntoken", kind="failed")
    shape = dataclasses.replace(kept.shapes[2], problems=(problem,))
    told = block_details(dataclasses.replace(kept, runs=(dataclasses.replace(kept.runs[0], shapes=(shape,)),)))
    assert told.endswith("Not measured:\n\n- forward llama3-8b 1x1, xla_cudnn: ValueError: one token")
