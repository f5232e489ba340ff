"""The peers' formulas and plumbing on an imitation of PyTorch: forward results are those of our references."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import imitation_torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import REGISTRY, testing
from pallas_kernels.specs import ArgSpec, ArraySpec
from xlafuse.bench import kernels, peers
from xlafuse.bench.candidates import check_close
from xlafuse.bench.kernels import _peers, _peers_results


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    imitation_torch.install(monkeypatch)


def float32_specs():
    """Small argument specs in float32, which numpy shares memory of."""
    for op in REGISTRY.values():
        for spec in op.tagged("test"):
            arrays = [value for value in spec.arguments.values() if hasattr(value, "dtype")]
            is_plain = not spec.tags & {"empty", "extreme", "long"}
            if is_plain and all(array.dtype in ("float32", "int32", "bool") for array in arrays):
                yield pytest.param(op, spec, id=f"{op.name}-{spec.name}")


@pytest.mark.parametrize(("op", "spec"), list(float32_specs()))
def test_formulas_are_ours(op, spec):
    assert_formulas_are_ours("torch_compile", op, spec)


def test_eager_has_the_same_formulas():
    op = REGISTRY["rms_norm"]
    assert_formulas_are_ours(
        "torch_eager", op, next(s for s in op.tagged("test") if s.name.endswith("float32-residual"))
    )


def assert_formulas_are_ours(peer, op, spec):
    # Of these seeds no mask hides all of a row, which PyTorch's softmax makes not-a-number and ours zeros.
    cases = [peers.without_dropout(testing.make_case(op, spec, seed)) for seed in (2, 3)]
    try:
        candidate, first = peers.load(peer).candidate(op.name, "forward", cases)
    except NotImplementedError as error:
        assert "z_loss" in str(error) or "in PyTorch here" in str(error)
        return
    assert (candidate.name, candidate.kind, len(candidate.inputs)) == (peer, "peer", 2)
    expected = _peers_results(cases[0], "forward")
    assert set(first) == set(expected)
    for name, value in first.items():
        error = np.linalg.norm(np.asarray(value) - np.asarray(expected[name]))
        assert error <= 1e-3 * np.linalg.norm(np.asarray(expected[name]))


@pytest.mark.parametrize(("op", "spec"), list(float32_specs())[:8])
def test_backward_asks_for_the_gradients_of_the_operation(op, spec, monkeypatch):
    peer = peers.load("torch_compile")
    tensors = sys.modules["xlafuse.bench.peers.tensors"]
    cases = [testing.make_case(op, spec, 1)]

    def outputs(**arguments):
        return tuple(imitation_torch.tensor(np.zeros(c.shape, c.dtype)).requires_grad_() for c in cases[0].cotangents)

    monkeypatch.setitem(peer.module.FUNCTIONS, op.name, outputs)
    candidate, first = peer.candidate(op.name, "backward", cases)
    wanted = set(cases[0].differentiable) - ({"residual"} if op.name != "dropout_residual_norm" else set())
    assert set(first) == {f"gradient of {name}" for name in wanted}
    assert set(first) <= set(_peers_results(cases[0], "backward"))
    assert all((np.asarray(value) == 2).all() for value in first.values())
    candidate.wait(candidate.call(*candidate.inputs[0]))
    assert tensors.to_torch(jax.numpy.ones(3)).sum() == 3


def wide(array):
    return replace(array, dtype="float32") if getattr(array, "dtype", "").endswith("float16") else array


@pytest.mark.parametrize(("op", "rate"), [("dropout_residual_norm", "rate"), ("bias_activation", "dropout_rate")])
def test_dropout_is_timed_and_the_formula_checked_without_it(op, rate, monkeypatch):
    spec = next(spec for spec in REGISTRY[op].tagged("test") if spec.arguments.get(rate))
    spec = replace(spec, arguments={name: wide(value) for name, value in spec.arguments.items()})
    cases = [testing.make_case(REGISTRY[op], spec, 1)]
    expected = _peers_results(peers.without_dropout(cases[0]), "forward")
    problems = []
    (candidate,) = _peers(["torch_eager"], "forward", cases, problems)
    assert problems == []
    y = candidate.call(*candidate.inputs[0])[0]
    assert np.abs(np.asarray(y) - np.asarray(expected["output 0"])).max() > 0.01  # dropped
    wrong = {name: 2 * value for name, value in expected.items()}
    monkeypatch.setattr(kernels, "_peers_results", lambda *_: wrong)
    assert _peers(["torch_eager"], "forward", cases, problems) == []
    assert "off by 0.5 of its norm" in problems[0].message


def test_liger_refuses_what_it_has_not(monkeypatch):
    liger_kernel, ops = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.ops")

    class Function:
        @staticmethod
        def apply(x, *rest):
            return imitation_torch.softmax(x, -1)

    ops.LigerSoftmaxFunction = Function
    ops.LigerSiLUMulFunction = ops.LigerGELUMulFunction = Function
    liger_kernel.ops = ops
    monkeypatch.setitem(sys.modules, "liger_kernel", liger_kernel)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    liger = peers.load("liger")
    op = REGISTRY["softmax"]
    plain = next(s for s in op.tagged("test") if s.name.endswith("float32") and set(s.arguments) == {"x"})
    case = testing.make_case(op, plain, 1)
    candidate, first = liger.candidate("softmax", "forward", [case])
    assert candidate.name == "liger"
    check_close(tuple(first.values()), tuple(_peers_results(case, "forward").values()))
    with pytest.raises(NotImplementedError, match="Liger has no bias_activation"):
        liger.candidate("bias_activation", "forward", [case])
    with pytest.raises(NotImplementedError, match="no gate with relu"):
        liger.module.gated_activation(None, 1, activation="relu")
    scaled = next(s for s in specs_in_float32("softmax") if "scale" in s.arguments)
    with pytest.raises(NotImplementedError, match="unexpected keyword argument 'scale'"):
        liger.candidate("softmax", "forward", [testing.make_case(op, scaled, 1)])


@pytest.fixture
def quack(monkeypatch):
    """quack's functions by what they compute."""
    torch = sys.modules["torch"]
    functional = torch.nn.functional

    class Function:
        needs_input_grad = ()

        @classmethod
        def apply(cls, *arguments):
            return cls.forward(types.SimpleNamespace(save_for_backward=lambda *_: None), *arguments)

    torch.autograd.Function = Function

    def rmsnorm(x, weight, residual=None, eps=1e-6, prenorm=False):
        total = x if residual is None else x + residual
        y = functional.rms_norm(total, x.shape[-1:], weight, eps)
        return (y, total) if prenorm else y

    def layernorm_fwd(x, weight, bias, eps, return_rstd, return_mean):
        assert x.ndim == 2
        assert weight.dtype == bias.dtype == np.float32
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps), None, None

    modules = {
        "quack": {
            "rmsnorm": rmsnorm,
            "softmax": lambda x: torch.softmax(x, 1),
            "cross_entropy": functional.cross_entropy,
        },
        "quack.rmsnorm": {"layernorm_fwd": layernorm_fwd, "layernorm_bwd": None},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return peers.load("quack")


def specs_in_float32(op):
    for spec in REGISTRY[op].tagged("test"):
        if not spec.tags & {"empty", "extreme", "long"}:
            yield replace(spec, arguments={name: wide(value) for name, value in spec.arguments.items()})


@pytest.mark.parametrize(
    ("op", "least"),
    [("rms_norm", 3), ("layer_norm", 3), ("softmax", 2), ("cross_entropy", 1)],
)
def test_quack_computes_the_operation(quack, op, least):
    agreed = 0
    for spec in specs_in_float32(op):
        case = testing.make_case(REGISTRY[op], spec, 2)
        try:
            _, first = quack.candidate(op, "forward", [case])
        except NotImplementedError as error:
            assert "quack" in str(error)
            continue
        expected = _peers_results(case, "forward")
        assert set(first) == set(expected)
        for name, value in first.items():
            error = np.linalg.norm(np.asarray(value) - np.asarray(expected[name]))
            assert error <= 2e-3 * np.linalg.norm(np.asarray(expected[name])), spec.name
        agreed += 1
    assert agreed >= least


def test_quack_refuses_what_it_has_not(quack):
    with pytest.raises(NotImplementedError, match="not by rope"):
        quack.candidate("rope", "forward", [])
    unscaled = next(s for s in specs_in_float32("layer_norm") if "scale" not in s.arguments)
    with pytest.raises(NotImplementedError, match="missing a required argument: 'scale'"):
        quack.candidate("layer_norm", "forward", [testing.make_case(REGISTRY["layer_norm"], unscaled, 1)])


@pytest.fixture
def flash_attention(monkeypatch):
    """Both libraries by what they compute where there are as many keys as queries."""

    def sides(window, causal):
        left, right = (None if side is None or side < 0 else side for side in window)
        assert causal == ((left, right) == (None, 0))
        return left, right

    def flash_mha(query, key, value, softmax_scale, is_causal, window_size):
        left, right = sides(window_size, is_causal)
        length = query.shape[1]
        window = None if left is right is None else tuple(length if side is None else side for side in (left, right))
        wide = (array.astype(jnp.float32) for array in (query, key, value))
        out = jax.nn.dot_product_attention(*wide, scale=softmax_scale, local_window_size=window)
        return out.astype(query.dtype)

    def flash_attn_func(query, key, value, softmax_scale, causal, window_size, deterministic):
        deterministic_calls.append(deterministic)
        arrays = (jnp.asarray(np.asarray(each)) for each in (query, key, value))
        out = flash_mha(*arrays, softmax_scale=softmax_scale, is_causal=causal, window_size=window_size)
        return imitation_torch.tensor(np.asarray(out)), None

    deterministic_calls: list[bool] = []
    for name, members in (
        ("flash_attn3_jax", {"flash_mha": flash_mha}),
        ("flash_attn", {}),
        ("flash_attn.cute", {"flash_attn_func": flash_attn_func}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return deterministic_calls


def attention_case(queries=96, keys=96, size=128, dtype="float16", **options):
    query, key = (ArraySpec(shape=(2, n, h, size), dtype=dtype) for n, h in ((queries, 4), (keys, 2)))
    arguments = {"query": query, "key": key, "value": key, **options}
    return testing.make_case(REGISTRY["attention"], ArgSpec(name="case", arguments=arguments), 1)


@pytest.mark.parametrize("peer", ["fa3", "fa4", "fa4_deterministic"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"is_causal": True, "window": (20, 0)}, {"window": (5, 9)}, {"keys": 40}],
    ids=["full", "causal", "causal window", "window", "fewer keys"],
)
def test_flash_attention_has_our_masks(flash_attention, peer, options):
    case = attention_case(**options)
    candidate, first = peers.load(peer).candidate("attention", "forward", [case])
    assert (candidate.name, candidate.kind) == (peer, "peer")
    check_close(tuple(first.values()), tuple(_peers_results(case, "forward").values()))
    assert flash_attention == ([] if peer == "fa3" else [peer == "fa4_deterministic"])


def test_flash_attention_three_has_a_gradient_in_jax(flash_attention):
    case = attention_case(dtype="bfloat16", is_causal=True)
    _, first = peers.load("fa3").candidate("attention", "backward", [case])
    expected = _peers_results(case, "backward")
    check_close(tuple(first[name] for name in expected), tuple(expected.values()))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "no kernel for float32"),
        ({"size": 64}, "head size 64"),
        ({"keys": 128, "is_causal": True}, "last query and key"),
        ({"keys": 128, "window": (3, 3)}, "last query and key"),
        ({"softcap": 3.0}, "unexpected keyword argument 'softcap'"),
        (
            {"segment_ids": ArraySpec(shape=(2, 96), dtype="int32", fill="sorted")},
            "unexpected keyword argument 'segment_ids'",
        ),
    ],
)
def test_flash_attention_refuses_what_it_has_not(flash_attention, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        peers.load("fa3").candidate("attention", "forward", [attention_case(**options)])
    with pytest.raises(NotImplementedError, match="fa4 has no softmax"):
        peers.load("fa4").candidate("softmax", "forward", [])


def test_integer_weights_are_compared_with_the_weights_they_stand_for():
    op = REGISTRY["quantized_linear"]
    spec = next(s for s in op.tagged("test") if s.name.endswith("residual"))
    case = testing.make_case(op, spec, 1)
    candidate, first = peers.load("xla_bf16").candidate(op.name, "forward", [case, case])
    assert (candidate.name, candidate.kind, len(candidate.inputs)) == ("xla_bf16", "peer", 2)
    assert {x.dtype.name for x in jax.tree.leaves(candidate.inputs)} == {"bfloat16"}
    check_close(tuple(first.values()), tuple(_peers_results(case, "forward").values()))
    with pytest.raises(NotImplementedError, match="quantized_linear forward"):
        peers.load("xla_bf16").candidate(op.name, "backward", [case])


def test_jax_has_queries_scaled_and_in_float16(monkeypatch):
    """Its kernel by what it computes: it needs a GPU."""
    op, peer = REGISTRY["attention"], peers.load("jax_mosaic")

    def attend(query, key, value, config):
        assert query.dtype == jnp.float16
        wide = (array.astype(jnp.float32) for array in (query, key, value))
        return jax.nn.dot_product_attention(*wide, scale=1.0, is_causal=config.causal).astype(query.dtype)

    monkeypatch.setattr(peer.module, "mosaic_attention", attend)
    query, key = (ArraySpec(shape=(2, 256, heads, 128), dtype="bfloat16") for heads in (4, 2))
    case = testing.make_case(op, ArgSpec(name="whole", arguments={"query": query, "key": key, "value": key}), 1)
    for phase in ("forward", "backward"):
        candidate, first = peer.candidate(op.name, phase, [case])
        assert candidate.name == "jax_mosaic"
        expected = _peers_results(case, phase)
        check_close(tuple(first[name] for name in expected), tuple(expected.values()))
    windows = next(s for s in op.arg_specs if s.name == "1x1000x1000x2x1x128-bfloat16-causal-window_300_0")
    with pytest.raises(NotImplementedError, match="unexpected keyword argument 'window'"):
        peer.candidate(op.name, "forward", [testing.make_case(op, windows, 1)])
