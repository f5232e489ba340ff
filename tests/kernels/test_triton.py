"""The Triton kernels: what refuses them here, and, where Triton is installed, their results in its interpreter."""

from __future__ import annotations

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import REGISTRY, layer_norm, rms_norm, softmax, testing
from pallas_kernels.primitives import triton_calls
from pallas_kernels.primitives.triton_calls import row_block, triton_unsupported

OPERATIONS = [op for op in REGISTRY.values() if "triton" in op.implementations]
MODULES = [f"pallas_kernels.ops.{name}.triton" for name in ("norms", "softmax", "linear")]
X = jnp.ones((2, 256))


def test_without_jax_triton_they_say_what_to_install(monkeypatch):
    monkeypatch.setattr(triton_calls, "find_spec", lambda _: None)
    for call in (
        lambda: rms_norm(X, jnp.ones(256), implementation="triton"),
        lambda: layer_norm(X, jnp.ones(256), implementation="triton"),
        lambda: softmax(X, implementation="triton"),
    ):
        with pytest.raises(NotImplementedError, match=r"jax_triton is not installed: pip install 'xlafuse\[triton\]'"):
            call()


def test_other_refusals(monkeypatch):
    monkeypatch.setattr(triton_calls, "find_spec", lambda _: object())
    assert "NVIDIA GPUs" in str(triton_unsupported(X))
    assert "128 to 32768" in str(triton_unsupported(jnp.ones((1, 40000))))
    assert "int32" in str(triton_unsupported(jnp.ones((1, 4), "int32")))
    for call in (
        lambda: rms_norm(X, jnp.ones(256), residual=X, implementation="triton"),
        lambda: rms_norm(X, jnp.ones(256), rounds_before_scale=True, implementation="triton"),
        lambda: layer_norm(X, jnp.ones(256), returns_total=True, implementation="triton"),
        lambda: layer_norm(X, implementation="triton"),
    ):
        with pytest.raises(NotImplementedError, match="take a scale, and no residual"):
            call()
    with pytest.raises(NotImplementedError, match="take no mask"):
        softmax(X, mask=X > 0, implementation="triton")
    with pytest.raises(NotImplementedError, match="axis 0 is not the last"):
        softmax(X, axis=0, implementation="triton")


def test_blocks_hold_their_rows():
    assert [row_block(n) for n in (1, 127, 4096, 4097, 32768)] == [(1, 1), (128, 1), (4096, 8), (8192, 16), (32768, 16)]


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's own interpreter under an imitation of jax_triton, on numpy."""
    # Triton decides when it is first imported whether its own functions are interpreted.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton", exc_type=ImportError)
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    if not isinstance(triton.language.sum, interpreter.InterpretedFunction):
        pytest.skip("Triton is already imported, to compile")

    class Pointer:
        def __init__(self, array):
            self.array, self.dtype = array, str(array.dtype)

        def data_ptr(self):
            return self.array.ctypes.data

    def triton_call(*operands, kernel, out_type, grid, name, num_warps, num_stages=1, **constants):
        def run(*operands):
            inputs = [np.array(operand) for operand in operands]
            outputs = [np.full(t.shape, np.nan, t.dtype) for t in jax.tree.leaves(out_type)]
            kernel[grid](*map(Pointer, inputs), *map(Pointer, outputs), **constants)
            return jax.tree.unflatten(jax.tree.structure(out_type), outputs)

        return jax.pure_callback(run, out_type, *operands)

    jax_triton = types.ModuleType("jax_triton")
    monkeypatch.setattr(jax_triton, "triton_call", triton_call, raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", jax_triton)
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    libdevice = importlib.import_module("triton.language.extra.cuda.libdevice")
    monkeypatch.setattr(libdevice, "exp", lambda x: triton.language.exp(x))  # the interpreter has no device library
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, *rest):
        """It multiplies bfloat16 values as the integers that numpy keeps them as."""
        return plain_dot(self, widened(a), widened(b), d, *rest)

    def widened(handle):
        if handle.dtype.scalar != triton.language.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, triton.language.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda _, operands, named: (operands, named))
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    monkeypatch.setattr(triton_calls, "find_spec", lambda _: object())
    monkeypatch.setattr(triton_calls, "target_device", lambda: types.SimpleNamespace(platform="cuda"))
    yield
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("op", "spec"),
    [
        pytest.param(op, spec, id=f"{op.name}-{spec.name}")
        for op in OPERATIONS
        for spec in op.tagged("test")
        if "long" not in spec.tags
    ],
)
def test_values_and_gradients(op, spec, seed):
    try:
        testing.check(op, spec, "triton", seed=seed)
    except NotImplementedError as error:
        told = ("mask", "axis", "take a scale", "the result is", "the kernel's norm is")
        assert any(words in str(error) for words in told) or "ragged" in spec.tags


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_backward_alone(op, seed):
    from pallas_kernels.specs import plain

    specs = op.tagged("test")
    if op.name in ("rms_norm", "layer_norm"):  # whose kernels take rows and no residual
        specs = [spec for spec in specs if not spec.arguments.get("residual") and len(spec.arguments["x"].shape) == 2]
    case = testing.make_case(op, specs[0], seed)
    got = op.backward("triton", plain(case.arguments), case.cotangents)
    expected = op.backward("xla", plain(case.arguments), case.cotangents)
    for value, want in zip(got, jax.tree.leaves(expected), strict=True):
        error = jnp.linalg.norm((value - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
        assert error < 1e-2
