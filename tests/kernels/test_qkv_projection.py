"""What the shared base cannot say of the query, key and value projections."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

import hlo_analysis
from pallas_kernels import Norm, Rope, fold_scale, qkv_projection
from pallas_kernels.ops.qkv_projection import api, mosaic_gpu
from pallas_kernels.ops.qkv_projection import config as projection_config
from pallas_kernels.ops.rope.tables import angle_tables
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gradients import weight_gradients

POSITIONS = jnp.arange(8)


def arrays(features=128, heads=(2, 1), head_size=64, dtype=jnp.bfloat16):
    shapes = ((8, features), *((features, count * head_size) for count in (heads[0], heads[1], heads[1])))
    return [normal(i, s, dtype) for i, s in enumerate(shapes)]


def test_without_a_gpu_none_is_xla():
    operands = arrays()
    for got, expected in zip(qkv_projection(*operands), qkv_projection(*operands, implementation="xla"), strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(NotImplementedError, match="Hopper"):
        qkv_projection(*arrays(heads=(2, 2)), implementation="mosaic")


@pytest.mark.parametrize("leading", [(8,), (2, 4), (1, 2, 4)])
def test_results_have_heads_where_their_size_is_given(leading):
    x, *weights = arrays()
    x = x.reshape(*leading, -1)
    assert [y.shape for y in qkv_projection(x, *weights)] == [(*leading, 128), (*leading, 64), (*leading, 64)]
    positions = POSITIONS[: leading[-1]]
    shaped = qkv_projection(x, *weights, head_size=64, rope=Rope(positions))
    assert [y.shape for y in shaped] == [(*leading, 2, 64), (*leading, 1, 64), (*leading, 1, 64)]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w_k": jnp.ones((64, 64), jnp.bfloat16)}, ValueError, r"w_k must be .* got \(64, 64\)"),
        ({"w_v": jnp.ones((128, 64), jnp.float16)}, TypeError, "w_v must have x's dtype bfloat16, got float16"),
        ({"bias": (jnp.ones(128), jnp.ones(64))}, ValueError, "three arrays"),
        ({"bias": (jnp.ones(128), jnp.ones(64), jnp.ones(63))}, ValueError, r"of w_v .* shape \(64,\), got \(63,\)"),
        ({"bias": (jnp.ones(128), jnp.ones(64, int), jnp.ones(64))}, TypeError, "the bias of w_k must be floating"),
        ({"rope": Rope(POSITIONS)}, ValueError, "rope need head_size="),
        ({"rope": Rope(POSITIONS), "head_size": 48}, ValueError, "whole heads of 48"),
        ({"rope": Rope(POSITIONS.astype(jnp.float32)), "head_size": 64}, TypeError, "integers, got float32"),
        ({"rope": Rope(POSITIONS[:7]), "head_size": 64}, ValueError, r"one a row of x, \(8,\).* got \(7,\)"),
        ({"rope": POSITIONS, "head_size": 64}, TypeError, "must be a pallas_kernels.Rope"),
        ({"norm": jnp.ones(128)}, TypeError, "must be a pallas_kernels.Norm"),
        ({"norm": Norm(jnp.ones(127))}, ValueError, r"scale must be \(128,\)"),
        ({"norm": Norm(None, jnp.ones(128))}, ValueError, "an 'rms' norm has no bias"),
        ({"norm": Norm(None, kind="layer", mean_square=jnp.ones(8))}, ValueError, "'rms' norm only"),
        ({"norm": Norm(None, mean_square=jnp.ones(7))}, ValueError, r"one a row, \(8,\), got \(7,\)"),
        ({"q_norm": Norm(jnp.ones(64), kind="layer"), "head_size": 64}, ValueError, "q_norm must be of kind 'rms'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    operands = dict(zip(("x", "w_q", "w_k", "w_v"), arrays(), strict=True))
    with pytest.raises(error, match=words):
        qkv_projection(**{**operands, **changed})


@pytest.mark.usefixtures("interpreter")
def test_what_the_kernel_refuses():
    operands = arrays(heads=(2, 2))
    for rope, words in ((Rope(POSITIONS, interleaved=True), "halves"), (Rope(POSITIONS), "heads of 64, 128, 256")):
        with pytest.raises(NotImplementedError, match=words):
            qkv_projection(*operands, rope=rope, head_size=64 if rope.interleaved else 32, implementation="mosaic")


@pytest.mark.usefixtures("interpreter")
def test_the_gradient_rotates_back_without_a_launch_that_negates_positions():
    operands = arrays(heads=(2, 2))

    def gradient(positions):
        def total(x, *weights):
            return qkv_projection(x, *weights, head_size=64, rope=Rope(positions), implementation="mosaic")[0].sum()

        return jax.grad(total)(*operands)

    program = str(jax.make_jaxpr(gradient)(POSITIONS.astype(jnp.uint8)))
    assert "[8] = neg" not in program


def test_angles_are_those_of_float64():
    positions = np.array([0, 1, 77, 131071, 2**31 - 1], np.int32)
    cosine, sine = angle_tables(jnp.asarray(positions), 128, 500_000.0)
    exact = positions[:, None].astype(np.float64) * 500_000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(cosine, np.cos(exact), atol=3e-7)
    np.testing.assert_allclose(sine, np.sin(exact), atol=3e-7)


def test_a_folded_scale_is_the_scale():
    x, *weights = arrays(dtype=jnp.float32)
    norm = Norm(1 + 0.1 * normal(9, (128,)))
    folded, others = fold_scale(norm, *weights)
    assert folded.scale is None
    for got, expected in zip(
        qkv_projection(x, *others, norm=folded), qkv_projection(x, *weights, norm=norm), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="must have a scale and no bias"):
        fold_scale(folded, *weights)
    with pytest.raises(ValueError, match=r"must be \(128, outputs\), got \(64, 128\)"):
        fold_scale(norm, weights[0][:64])
    with pytest.raises(TypeError, match="floating, got int8; fold before quantizing"):
        fold_scale(norm, weights[0].astype(jnp.int8))


def test_given_mean_squares_are_taken():
    x, *weights = arrays(dtype=jnp.float32)
    scale, mean_square = jnp.ones(128), jnp.mean(jnp.square(x), axis=-1)
    given = Norm(scale, mean_square=mean_square)
    for got, expected in zip(
        qkv_projection(x, *weights, norm=given), qkv_projection(x, *weights, norm=Norm(scale)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    twice = Norm(scale, mean_square=4 * mean_square)
    np.testing.assert_allclose(
        2 * qkv_projection(x, *weights, norm=twice)[0], qkv_projection(x, *weights, norm=given)[0], rtol=1e-4, atol=1e-4
    )


def launches(function, *operands):
    return str(jax.make_jaxpr(function)(*operands)).count("mpmd_map[")


@pytest.mark.usefixtures("interpreter")
def test_a_norm_in_the_launch_is_the_norm(monkeypatch, seed):
    config = FewRowsConfig(columns=128, warpgroups=2, fuses_norm=True)
    monkeypatch.setattr(projection_config, "default_config", lambda *_, **__: config)
    x, w_q, w_k, w_v = arrays(heads=(1, 1), head_size=128)
    x = (4.0 * normal(seed, (3, 128))).astype(x.dtype)
    scale = (1 + 0.2 * normal(seed + 1, (128,))).astype(x.dtype)

    def project(x, scale, w_q, implementation="mosaic", **norm):
        norm = Norm(scale, epsilon=0.1, **norm)
        rope = Rope(jnp.array([0, 77, 1000]))
        return qkv_projection(x, w_q, w_k, w_v, head_size=128, norm=norm, rope=rope, implementation=implementation)

    def gradients(implementation):
        def total(*operands):
            return sum(
                jnp.sum(jnp.square(y.astype(jnp.float32))) for y in project(*operands, implementation=implementation)
            )

        return jax.grad(total, argnums=(0, 1, 2))(x, scale, w_q)

    assert launches(project, x, scale, w_q) == 1
    for got, exact in zip(project(x, scale, w_q), project(x, scale, w_q, implementation="xla"), strict=True):
        # Results near 0 are differences of heads up to 40, rounded before they are rotated: "xla" alone is off by 0.08.
        np.testing.assert_allclose(got.astype(jnp.float32), exact.astype(jnp.float32), rtol=2**-6, atol=0.25)
    for got, exact in zip(gradients("mosaic"), gradients("xla"), strict=True):
        error = jnp.linalg.norm((got - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32))
        assert error < 0.02, f"seed={seed}"


@pytest.mark.usefixtures("interpreter")
def test_a_norm_that_the_launch_cannot_do_is_before_it(monkeypatch):
    config = FewRowsConfig(columns=128, fuses_norm=True)
    monkeypatch.setattr(projection_config, "default_config", lambda *_, **__: config)
    operands = arrays(heads=(1, 1), head_size=128)
    for norm, head_norm in ((Norm(jnp.ones(128), kind="layer"), None), (Norm(jnp.ones(128)), Norm(jnp.ones(128)))):

        def project(*operands, norm=norm, head_norm=head_norm):
            return qkv_projection(*operands, head_size=128, norm=norm, q_norm=head_norm, implementation="mosaic")

        assert launches(project, *operands) == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra 'deviceless'")
def test_xla_does_not_merge_the_gradients_of_the_weights():
    """Compiled for an H200: merged, they would be copied together and apart."""
    x, dq, dk = (jax.ShapeDtypeStruct((2048, n), jnp.bfloat16) for n in (1024, 1024, 256))

    def opcodes(function):
        program = hlo_analysis.analyze(hlo_analysis.capture(function, x, dq, dk, target="h200"))
        return {opcode for launch in program.launches for opcode, _ in launch.opcodes}

    assert "concatenate" in opcodes(lambda x, dq, dk: (x.T @ dq, x.T @ dk))
    assert not {"concatenate", "slice", "copy"} & opcodes(lambda x, dq, dk: weight_gradients(x, (dq, dk)))


@pytest.mark.drawn(1 / 4)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "config",
    [GemmConfig(tile_m=64, tile_n=256, warpgroups=1), FewRowsConfig(columns=128, warpgroups=2)],
    ids=["many rows", "few rows"],
)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("by_column", [False, True], ids=["of pairs", "of columns"])
def test_tables_rotate_as_their_positions_do(config, head_norm, by_column, monkeypatch, seed):
    monkeypatch.setattr(api, "chosen_config", lambda *_: config)
    monkeypatch.setattr(mosaic_gpu, "chosen_config", lambda *_: config)
    x, *weights = arrays(head_size=128)
    x = x.reshape(2, 4, -1)
    positions, norm = jnp.arange(4) + 3, Norm(1 + 0.2 * normal(seed, (128,))) if head_norm else None
    cos, sin = angle_tables(positions, 128, 1e4)

    def loss(x, rope, implementation):
        found = qkv_projection(x, *weights, head_size=128, q_norm=norm, rope=rope, implementation=implementation)
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in found), found

    def both(rope, implementation="mosaic"):
        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(x, rope, implementation)
        return [np.asarray(each, np.float32) for each in (*found, gradient)]

    if by_column:
        cos, sin = (jnp.concatenate([table, table], -1) for table in (cos, sin))
    rounds = by_column and isinstance(config, FewRowsConfig)  # the product, before a launch of its own rotates
    tolerance = 0.05 if rounds and not head_norm else 0
    for got, expected in zip(both(Rope(cos=cos, sin=sin)), both(Rope(positions)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    own = {name: jnp.stack([table] * 2) for name, table in (("cos", cos), ("sin", sin))}
    one, other = (
        jax.jit(jax.grad(lambda tables, each=each: loss(x, Rope(**tables), each)[0]))(own) for each in ("mosaic", "xla")
    )
    for name in own:
        scale = float(jnp.abs(other[name]).max())
        np.testing.assert_allclose(one[name], other[name], atol=0.05 * scale, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("rope", "error", "words"),
    [
        (Rope(), TypeError, "rope must have positions, or both cos and sin"),
        (Rope(POSITIONS, cos=jnp.ones((8, 32)), sin=jnp.ones((8, 32))), TypeError, "positions, or both cos and sin"),
        (Rope(cos=jnp.ones((7, 32)), sin=jnp.ones((8, 32))), ValueError, r"cos must be \(8, columns\)"),
    ],
)
def test_tables_that_do_not_fit(rope, error, words):
    with pytest.raises(error, match=words):
        qkv_projection(*arrays(), head_size=64, rope=rope)
