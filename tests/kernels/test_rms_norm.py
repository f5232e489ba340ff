"""What is particular to RMSNorm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.ops.norms.backward import norm_backward
from pallas_kernels.ops.norms.config import BackwardConfig, BackwardShape
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import StaticNorm
from pallas_kernels.ops.norms.reference import rms_norm_reference
from pallas_kernels.primitives.rows import THREADS, split_row

NORM = StaticNorm(name="rms_norm", epsilon=1e-6)


def rows(seed, count, features, dtype="float32"):
    return normal(seed, (count, features)).astype(dtype)


def statistics_of(x):
    statistics = norm_forward(NORM, x, with_statistics=True)[2]
    assert statistics is not None
    return statistics


def test_known_values():
    y, total = rms_norm(jnp.array([[1.0, 2.0]]), jnp.array([1.0, 10.0]), residual=jnp.array([[2.0, 2.0]]), epsilon=0.5)
    np.testing.assert_allclose(total, [[3.0, 4.0]])
    np.testing.assert_allclose(y, [[3 / 13**0.5, 40 / 13**0.5]], rtol=1e-6)


@pytest.mark.usefixtures("interpreter")
def test_the_rounded_sum_is_normalised(seed):
    x, residual = rows(seed, 3, 256, "bfloat16"), rows(seed + 1, 3, 256, "bfloat16")
    scale = rows(seed, 1, 256, "bfloat16")[0]
    y, total = rms_norm(x, scale, residual=residual, implementation="mosaic")
    np.testing.assert_array_equal(total, (x + residual).astype(jnp.bfloat16))
    again = rms_norm(total, scale, implementation="mosaic")
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(again, np.float32))


@pytest.mark.usefixtures("interpreter")
def test_an_unused_sum_costs_no_read_and_gives_the_same_gradient(seed):
    x, residual, scale = rows(seed, 3, 256), rows(seed + 1, 3, 256), rows(seed, 1, 256)[0]

    def loss(x, scale, residual, implementation):
        return jnp.sum(jnp.sin(rms_norm(x, scale, residual=residual, implementation=implementation)[0]))

    got = jax.grad(loss, (0, 1, 2))(x, scale, residual, "mosaic")
    expected = jax.grad(loss, (0, 1, 2))(x, scale, residual, "xla")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_only_the_sum_is_used(seed):
    x, scale = rows(seed, 3, 256), rows(seed, 1, 256)[0]
    total_of = lambda x, r: jnp.sum(rms_norm(x, scale, residual=r, implementation="mosaic")[1] ** 2)  # noqa: E731
    dx, dresidual = jax.grad(total_of, (0, 1))(x, x)
    np.testing.assert_allclose(dx, 4 * x, rtol=1e-6)
    np.testing.assert_allclose(dresidual, 4 * x, rtol=1e-6)


@pytest.mark.usefixtures("interpreter")
def test_x_is_returned_for_the_residual_stream(seed):
    x, scale = rows(seed, 3, 256), rows(seed, 1, 256)[0]

    def layer(x, scale, implementation):
        y, stream = rms_norm(x, scale, returns_total=True, implementation=implementation)
        return jnp.sum(jnp.sin(y) * jnp.cos(stream)), stream

    (got, stream), (expected, _) = (jax.grad(layer, (0, 1), has_aux=True)(x, scale, each) for each in ("mosaic", "xla"))
    np.testing.assert_array_equal(stream, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"seed={seed}")
    both = jax.make_jaxpr(jax.grad(lambda x: layer(x, scale, "mosaic")[0]))(x)
    assert "add_any" not in str(both), "the stream's cotangent must be added by the kernel"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_rows_without_a_kernel(seed, dtype):
    """Rows that TMA cannot align are differentiated by XLA, with the sum's cotangent in float32."""
    x, dy, dtotal = (rows(seed + i, 3, 1027, dtype) for i in range(3))
    scale = 1 + 0.1 * rows(seed + 3, 1, 1027)[0]
    assert BackwardShape(rows=3, features=1027, itemsize=x.dtype.itemsize, streams=3, gain_bytes=4).default() is None
    got = norm_backward(NORM, x, statistics_of(x), dy, scale=scale, dtotal=dtotal)
    assert got.dscale is not None
    wide = [a.astype("float32") for a in (x, dy, dtotal)]
    dx, dscale = jax.vjp(rms_norm_reference, wide[0], scale)[1](wide[1])
    step = jnp.finfo(dtype).eps  # sums in another order may round a value the other way
    got_dx, expected = (np.asarray(a, np.float32) for a in (got.dtotal, (dx + wide[2]).astype(dtype)))
    np.testing.assert_allclose(got_dx, expected, rtol=step, atol=1e-6, err_msg=f"seed={seed}")
    np.testing.assert_allclose(got.dscale, dscale, rtol=1e-5, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_all_backward_configurations_agree(seed):
    x, dy, scale = rows(seed, 5, 512), rows(seed + 1, 5, 512), rows(seed, 1, 512)[0]
    expected = jax.vjp(rms_norm_reference, x, scale)[1](dy)
    configs = [BackwardConfig(blocks_per_core=1, steps=2)]
    for warpgroups in (1, 2, 4):
        configs.append(BackwardConfig(warpgroups=warpgroups, blocks_per_core=1, steps=2))
    configs.append(BackwardConfig(warpgroups=1, blocks_per_core=1, steps=4))
    for config in configs:
        got = norm_backward(NORM, x, statistics_of(x), dy, scale=scale, config=config)
        for a, b in zip((got.dtotal, got.dscale), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"{config} seed={seed}")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("features", [128, 129, 255, 1000, 1024, 1027, 1152, 4096, 4097, 4100, 8191])
def test_segments_cover_a_row_once(features, itemsize):
    counted = np.zeros(features, int)
    for segment in split_row(features, itemsize):
        assert segment.size % (THREADS * segment.vector) == 0
        assert segment.vector * itemsize <= 16
        assert segment.offset * itemsize % (segment.vector * itemsize) == 0
        assert features % segment.vector == 0, "every row must start on a multiple of the access"
        counted[segment.offset + segment.repeated : segment.offset + segment.size] += 1
    assert (counted == 1).all()


def test_short_rows_are_refused():
    with pytest.raises(ValueError, match="at least 128 values of a row, got 127"):
        split_row(127, 2)


@pytest.mark.parametrize("features", [128, 1024, 4096, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_pipelines_fit_in_shared_memory(features, itemsize):
    for streams in (2, 3):
        for blocks in (1, 2, 3, 6):
            shape = BackwardShape(rows=3, features=features, itemsize=itemsize, streams=streams, gain_bytes=4)
            config = shape.ring(warpgroups=1, blocks_per_core=blocks)
            if config is not None:
                block_bytes = config.steps * streams * features * itemsize + features * 4 + 1024
                assert config.blocks_per_core * block_bytes <= 228 * 1024


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("operation", [rms_norm, layer_norm])
def test_a_scale_after_the_rounding_has_the_bits_of_the_written_program(operation, dtype, scale_dtype, seed):
    scale_dtype = dtype if scale_dtype == "bfloat16" else scale_dtype
    x, (scale, bias) = rows(seed, 40, 256, dtype), (1 + 0.3 * rows(seed + 1, 2, 256)).astype(scale_dtype)
    wide = x.astype("float32")
    centered = wide - jnp.mean(wide, -1, keepdims=True) if operation is layer_norm else wide
    normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), -1, keepdims=True) + 1e-6)
    shift = {"bias": bias} if operation is layer_norm else {}
    written = (normed.astype(dtype) * scale + shift.get("bias", 0)).astype(dtype)

    def share_of_equal(rounds):
        y = operation(x, scale, **shift, rounds_before_scale=rounds, implementation="mosaic")
        return np.mean(np.asarray(y, np.float32) == np.asarray(written, np.float32))

    # Sums in another order may move a value over a tie, one in thousands.
    assert share_of_equal(True) > 0.99
    assert share_of_equal(False) < 0.9


@pytest.mark.usefixtures("interpreter")
def test_rounding_before_the_scale_leaves_float32_as_it_is(seed):
    x, scale = rows(seed, 3, 256), rows(seed + 1, 1, 256)[0]
    one, other = (rms_norm(x, scale, rounds_before_scale=rounds, implementation="mosaic") for rounds in (True, False))
    np.testing.assert_array_equal(one, other)
