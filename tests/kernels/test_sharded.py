"""Devices that share an operation's work compute what one device does, with XLA's collectives."""

from __future__ import annotations

import functools
import random
import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlo_analysis.targets import load_target
from pallas_kernels import (
    KernelWarning,
    Norm,
    Rope,
    attention,
    gated_linear,
    linear,
    qkv_projection,
    recorded_choices,
    rms_norm,
    testing,
)
from pallas_kernels.primitives import shared_call
from pallas_kernels.primitives.dimensions import Dimensions, rule_of
from pallas_kernels.registry import REGISTRY

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=H200)
SIZES = ((40, 64), (64, 128), (40, 128))
"""Of x, weights and residual."""
SHARED = [op for op in REGISTRY.values() if hasattr(op.function, "dimensions")]


@pytest.fixture(scope="module")
def cpus() -> Mesh:
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs four simulated CPU devices; run this folder by itself")
    return Mesh(np.array(devices[:4]).reshape(2, 2), ("d", "t"))


def at_random(mesh: Mesh, rng: random.Random, leaf: Any) -> NamedSharding:
    """A sharding that cuts dimensions of even sizes over some of the axes."""
    entries: list[str | None] = [None] * leaf.ndim
    for axis in mesh.axis_names:
        places = [place for place, size in enumerate(leaf.shape) if size and size % 2 == 0 and entries[place] is None]
        if places and rng.random() < 0.8:
            entries[rng.choice(places)] = axis
    return NamedSharding(mesh, P(*entries))


def run_in_parts(function: Any, arguments: Any, shardings: Any) -> tuple[Any, int]:
    """Traces for an H200, so that kernels are chosen, and runs on CPUs, where the parts take XLA.

    Returns the results and the number of calls whose work is shared.
    """
    with jax.sharding.use_abstract_mesh(ONE):
        lowered = jax.jit(lambda *args: function(*args), in_shardings=shardings).trace(*arguments).lower()
    count = lowered.as_text().count("CustomSPMDPartitioning")
    return lowered.compile()(*jax.device_put(arguments, shardings)), count


def check_in_parts(op: Any, spec: Any, mesh: Mesh, seed: int) -> int:
    counts: list[int] = []

    def draw(drawn: int) -> list[testing.ErrorReport]:
        case, rng = testing.make_case(op, spec, drawn), random.Random(seed)
        arguments = (dict(case.arguments), case.cotangents)
        shardings = jax.tree.map(lambda leaf: at_random(mesh, rng, leaf), arguments)
        found, count = run_in_parts(testing.program(op, ("mosaic", "xla")), arguments, shardings)
        counts.append(count)
        return testing.reports(case, jax.device_get(found))

    testing.assert_draws_within(draw, seed, f"{op.name} {spec.name}, cut at random by the first seed,")
    return counts[0]


@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")  # some of these shardings are gathered
@pytest.mark.parametrize("name", ["rms_norm", "linear", "cross_entropy", "qkv_projection"])
def test_parts_compute_what_one_device_does(name, cpus, seed):
    op = REGISTRY[name]
    assert check_in_parts(op, op.tagged("test")[0], cpus, seed) >= 2


@pytest.mark.slow
@pytest.mark.drawn(1 / 20)
@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")  # and dropout by a key is left to XLA
@pytest.mark.parametrize(
    ("op", "spec"), [(op, spec) for op in SHARED for spec in op.tagged("test")], ids=lambda each: each.name
)
def test_parts_of_all_arguments_compute_what_one_device_does(op, spec, cpus, seed):
    check_in_parts(op, spec, cpus, seed)


@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")
def test_a_sum_over_devices_of_which_each_keeps_columns(cpus):
    x, w, residual = (jnp.asarray(np.arange(n * m).reshape(n, m) % 7 - 3.0, jnp.float16) for n, m in SIZES)
    shardings = tuple(NamedSharding(cpus, spec) for spec in (P(None, "d"), P("d", None), P(None, "d")))

    def function(x, w, residual):
        y = linear(x, w, residual=residual, implementation=("mosaic", "xla"))
        return jax.lax.with_sharding_constraint(y, shardings[2])

    found, count = run_in_parts(function, (x, w, residual), shardings)
    assert count == 1
    np.testing.assert_array_equal(found, x @ w + residual)


def layer(x, weights, implementation=None) -> Any:
    """A Llama layer."""
    given: dict[str, Any] = {} if implementation is None else {"implementation": implementation}
    norm, rope = Norm(scale=weights["norm"]), Rope(positions=jnp.arange(x.shape[1]))
    heads = [weights[name] for name in ("query", "key", "value")]
    query, key, value = qkv_projection(x, *heads, head_size=128, norm=norm, rope=rope, **given)
    out: Any = attention(query, key, value, is_causal=True, **given)
    x = linear(jnp.reshape(out, x.shape), weights["out"], residual=x, **given)
    normed: Any = rms_norm(x, weights["norm_2"], **given)
    wide = gated_linear(normed, weights["gate"], weights["up"], **given)
    return linear(wide, weights["down"], residual=x, **given)


FEATURES, HIDDEN = 1024, 4096
WIDENING = {"query": FEATURES, "key": 512, "value": 512, "gate": HIDDEN, "up": HIDDEN}
NARROWING = {"out": FEATURES, "down": HIDDEN}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a layer is spread. rows: of x; widening, narrowing: of the weights (features, outputs)."""

    shape: dict[str, int]
    rows: str | None
    widening: tuple[str | None, str | None]
    narrowing: tuple[str | None, str | None]


PARALLEL = {
    "data": Parallel(shape={"d": 4}, rows="d", widening=(None, None), narrowing=(None, None)),
    "fully sharded": Parallel(shape={"d": 4}, rows="d", widening=("d", None), narrowing=("d", None)),
    "tensor": Parallel(shape={"t": 4}, rows=None, widening=(None, "t"), narrowing=("t", None)),
    "fully sharded, tensor": Parallel(shape={"d": 2, "t": 2}, rows="d", widening=("d", "t"), narrowing=("t", "d")),
}


def layer_structs(parallel: Parallel, devices: Any, tokens: int = 1024) -> tuple[Any, Any]:
    mesh = Mesh(np.array(devices).reshape(tuple(parallel.shape.values())), tuple(parallel.shape))

    def struct(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    weights = {name: struct((FEATURES, size), *parallel.widening) for name, size in WIDENING.items()}
    weights |= {name: struct((size, FEATURES), *parallel.narrowing) for name, size in NARROWING.items()}
    weights |= {name: struct((FEATURES,)) for name in ("norm", "norm_2")}
    return struct((4, tokens, FEATURES), parallel.rows), weights


def gradient(function):
    def run(x, weights):
        y, pullback = jax.vjp(function, x, weights)
        return y, pullback(y)

    return run


def collective_bytes(text: str) -> tuple[dict[str, float], int]:
    """Megabytes of the results of each kind of collective, and the number of kernels."""
    megabytes: Counter[str] = Counter()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for result, kind, is_start in re.findall(rf"= (\S.*?) ({kinds})(-start)?\(", text):
        arrays = re.findall(r"(bf16|f32)\[([\d,]*)\]", result)
        arrays = arrays[len(arrays) // 2 :] if is_start and len(arrays) > 1 else arrays
        sizes = [np.prod([int(size) for size in shape.split(",") if size]) for _, shape in arrays]
        itemsizes = [2 if dtype == "bf16" else 4 for dtype, _ in arrays]
        megabytes[kind] += np.dot(sizes, itemsizes) / 1e6
    # To 0.1 MB: a norm scale's gradient may be summed in float32, apart from others.
    return {kind: round(float(size), 1) for kind, size in megabytes.items()}, text.count(
        'custom_call_target="mosaic_gpu'
    )


@pytest.fixture(scope="module")
def gpus():
    text = load_target("h200").config_text
    return topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=text).devices


def compiled_for(function, structs) -> str:
    shardings = jax.tree.map(lambda each: each.sharding, structs)
    plain = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), structs)
    with jax.sharding.use_abstract_mesh(ONE), warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        traced = jax.jit(function, in_shardings=shardings, out_shardings=(shardings[0], shardings)).trace(*plain)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text() or ""


@pytest.mark.slow
@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("name", PARALLEL)
def test_a_layer_has_xlas_collectives_and_its_kernels(name, gpus):
    structs = layer_structs(PARALLEL[name], gpus)
    found, kernels = collective_bytes(compiled_for(gradient(layer), structs))
    expected, none = collective_bytes(compiled_for(gradient(lambda *args: layer(*args, implementation="xla")), structs))
    assert found == expected
    assert kernels >= 12
    assert not none


def test_a_layers_gradient_by_tensor_and_data_parallel_devices(cpus, seed):
    parallel = PARALLEL["fully sharded, tensor"]
    structs = layer_structs(parallel, cpus.devices.ravel(), tokens=128)
    rng = np.random.default_rng(seed)
    x, weights = jax.tree.map(
        lambda each: jnp.asarray(rng.standard_normal(each.shape) * each.shape[0] ** -0.5, each.dtype), structs
    )
    shardings = jax.tree.map(lambda each: each.sharding, structs)
    found, count = run_in_parts(gradient(layer), (x, weights), shardings)
    expected = gradient(lambda *args: layer(*args, implementation="xla"))(x, weights)
    assert count >= 6
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        own, other = np.asarray(own, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(own - other) < 0.02 * np.linalg.norm(other)


def test_dimensions_name_what_may_be_cut():
    dimensions = Dimensions(text="query: b !t (g r) d, key: b s g d, bias: b (g r) t s -> b t (g r) d")
    shapes = [("query", (4, 64, 8, 32)), ("key", (4, 96, 2, 32)), ("bias", (8, 1, 96))]
    rule = rule_of(dimensions, {}, shapes, [(4, 64, 8, 32)])
    assert not isinstance(rule, str)
    assert rule.sizes == {"b": 4, "t": 64, "g": 2, "r": 4, "d": 32, "s": 96}
    assert rule.whole == {"t", "s"}  # s is in no result
    assert rule.operands[2] == (("g", "r"), (), ("s",))  # broadcast along t
    key_heads = rule.assigned({"x": 4}, [P(), P(None, None, "x"), P(), P(None, None, "x")])
    assert key_heads == {}  # four devices cannot cut two key heads
    assert rule.assigned({"x": 2, "y": 2}, [P(), P(), P(), P(None, None, ("x", "y"))]) == {"g": ("x",), "r": ("y",)}


def test_an_array_that_is_not_described_is_left_to_xla():
    dimensions = Dimensions(text="x: ... d -> ... d")
    assert rule_of(dimensions, {}, [("x", (4, 8)), ("key", (2,))], [(4, 8)]) == "key belongs to the whole of the arrays"


def test_a_gather_of_what_is_whole_is_warned_of_at_the_line_of_the_call(cpus):
    def causal(query, key, value):
        return attention(query, key, value, is_causal=True)

    heads = [jnp.ones((2, 128, 4, 64), jnp.bfloat16)] * 3
    tokens = NamedSharding(cpus, P("d", "t"))
    with pytest.warns(KernelWarning, match="attention gathers query, key, value over the mesh axis 't'") as warned:
        run_in_parts(causal, tuple(heads), (tokens,) * 3)
    assert {each.lineno for each in warned} == {causal.__code__.co_firstlineno + 1}


def test_choices_are_of_the_parts_and_say_what_is_gathered(cpus):
    def layer(x, w):
        norm: Any = rms_norm
        return linear(norm(x, x[0, 0]), w, implementation=("mosaic", "xla"))

    x, w = jnp.ones((4, 128, 1024), jnp.bfloat16), jnp.ones((1024, 2048), jnp.bfloat16)
    with recorded_choices() as choices:
        run_in_parts(layer, (x, w), (NamedSharding(cpus, P("d")), NamedSharding(cpus, P(None, "t"))))
    whole, parts = ([each for each in choices if bool(each.parts) is is_part] for is_part in (False, True))
    assert [each.operation for each in whole] == ["rms_norm", "linear"]
    assert {each.parts for each in parts} == {
        "x (2, 128, 1024) by d, scale (1024,) whole",
        "x (2, 128, 1024) by d, w (1024, 1024) by t",
    }
    assert {each.where for each in choices} == {f"{__file__}:{layer.__code__.co_firstlineno + 2}"}


def test_equal_calls_are_lowered_once_a_program(cpus, monkeypatch):
    lowered: list[Any] = []
    build = shared_call.build_mlir_module_helper
    monkeypatch.setattr(
        shared_call, "build_mlir_module_helper", lambda *args, **kwargs: lowered.append(args) or build(*args, **kwargs)
    )

    def layers(x, scale, count):
        return jnp.sum(jnp.sin(functools.reduce(lambda x, _: x + rms_norm(x, scale), range(count), x)))

    x, scale = jnp.arange(4 * 256.0).reshape(4, 256) % 7, jnp.ones(256)
    shardings = NamedSharding(cpus, P("d")), NamedSharding(cpus, P())
    for count in (1, 3):
        lowered.clear()
        gradient = jax.grad(functools.partial(layers, count=count), argnums=(0, 1))
        found, calls = run_in_parts(gradient, (x, scale), shardings)
        assert calls == 2 * count
        assert len(lowered) == 2
        for own, other in zip(found, gradient(x, scale), strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_scanned_layers_with_remat_and_vmap(cpus, seed):
    def body(x, scale):
        return jax.checkpoint(jax.vmap(rms_norm, (0, None)))(x, scale) + x, None

    def stack(x, scales):
        return jax.lax.scan(body, x, scales)[0]

    def run(x, scales):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(stack(*args))), argnums=(0, 1))(x, scales)

    rng = np.random.default_rng(seed)
    x, scales = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 6, 256), (3, 256)))
    shardings = NamedSharding(cpus, P("d", "t")), NamedSharding(cpus, P())
    found, count = run_in_parts(run, (x, scales), shardings)
    assert count >= 2
    for own, other in zip(found, run(x, scales), strict=True):  # an element of XLA's own can be 4e-5 off
        assert np.linalg.norm(own - other) < 1e-5 * np.linalg.norm(other)


def test_calls_with_other_options_are_other_programs_to_a_compile_cache(cpus):
    def label(**options):
        shardings = NamedSharding(cpus, P("d")), NamedSharding(cpus, P())
        with jax.sharding.use_abstract_mesh(ONE):
            function = jax.jit(lambda x, scale: rms_norm(x, scale, **options), in_shardings=shardings)
            text = function.trace(jnp.ones((4, 256)), jnp.ones(256)).lower().as_text()
        (found,) = re.findall(r'backend_config = "(\w{64})"', text)
        return found

    assert label() == label()
    assert label() != label(epsilon=1e-5)


CACHED = """
import os, sys
os.environ |= {{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}}
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels import rms_norm
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.monitoring.register_event_listener(lambda name, **_: print(name) if "cache_hits" in name else None)
h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
mesh = Mesh(np.array(jax.devices()), ("d",))
gradient = jax.grad(lambda x, scale: rms_norm(x, scale).sum(), argnums=(0, 1))
with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=h200)):
    jitted = jax.jit(gradient, in_shardings=(NamedSharding(mesh, P("d")), NamedSharding(mesh, P())))
    lowered = jitted.trace(jnp.ones((4, 256)), jnp.ones(256)).lower()
assert "CustomSPMDPartitioning" in lowered.as_text()
lowered.compile()
"""


def test_a_second_process_finds_the_program_in_the_compile_cache(tmp_path):
    program = textwrap.dedent(CACHED.format(folder=str(tmp_path)))
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert ["cache_hits" in run.stdout for run in runs] == [False, True]
