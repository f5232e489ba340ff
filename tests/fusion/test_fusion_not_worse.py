"""`fuse` makes no program worse in bytes or estimated time, of the forward pass or the gradient, on the H200."""

from __future__ import annotations

import inspect
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest

import xlafuse
from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.fusion import combination, combine
from xlafuse.fusion.worth import worthwhile
from xlafuse.regressions import regression_of

BF16, F32 = jnp.bfloat16, jnp.float32


def array(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def assert_not_worse(fn, *arguments, modes=("forward", "grad")):
    """Compiles what `fuse` changes, and fails where that moves more bytes or is estimated to take longer."""
    for mode in modes:
        assert (found := regression_of(fn, *arguments, mode=mode)) is None, f"{mode}: {found}"


def reported(fn, *arguments, **options):
    """The report of `fuse` for the H200."""
    told, target = [], load_target("h200")
    with name_target_in_meshes(target), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        jax.eval_shape(xlafuse.fuse(fn, report=told.append, **options), *arguments)
    return told[0]


def taken(fn, *arguments, **options):
    return sorted(site.operation for site in reported(fn, *arguments, **options).taken)


def norm(x, scale):
    wide = x.astype(F32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def dropped(x, keep):
    return jnp.where(keep, x / 0.9, 0).astype(x.dtype)


def experts(x, gate, up, down, sizes, precision=None):
    gate, up = (jax.lax.ragged_dot(x, w, sizes, precision=precision) for w in (gate, up))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes, precision=precision)


X, SCALE, W = array(4096, 1024), array(1024, dtype=F32), array(1024, 1024)
WIDE, BACK = array(1024, 4096), array(4096, 1024)
EXPERTS = X, array(4, 1024, 2048), array(4, 1024, 2048), array(4, 2048, 1024), array(4, dtype=jnp.int32)
WHOLE = array(1024, 4096, dtype=F32), array(4096, 1024, dtype=F32)

LEFT = {
    "exact experts": (
        lambda *arrays: experts(*arrays, precision="highest"),
        EXPERTS,
        "gated_activation",
        "ragged_dot_general, which computes gate",
    ),
    "norm after exact experts": (
        lambda x, w, sizes, s: norm(jax.lax.ragged_dot(x, w, sizes, precision="highest"), s),
        (X, array(4, 1024, 1024), array(4, dtype=jnp.int32), SCALE),
        "rms_norm",
        "ragged_dot_general, which computes x",
    ),
    "gate with a bias": (
        lambda x, g, u, d, b: (jax.nn.silu(x @ g + b) * u) @ d,
        (X, WIDE, array(4096, 4096), BACK, array(4096)),
        "linear",
        "fuses its activation with what reads the result (mul)",
    ),
    "activation for rows of indices": (
        lambda x, g, r, d: (jax.nn.gelu(x @ g)[r]) @ d,
        (X, WIDE, array(4096, dtype=jnp.int32), BACK),
        "linear",
        "fuses its activation with what reads the result (gather)",
    ),
    "relu": (lambda x, a, b: jax.nn.relu(x @ a) @ b, (X, WIDE, BACK), "linear", "keeps its sign"),
    "norm in float32 for a product": (
        lambda x, s, w: norm(x, s).astype(BF16) @ w,
        (array(4096, 1024, dtype=F32), SCALE, W),
        "rms_norm",
        "only read as bfloat16",
    ),
    "float32 weights of few rows": (
        lambda x, a, b: jax.nn.gelu(x @ a.astype(BF16)) @ b.astype(BF16),
        (array(512, 1024), *WHOLE),
        "linear",
        "copies of weights",
    ),
    "gates of a concatenation": (
        lambda a, b, u, w: (jax.nn.silu(jnp.concatenate([a, b])) * u) @ w,
        (X, X, array(8192, 1024), W),
        "gated_activation",
        "concatenate, which computes gate",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_xla_computes_on_the_way_is_left_to_it(name):
    fn, arguments, operation, reason = LEFT[name]
    report = reported(fn, *arguments)
    assert operation not in [site.operation for site in report.taken]
    assert [each for each in report.refused if each.operation == operation and reason in each.reason], report


TAKEN = {
    "activation between products": (lambda x, a, b: jax.nn.gelu(x @ a) @ b, (X, WIDE, BACK), ["linear"]),
    "beside another product of x": (lambda x, a, b, c: (jax.nn.gelu(x @ a) @ b, x @ c), (X, WIDE, BACK, W), ["linear"]),
    "norm read by all kinds": (
        lambda x, s, w: (norm(x, s) @ w + jnp.tanh(norm(x, s)), norm(x, s).astype(F32) @ w.astype(F32)),
        (X, SCALE, W),
        ["linear", "rms_norm"],
    ),
    "gate with biases": (
        lambda x, g, u, d, b: jnp.sin((jax.nn.silu(x @ g + b) * (x @ u + b)) @ d),
        (X, WIDE, WIDE, BACK, array(4096)),
        ["gated_linear"],
    ),
    "experts": (experts, EXPERTS, ["grouped_gated_linear", "grouped_linear"]),
    "norm of a sum": (lambda x, y, s, w: norm(x + y, s) @ w, (X, X, SCALE, W), ["rms_norm"]),
    "norm of a sum with dropout": (
        lambda x, y, s, w, keep: jnp.sin(norm(x + dropped(y @ w, keep), s) @ w),
        (X, X, SCALE, W, array(4096, 1024, dtype=jnp.bool_)),
        ["rms_norm"],
    ),
    "residual stream with dropout": (
        lambda x, y, s, w, keep: (total := x + dropped(y @ w, keep)) + norm(total, s) @ w,
        (X, X, SCALE, W, array(4096, 1024, dtype=jnp.bool_)),
        ["linear", "rms_norm"],
    ),
    "norm of a transposed sum": (
        lambda x, y, s, w: (norm(jnp.swapaxes(x + y, 0, 1), s) @ w, x + y),
        (array(64, 64, 1024), array(64, 64, 1024), SCALE, W),
        ["rms_norm"],
    ),
    "norm before weights in float32": (
        lambda x, s, w: norm(x, s) @ w.astype(BF16),
        (X, SCALE, array(1024, 8192, dtype=F32)),
        ["rms_norm"],
    ),
    "float32 weights of many rows": (
        lambda x, a, b: jax.nn.gelu(x @ a.astype(BF16)) @ b.astype(BF16),
        (X, *WHOLE),
        ["linear"],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name):
    fn, arguments, operations = TAKEN[name]
    assert taken(fn, *arguments) == operations


@pytest.mark.drawn(1 / 8)
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_not_worse(name):
    fn, arguments, _ = TAKEN[name]
    assert_not_worse(fn, *arguments)


PROGRAMS = ("bert", "dlrm", "experts", "gemma", "graphnet", "haiku_lm", "lm1b", "mixer", "pointnet", "unet",
            "vae", "vit")  # fmt: skip


@pytest.mark.slow
@pytest.mark.drawn(1 / 8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_not_worse(name):
    module = import_module(f"programs.{name}")
    arguments = module.arguments()
    if not hasattr(module, "loss"):
        return assert_not_worse(module.step, *arguments, modes=("forward",))
    has_optimizer = len(arguments) > len(inspect.signature(module.loss).parameters)  # its state comes second
    return assert_not_worse(module.loss, arguments[0], *arguments[1 + has_optimizer :])


def test_skipped_operations_are_left_out_and_their_parts_taken():
    def fn(x, s, a, b):
        return jax.nn.silu(norm(x, s) @ a) * (norm(x, s) @ b)

    arguments = X, SCALE, WIDE, WIDE
    assert taken(fn, *arguments) == ["gated_linear"]
    assert taken(fn, *arguments, skip={"gated_linear"}) == ["rms_norm"]
    assert taken(fn, *arguments, skip={"gated_linear", "rms_norm"}) == []
    assert taken(fn, *arguments, skip={"rms_norm"}) == ["gated_linear"]


def test_a_part_may_be_skipped_and_serve_a_larger_operation():
    def fn(x, s, w, b):
        return jax.nn.gelu(norm(x, s) @ w) @ b

    assert taken(fn, X, SCALE, WIDE, BACK, skip={"linear", "rms_norm"}) == ["norm_linear"]
    assert taken(fn, X, SCALE, WIDE, BACK, skip={"norm_linear"}) == ["linear", "rms_norm"]


def test_names_in_skip_are_checked():
    with pytest.raises(ValueError, match="no operation 'relu'; skip are among 'attention'"):
        xlafuse.fuse(norm, skip={"relu"})
    with pytest.raises(TypeError, match="skip=\\{'linear'\\}"):
        xlafuse.fuse(norm, skip="linear")


@pytest.mark.parametrize("name", ["sum", "stream"])
def test_a_norm_for_gradients_alone_is_the_norm(monkeypatch, name):
    """XLA computes it where it is not differentiated, and the operation where it is."""
    monkeypatch.setattr(combination, "target_device", lambda: type("Hopper", (), {"is_hopper": True}))

    def fn(x, y, scale):
        total = x + y if name == "sum" else x * y
        return jnp.tanh(norm(total, scale) @ jnp.eye(24)) + (0 if name == "sum" else total)

    x, y, scale = (
        jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(6, 24), (6, 24), (24,)])
    )
    told = []
    fused = xlafuse.fuse(fn, report=told.append)

    def loss(fn):
        return lambda *own: jnp.square(jax.vmap(fn, (0, 0, None))(*own)).sum()

    batch = x.reshape(2, 3, 24), y.reshape(2, 3, 24), scale
    for transformed in (lambda fn: fn, jax.jit):
        assert jnp.allclose(transformed(fused)(x, y, scale), fn(x, y, scale), atol=1e-5)
        ours, plain = (transformed(jax.grad(loss(each), (0, 1, 2)))(*batch) for each in (fused, fn))
        assert all(jnp.allclose(own, other, atol=1e-4) for own, other in zip(ours, plain, strict=True))
    assert [site.operation for site in told[0].taken] == ["rms_norm"]
    assert "custom_vjp_call" in str(jax.make_jaxpr(fused)(x, y, scale))


@pytest.fixture
def takes_all(monkeypatch):
    """Has `fuse` take what it would leave to XLA."""
    everything = lambda *own, **options: worthwhile(*own, **{**options, "keeps_all": True})  # noqa: E731
    monkeypatch.setattr(combine, "worthwhile", everything)


def test_a_worse_program_names_what_to_skip(takes_all):
    def program(*own):
        return jnp.square(experts(*own, precision="highest").astype(F32)).mean()

    arguments = (array(8192, 1024), *EXPERTS[1:])
    comparison = xlafuse.compare(program, arguments, strategies=["xla", "fused"])
    assert "fuse makes this program worse" in comparison["fused"].description
    found = regression_of(program, *arguments)
    assert found is not None
    assert found.skip == {"gated_activation"}
    assert "skip={'gated_activation'} makes that" in str(found)


class Counted:
    """An analysis, as far as a regression looks at it."""

    def __init__(self, megabytes: float, us: float):
        self.traffic, self.estimated_us = type("Traffic", (), {"bytes": int(megabytes * 1e6)}), us


@pytest.mark.parametrize(
    ("fused", "words"),
    [((1003, 100.4), None), ((1010, 100), "10 MB more"), ((900, 101), "100 MB less and an estimated 1.0 µs more")],
)
def test_worse_is_more_bytes_or_time_beyond_half_a_percent(monkeypatch, fused, words):
    monkeypatch.setattr("xlafuse.regressions._Programs.plain", lambda self: Counted(1000, 100))
    monkeypatch.setattr(
        "xlafuse.regressions._Programs.fused", lambda self, skip: (None if skip else Counted(*fused), ("linear",))
    )
    found = regression_of(norm)
    assert str(found) == "None" if words is None else words in str(found)


def test_all_that_are_responsible_are_skipped_together(monkeypatch):
    costs = {"linear": (0, 0), "rope": (30, 5), "softmax": (20, 4), "rms_norm": (-10, -2)}

    def without(self, skip):
        kept = [cost for name, cost in costs.items() if name not in skip]
        return Counted(1000 + sum(each[0] for each in kept), 100 + sum(each[1] for each in kept)), (*costs,)

    monkeypatch.setattr("xlafuse.regressions._Programs.plain", lambda self: Counted(1000, 100))
    monkeypatch.setattr("xlafuse.regressions._Programs.fused", without)
    found = regression_of(norm)
    assert found is not None
    assert found.skip == {"rope", "softmax"}
    assert "skip={'rope', 'softmax'} makes that 50 MB less and an estimated 9.0 µs less" in str(found)
