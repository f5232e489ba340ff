"""Functions that call back to Python lower for a GPU that is not there, and for nothing else than before."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from hlo_analysis import analyze, capture
from hlo_analysis.capture.lowering import lower
from hlo_analysis.targets import load_target

VALUES = jax.ShapeDtypeStruct((64,), jnp.float32)


def printed(values: jax.Array) -> jax.Array:
    jax.debug.print("{}", values.sum())
    return jnp.sin(values)


def pure(values: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda given: given, VALUES, 2 * values)


def ordered(values: jax.Array) -> jax.Array:
    return io_callback(lambda given: given, VALUES, 2 * values, ordered=True)


@pytest.mark.parametrize("function", [printed, pure, ordered])
def test_calls_of_python_lower_for_a_gpu_that_is_not_there(function: Callable[[jax.Array], jax.Array]) -> None:
    assert b"xla_ffi_python_gpu_callback" in lower(function, (VALUES,), target=load_target("h200")).bytecode
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="different from the lowering platform"):
            jax.jit(function).trace(VALUES).lower(lowering_platforms=("cuda",))


def test_calls_of_python_are_compiled_and_explained(compiler: None) -> None:
    analysis = analyze(capture(printed, VALUES))
    (call,) = (launch for launch in analysis.launches if launch.kind == "custom_call")
    (waiting,) = (each for each in analysis.hotspots if each.waits_for_host)
    assert waiting.launches == (call.index,)
    assert waiting.cause.startswith("A call back to Python on the host")
    reasons = [decision.reason for decision in analysis.decisions if decision.consumer == call.name]
    assert [reason.partition("[")[2] for reason in reasons] == [f"{call.name} is a call back to Python on the host]"]
    assert not any(call.index in (missed.producer, *missed.consumers) for missed in analysis.missed)
