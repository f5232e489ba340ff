"""Converts between JAX arrays and PyTorch tensors, and turns PyTorch calls into candidates.

Both frameworks use the GPU in one process, so that all candidates take turns under the same clocks. JAX must then leave
memory to PyTorch: `xlafuse bench` sets XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]

from pallas_kernels.specs import Arguments, plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers import arguments_of, is_joint
from xlafuse.bench.timing import Candidate

Function = Callable[..., tuple[Any, ...]]
"""Maps an operation's arguments as tensors to its outputs."""
Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""Maps an operation's arguments as tensors to the arguments that the peer takes."""


def to_torch(array: jax.Array) -> Any:
    """Copies an array into a tensor, since some peers write into their inputs."""
    return torch.from_dlpack(array).clone()


def to_jax(tensor: Any) -> jax.Array:
    """Returns a JAX array that shares the tensor's memory."""
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def tensors(arguments: Arguments) -> dict[str, Any]:
    """Converts arrays to tensors, keeps static values, and drops JAX's random keys."""
    return {
        name: to_torch(value) if isinstance(value, jax.Array) else value
        for name, value in plain(arguments).items()
        if not (isinstance(value, jax.Array) and value.dtype == jnp.uint32)
    }


def unchanged(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments unchanged; the default `Prepare`."""
    return arguments


def candidate(
    name: str, phase: str, function: Function, cases: Sequence[Case], prepare: Prepare = unchanged
) -> tuple[Candidate, dict[str, jax.Array]]:
    """Returns a phase of an operation's function as a candidate, and its first results.

    prepare: changes the arguments, outside the timing.
    """
    torch.cuda.empty_cache()  # frees the last shape's memory, which JAX shares
    given = [arguments_of(name, function, prepare(tensors(case.arguments))) for case in cases]
    if phase == "backward":
        return _backward(name, function, cases, given)

    def call(arguments):
        with torch.no_grad():
            return function(**arguments)

    candidate, results = candidate_of(name, call, [(arguments,) for arguments in given])
    return candidate, {f"output {i}": to_jax(result) for i, result in enumerate(results)}


def _backward(
    name: str, function: Function, cases: Sequence[Case], given: Sequence[dict[str, Any]]
) -> tuple[Candidate, dict[str, jax.Array]]:
    """Returns the backward pass of the function of the arguments `given`.

    It runs on the graph of one forward pass. If the benchmark times both passes together (`peers.is_joint`), it runs
    both. Gradients are taken of the differentiable arguments. A residual's gradient is left out where it equals the
    gradient of x or of the output, which is everywhere but after dropout.
    """
    left_out = () if cases[0].op.name == "dropout_residual_norm" else ("residual",)
    names = [name for name in cases[0].differentiable if name not in left_out]
    inputs = []
    for case, arguments in zip(cases, given, strict=True):
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

    candidate, results = candidate_of(name, call, inputs)
    return candidate, {f"gradient of {name}": to_jax(result) for name, result in zip(names, results, strict=True)}


def candidate_of(name: str, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[Candidate, list[Any]]:
    """Returns the candidate, and copies of the tensors that it returns for its first inputs."""
    results = [result.detach().clone() for result in call(*inputs[0])]
    torch.cuda.synchronize()
    return Candidate(name=name, kind="peer", call=call, inputs=inputs, wait=_wait), results


def _wait(_: Any) -> None:
    torch.cuda.synchronize()
