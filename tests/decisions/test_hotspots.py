"""Where the time goes: causes are found, what is advised takes them away, programs that look alike are not told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from launch_programs import DEVICE, Program

from hlo_analysis import Analysis, Capture, analyze, capture
from hlo_analysis.hotspots import find_hotspots, timed
from hlo_analysis.measured import with_measured
from hlo_analysis.records import Device, Hotspot
from hlo_analysis.report.hotspots import listed
from hlo_analysis.targets import CPU_DEVICE
from hlo_analysis.targets.efficiency import EFFICIENCY
from xlafuse.catalogue import KERNELS
from xlafuse.measurements import load

RECORDINGS = Path(__file__).parents[2] / "scripts" / "public_models" / "recordings" / "h100"

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs XLA's CUDA compiler (extra 'deviceless')"
)


def _struct(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


_bf16, _f32, _s32 = (partial(_struct, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int32))


def lookup_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    return jax.vjp(lambda table: table[ids], table)[1](cotangent)[0]


def one_hot_gradient(table: Array, ids: Array, cotangent: Array) -> Array:
    return jax.vjp(lambda table: jax.nn.one_hot(ids, len(table), dtype=table.dtype) @ table, table)[1](cotangent)[0]


def product(x: Array, w: Array, precision: Any = None, wide: bool = False) -> Array:
    return jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32 if wide else None)


def widened_product(x: Array, w: Array) -> Array:
    return x.astype(jnp.float32) @ w.astype(jnp.float32)


def dropout(seed: Array, x: Array) -> Array:
    return jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.9, x.shape) * x


def dropout_of_bytes(seed: Array, x: Array) -> Array:
    words = jax.random.bits(jax.random.wrap_key_data(seed), (x.size // 4,), jnp.uint32)
    return (jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(x.shape) < 230) * x


def embedded_patches(images: Array, kernel: Array) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (16, 16), "VALID", dimension_numbers=numbers)


def multiplied_patches(x: Array, kernel: Array) -> Array:
    (n, h, w, c), p = x.shape, 16
    patches = x.reshape(n, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(n, (h // p) * (w // p), p * p * c)
    return patches @ kernel.reshape(p * p * c, -1)


def depthwise(x: Array, kernel: Array) -> Array:
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )


def shifted_sum(x: Array, kernel: Array) -> Array:
    return sum(x[:, tap : tap + x.shape[1] - 3] * kernel[tap, 0] for tap in range(4))  # pyright: ignore[reportReturnType]


def loss_gradient(x: Array, w: Array, labels: Array, *, is_picked_of: Callable[[Array], Array]) -> Array:
    def loss(w: Array) -> Array:
        logits = x @ w
        scores = is_picked_of(logits)
        picked = jnp.sum(jax.nn.one_hot(labels, w.shape[1]) * scores, -1)
        normalizer = jax.nn.logsumexp(logits, -1) if scores is logits else 0
        return jnp.mean(normalizer - picked).astype(jnp.float32)

    return jax.grad(loss)(w)


log_softmax_gradient = partial(loss_gradient, is_picked_of=jax.nn.log_softmax)
logsumexp_gradient = partial(loss_gradient, is_picked_of=lambda logits: logits)


def steps(state: Array, xs: Array, unroll: int = 1) -> Array:
    return jax.lax.scan(lambda state, x: (jnp.tanh(state * x), None), state, xs, unroll=unroll)[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program with a cause, the same as the advice has it, and words of both."""

    needs: Callable[..., Any]
    followed: Callable[..., Any]
    arguments: tuple[Any, ...]
    cause: str
    remedy: str
    least: float
    """The part of the time above need that following the advice saves at least, by the estimates."""


_LOOKUP = (_bf16(2, 1024), _s32(8192), _bf16(8192, 1024))
_SQUARE = (_f32(4096, 4096), _f32(4096, 4096))
_LOGITS = (_bf16(4096, 512), _bf16(512, 32768), _s32(4096))

CASES: Mapping[str, Case] = {
    "a lookup of two rows": Case(
        needs=lookup_gradient, followed=one_hot_gradient, arguments=_LOOKUP,
        cause="A scatter adds 8192 rows into 2", remedy="one_hot", least=0.02,
    ),
    "exact float32": Case(
        needs=partial(product, precision="highest"),
        followed=partial(product, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3), arguments=_SQUARE,
        cause="A float32 product of the highest precision", remedy="TF32_TF32_F32_X3", least=0.8,
    ),
    "widened operands": Case(
        needs=widened_product, followed=partial(product, wide=True), arguments=(_bf16(4096, 4096), _bf16(4096, 4096)),
        cause="A float32 product of bf16 values", remedy="preferred_element_type", least=0.8,
    ),
    "dropout": Case(
        needs=dropout, followed=dropout_of_bytes, arguments=(_struct(jnp.uint32, 2), _bf16(8192, 4096)),
        cause="Random numbers by threefry", remedy="four of each random word", least=0.5,
    ),
    "patches of three channels": Case(
        needs=embedded_patches, followed=multiplied_patches, arguments=(_bf16(64, 224, 224, 3), _bf16(16, 16, 3, 1024)),
        cause="A convolution of 3 channels", remedy="patches", least=0.8,
    ),
    "a depthwise convolution": Case(
        needs=depthwise, followed=shifted_sum, arguments=(_f32(4, 2051, 2048), _f32(4, 1, 2048)),
        cause="A convolution of each channel alone", remedy="shifted products", least=0.8,
    ),
    "a one-hot gradient": Case(
        needs=log_softmax_gradient, followed=logsumexp_gradient, arguments=_LOGITS,
        cause="The rows of a one-hot array of 4096 × 32768", remedy="logsumexp", least=0.8,
    ),
    "a loop of small steps": Case(
        needs=steps, followed=partial(steps, unroll=8), arguments=(_f32(64, 64), _f32(256, 64, 64)),
        cause="A loop of 256 iterations", remedy="unroll", least=0.5,
    ),
}  # fmt: skip


@cache
def _analysis(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Analysis:
    return analyze(capture(function, *arguments, target="h200"), catalogue=KERNELS)


def _of(analysis: Analysis, cause: str) -> Hotspot | None:
    return next((each for each in listed(analysis) if each.cause.startswith(cause)), None)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_takes_the_cause_away(name: str) -> None:
    case = CASES[name]
    before, after = (_analysis(function, case.arguments) for function in (case.needs, case.followed))
    found = _of(before, case.cause)
    assert found is not None
    assert case.remedy in found.remedy
    assert (found.source or "").startswith("test_hotspots.py:")
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
def test_a_mask_made_again_for_the_gradient_is_told_apart() -> None:
    def layer(w: Array, x: Array, seed: Array) -> Array:
        return dropout(seed, jax.nn.gelu(x @ w)) @ w.T

    def loss(w: Array, x: Array, seed: Array) -> Array:
        return (jax.checkpoint(layer)(w, x, seed).astype(jnp.float32) ** 2).sum()

    analysis = _analysis(jax.grad(loss), (_bf16(512, 2048), _bf16(8192, 512), _struct(jnp.uint32, 2)))
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

    lookup = (_bf16(2, 1024), _s32(2), _bf16(2, 1024))
    for function, arguments in ((unique, lookup), (assigned, lookup), (product, _SQUARE)):
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
    assert atomic.excess_us == 90.0


def test_few_blocks_are_a_cause_and_so_is_nothing_on_a_cpu() -> None:
    program = Program().launch("sum", {"x": 9}, 1, "reduction", grid=(4, 1, 1))
    device = replace(DEVICE, core_count=132)
    (found,) = _hotspots(program, device, estimated_us=100.0, needed_us=10.0)
    assert found.cause.endswith("in 4 blocks: 128 of the GPU's 132 multiprocessors have nothing to do")
    assert _hotspots(program, CPU_DEVICE) == ()
