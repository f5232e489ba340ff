"""JAX arrays as PyTorch tensors and back, and PyTorch calls as something to time.

Both frameworks use the GPU in one process, so that all candidates take turns under the same clocks. JAX must then leave
memory to PyTorch: XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment, which `xlafuse bench` sees to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]

from pallas_kernels.specs import Arguments, plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers import is_joint
from xlafuse.bench.timing import Candidate

Function = Callable[..., tuple[Any, ...]]
"""From an operation's arguments as tensors to its outputs."""
Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""From an operation's arguments as tensors to those that a function is called with."""


def to_torch(array: jax.Array) -> Any:
    """A tensor with a copy of its own: some peers write into their inputs."""
    return torch.from_dlpack(array).clone()


def to_jax(tensor: Any) -> jax.Array:
    """A JAX array on the tensor's memory."""
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def tensors(arguments: Arguments) -> dict[str, Any]:
    """Arguments with tensors for arrays; static values as they are; without JAX's random keys."""
    return {
        name: to_torch(value) if isinstance(value, jax.Array) else value
        for name, value in plain(arguments).items()
        if not (isinstance(value, jax.Array) and value.dtype == jnp.uint32)
    }


def unchanged(arguments: dict[str, Any]) -> dict[str, Any]:
    """What prepares arguments where there is nothing to prepare."""
    return arguments


def forward_candidate(
    name: str, function: Function, cases: Sequence[Case], prepare: Prepare = unchanged
) -> tuple[Candidate, dict[str, jax.Array]]:
    """The forward pass without gradients, and its first results. prepare: changes the arguments first."""

    def call(arguments):
        with torch.no_grad():
            return function(**arguments)

    torch.cuda.empty_cache()  # what the last shape needed: JAX allocates from the same memory
    inputs = [(prepare(tensors(case.arguments)),) for case in cases]
    candidate, results = _ran_once(name, call, inputs)
    return candidate, {f"output {i}": result for i, result in enumerate(results)}


def backward_candidate(
    name: str, function: Function, cases: Sequence[Case], prepare: Prepare = unchanged
) -> tuple[Candidate, dict[str, jax.Array]]:
    """The backward pass alone, of the graph that one forward pass left, and its first results; both passes where the
    benchmark times them together (`peers.is_joint`).

    Gradients are taken of the arguments that have one; of a residual none where it is the gradient of x or of the
    output: everywhere but after dropout.
    """
    torch.cuda.empty_cache()
    left_out = () if cases[0].op.name == "dropout_residual_norm" else ("residual",)
    names = [name for name in cases[0].differentiable if name not in left_out]
    inputs = []
    for case in cases:
        arguments = prepare(tensors(case.arguments))
        leaves = [arguments[name].requires_grad_() for name in names]
        cotangents = [to_torch(cotangent) for cotangent in case.cotangents]
        outputs = None if is_joint(case) else function(**arguments)
        inputs.append((arguments, outputs, leaves, cotangents))

    def call(arguments, outputs, leaves, cotangents):
        is_kept = outputs is not None
        outputs = outputs if is_kept else function(**arguments)
        pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
        differentiated, pulled = zip(*pairs, strict=True)
        return torch.autograd.grad(differentiated, leaves, pulled, retain_graph=is_kept)

    candidate, results = _ran_once(name, call, inputs)
    return candidate, {f"gradient of {name}": result for name, result in zip(names, results, strict=True)}


def _ran_once(
    name: str, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]
) -> tuple[Candidate, tuple[jax.Array, ...]]:
    candidate, results = candidate_of(name, call, inputs)
    return candidate, tuple(to_jax(result) for result in results)


def candidate_of(name: str, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[Candidate, list[Any]]:
    """Something to time, and copies of the tensors that it gives for its first inputs."""
    results = [result.detach().clone() for result in call(*inputs[0])]
    torch.cuda.synchronize()
    return Candidate(name=name, kind="peer", call=call, inputs=inputs, wait=_wait, event_us=_event_us), results


def _wait(_: Any) -> None:
    torch.cuda.synchronize()


def _event_us(thunk: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    thunk()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
