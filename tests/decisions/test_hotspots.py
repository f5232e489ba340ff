"""Where the time goes: causes are found, what is advised takes them away, programs that look alike are not told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from advised import ADVISED, dropout, product
from jax import Array
from launch_programs import DEVICE, Program

from hlo_analysis import Analysis, Capture, analyze, capture
from hlo_analysis.hotspots import find_hotspots, timed
from hlo_analysis.measured import with_measured
from hlo_analysis.records import Device, Hotspot
from hlo_analysis.report.advice import listed
from hlo_analysis.targets import CPU_DEVICE
from hlo_analysis.targets.efficiency import EFFICIENCY
from xlafuse.catalogue import KERNELS
from xlafuse.measurements import load

RECORDINGS = Path(__file__).parents[2] / "scripts" / "public_models" / "recordings" / "h100"

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs XLA's CUDA compiler (extra 'deviceless')"
)


_bf16, _f32, _s32 = (
    lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int32)
)


@cache
def _analysis(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Analysis:
    return analyze(capture(function, *arguments, target="h200"), catalogue=KERNELS)


def _of(analysis: Analysis, cause: str) -> Hotspot | None:
    return next((each for each in listed(analysis) if each.cause.startswith(cause)), None)


@pytest.mark.drawn(1 / 3)
@needs_compiler
@pytest.mark.parametrize("name", ADVISED)
def test_what_is_advised_takes_the_cause_away(name: str) -> None:
    case = ADVISED[name]
    before, after = (_analysis(function, case.sizes[0]) for function in (case.needs, case.followed))
    found = _of(before, case.cause)
    assert found is not None
    assert case.remedy in found.remedy
    assert (found.source or "").startswith("advised.py:")
    assert before.estimated_us - after.estimated_us >= case.least * found.excess_us
    same = _of(after, case.cause)
    assert same is None or same.excess_us < 0.6 * found.excess_us


@needs_compiler
def test_rows_that_start_anywhere_are_told_and_a_padded_size_is_not() -> None:
    odd = _analysis(product, (_bf16(4096, 50257), _bf16(50257, 1024)))
    (found,) = listed(odd)
    assert found.cause.startswith("Rows of 50257 elements are multiplied")
    assert "50304" in found.remedy
    assert found.excess_us < found.time_us
    assert listed(_analysis(product, (_bf16(4096, 50304), _bf16(50304, 1024)))) == ()


@needs_compiler
def test_bytes_of_random_words_are_not_advised_where_memory_takes_the_time() -> None:
    for size, is_advised in ((0, True), (2, False)):  # 16 and 32 bits, measured on an H100
        captured = capture(dropout, *ADVISED["dropout"].sizes[size], target="h100")
        found = _of(analyze(captured, catalogue=KERNELS), "Random numbers by threefry")
        assert ("four of each random word" in (found.remedy if found else "")) is is_advised


@needs_compiler
def test_a_mask_made_again_for_the_gradient_is_told_apart() -> None:
    def layer(w: Array, x: Array, seed: Array) -> Array:
        return dropout(seed, jax.nn.gelu(x @ w)) @ w.T

    def loss(w: Array, x: Array, seed: Array) -> Array:
        return (jax.checkpoint(layer)(w, x, seed).astype(jnp.float32) ** 2).sum()

    analysis = _analysis(jax.grad(loss), (_bf16(512, 2048), _bf16(8192, 512), jax.ShapeDtypeStruct((2,), jnp.uint32)))
    again, once = (
        _of(analysis, f"Random numbers by threefry, about 100 integer operations each{more}")
        for more in (", made again", "")
    )
    assert again is not None
    assert "jax.checkpoint" in again.remedy
    assert once is not None


@needs_compiler
def test_programs_that_look_alike_are_not_told() -> None:
    def unique(table: Array, ids: Array, rows: Array) -> Array:
        return table.at[ids].add(rows, unique_indices=True)

    def assigned(table: Array, ids: Array, rows: Array) -> Array:
        return table.at[ids].set(rows)

    def looked_up(table: Array, ids: Array) -> Array:  # so few rows that their gradient is faster by a product
        return jax.nn.one_hot(ids, len(table), dtype=table.dtype) @ table

    lookup = (_bf16(2, 1024), _s32(2), _bf16(2, 1024))
    few = _analysis(looked_up, (_bf16(512, 1024), _s32(8192)))
    assert _of(few, "A product with a one-hot matrix") is None
    for function, arguments in ((unique, lookup), (assigned, lookup), (product, (_f32(4096, 4096), _f32(4096, 4096)))):
        found = [each.cause for each in listed(_analysis(function, arguments)) if not each.missed]
        assert found == [], function


@needs_compiler
def test_a_sort_needs_one_pass_and_a_call_to_python_an_unknown_time() -> None:
    def program(x: Array) -> Array:
        jax.debug.print("{}", x[0, 0])
        return jnp.sort(x, -1)

    analysis = _analysis(program, (_f32(256, 20000),))
    call, sort = listed(analysis)[:2]
    assert call.waits_for_host
    assert "jax.debug.print" in call.remedy
    passes = len(sort.launches)
    assert sort.cause == f"A sort in {passes} passes over all of it"
    assert sort.excess_us == pytest.approx(sort.time_us - sort.needed_us)
    assert 0 < sort.needed_us < 2 * sort.time_us / passes


@cache
def _recorded(name: str) -> Analysis:
    captured = Capture.load(RECORDINGS / f"{name}.zip")
    captured.manifest = replace(captured.manifest, device=replace(captured.manifest.device, efficiency=EFFICIENCY))
    analysis = analyze(captured, catalogue=KERNELS)
    if any(launch.measured_us for launch in analysis.launches):
        return analysis
    return with_measured(analysis, load(RECORDINGS / f"{name}.json").strategies["xla"])


def _estimated(analysis: Analysis) -> tuple[Hotspot, ...]:
    launches = tuple(replace(launch, measured_us=None) for launch in analysis.launches)
    return timed(analysis.hotspots, launches, analysis.missed)


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("bert-step", ("A scatter adds 8192 rows into 2", "Rows of 30522 elements", "Products of query, key")),
        ("gpt2-step", ("Rows of 50257 elements", "Products of query, key", "A product and the cross-entropy")),
        ("gru-step", ("A loop of 128 iterations", "A loop of 128 iterations")),
        ("haiku_lm-step", ("Products of query, key",)),
    ],
)
def test_the_first_hotspots_of_a_model_are_those_that_a_gpu_measured(name: str, causes: tuple[str, ...]) -> None:
    analysis = _recorded(name)
    for found in (analysis.hotspots, _estimated(analysis)):
        first = [each.cause for each in found[:3]]
        assert all(any(said.startswith(cause) for said in first) for cause in causes), first
    keys = [{(each.launches, each.missed) for each in found[:5]} for found in (analysis.hotspots, _estimated(analysis))]
    assert len(keys[0] & keys[1]) >= 4
    assert {each.how for each in analysis.hotspots[:3]} == {"measured"}


def test_each_launch_and_each_missed_fusion_counts_once() -> None:
    analysis = _recorded("bert-step")
    counted = sorted(chain.from_iterable(each.launches for each in analysis.hotspots))
    assert counted == list(range(len(analysis.launches)))
    ranks = sorted(chain.from_iterable(each.missed for each in analysis.hotspots))
    assert ranks == list(range(1, len(analysis.missed) + 1))
    assert all(0 <= each.excess_us <= each.time_us for each in analysis.hotspots)


def _scatter(element_type: str) -> str:
    dimensions = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}"
    return f"""%table = {element_type}[2,1024] parameter(0)
%ids = s32[8192,1] parameter(1)
%rows = {element_type}[8192,1024] parameter(2)
ROOT %s = {element_type}[2,1024] scatter(%table, %ids, %rows), {dimensions}, index_vector_dim=1,\
 to_apply=%add, metadata={{op_name="jit(f)/scatter-add"}}"""


def _hotspots(program: Program, device: Device = DEVICE, **times: float) -> tuple[Hotspot, ...]:
    launches = [replace(launch, **times) for launch in program.launches]  # pyright: ignore[reportArgumentType]
    return find_hotspots(launches, (), device)


def test_a_scatter_has_a_range_where_its_indices_must_repeat() -> None:
    program = Program().launch("s", {"t": 1, "i": 1, "r": 1}, 1, "scatter", hlo=_scatter("bf16"))
    (found,) = _hotspots(program, estimated_us=100.0, needed_us=10.0, longest_us=53100.0)
    assert found.most_us == 53100.0
    assert 100 < found.time_us < (found.most_us or 0)
    assert "up to 53.1 ms" in found.cause
    (measured,) = _hotspots(program, estimated_us=100.0, needed_us=10.0, longest_us=53100.0, measured_us=700.0)
    assert (measured.time_us, measured.excess_us, measured.how) == (700.0, 690.0, "measured")
    program = Program().launch("s", {"t": 1, "i": 1, "r": 1}, 1, "scatter", hlo=_scatter("f32"))
    (atomic,) = _hotspots(program, estimated_us=100.0, needed_us=10.0)
    assert atomic.most_us is None
    (spread,) = _hotspots(program, estimated_us=100.0, needed_us=10.0, longest_us=300.0)
    assert "up to 300 µs if all fall into one" in spread.cause
    assert atomic.excess_us == 90.0


def test_few_blocks_are_a_cause_and_so_is_nothing_on_a_cpu() -> None:
    program = Program().launch("sum", {"x": 9}, 1, "reduction", grid=(4, 1, 1))
    device = replace(DEVICE, core_count=132)
    (found,) = _hotspots(program, device, estimated_us=100.0, needed_us=10.0)
    assert found.cause.endswith("in 4 blocks: 128 of the GPU's 132 multiprocessors have nothing to do")
    assert _hotspots(program, CPU_DEVICE) == ()


def test_collectives_that_nothing_hides_have_options_to_try() -> None:
    fields = {"limiter": "link", "estimated_us": 50.0, "exposed_us": 40.0, "needed_us": 10.0, "axes": (("data", 4),)}
    program = Program().launch("one", {"a": 1}, 4, "collective", opcodes=("all-gather",), **fields)
    program.launch("joined", {"b": 1, "c": 1}, 4, "collective", opcodes=("reduce-scatter",), **fields)
    one, joined = sorted(find_hotspots(program.launches, (), DEVICE), key=lambda each: each.launches)
    assert one.cause == "An all-gather over the mesh axis 'data', which other work does not hide"
    assert one.options == (("xla_gpu_enable_analytical_latency_estimator", "True"),)
    assert joined.cause.startswith("A reduce-scatter over the mesh axis 'data' of 2 arrays that XLA joined")
    assert joined.options == (("xla_gpu_reduce_scatter_combine_threshold_bytes", "0"),)
    assert (one.excess_us, joined.excess_us) == (40.0, 40.0)
