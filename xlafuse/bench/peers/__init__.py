"""The same operations in other libraries, for comparison. A library is imported on first use and may be missing.

A peer's module has `candidate(name, operation, phase, cases)`. It returns a `timing.Candidate` and the results of its
first call as JAX arrays, by the names of `pallas_kernels.testing` ("output 0", "gradient of x"). It raises
NotImplementedError for an operation that the library lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.specs import Static, plain
from pallas_kernels.testing import Case
from xlafuse.bench.timing import Candidate
from xlafuse.errors import UnknownNameError

_MODULES = {
    "torch_compile": "torch_functions",
    "torch_eager": "torch_functions",
    "liger": "liger",
    "cudnn": "jax_attention",
    "jla": "jax_attention",
    "jax_mosaic": "jax_attention",
    "fa3": "flash_attention",
    "fa4": "flash_attention",
    "fa4_deterministic": "flash_attention",
    "quack": "quack_kernels",
    "xla_bf16": "xla_bf16",
}
PEERS = ("xla", "jax_triton", *_MODULES)
OF_THE_OPERATION = ("xla", "jax_triton")
"""Peers that are implementations of the operation: "xla" is always timed, "jax_triton" is "triton"."""


def is_joint(case: Case) -> bool:
    """Tells whether the backward phase computes loss and gradient together, as a training step does."""
    return plain(case.arguments).get("reduction", "none") != "none"


def as_trained(case: Case) -> Case:
    """Returns the case with cotangents of one if loss and gradient are computed together, else the case itself."""
    return replace(case, cotangents=jax.tree.map(jnp.ones_like, case.cotangents)) if is_joint(case) else case


_DROPOUT_RATES = ("rate", "dropout_rate")


def without_dropout(case: Case) -> Case:
    """Returns the case without dropout, or the case itself if it drops nothing.

    Every library draws its own mask, so that results with dropout cannot be compared.
    """
    rates = {name: Static(0.0) for name in _DROPOUT_RATES if plain(case.arguments).get(name)}
    return replace(case, arguments={**case.arguments, **rates}) if rates else case


def arguments_of(library: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an operation's arguments ask of a library's function: those that are not None, False or 0.0.

    Raises NotImplementedError unless its signature takes them: what it has no parameter for, the library lacks.
    """
    asked = {
        name: value
        for name, value in arguments.items()
        if value is not None and value is not False and not (isinstance(value, float) and value == 0)
    }
    try:
        inspect.signature(function).bind(**asked)
    except TypeError as error:
        raise NotImplementedError(f"{library} is not compared with these arguments: {error}") from None
    return asked


def call_with(library: str, function: Callable[..., jax.Array], arguments: Mapping[str, Any]) -> jax.Array:
    """Calls a library's function of JAX arrays with an operation's arguments, without its random keys."""
    given = {name: value for name, value in plain(arguments).items() if name != "dropout_key"}
    return function(**arguments_of(library, function, given))


def jitted(
    name: str, function: Callable[..., jax.Array], arguments: Sequence[Mapping[str, Any]]
) -> tuple[Candidate, Mapping[str, jax.Array]]:
    """Returns the forward pass of a library's function of JAX arrays as a candidate, and its first result."""
    call, inputs = jax.jit(lambda given: call_with(name, function, given)), [(given,) for given in arguments]
    return Candidate(name=name, kind="peer", call=call, inputs=inputs), {"output 0": call(*inputs[0])}


@dataclass(frozen=True)
class Peer:
    """A library and the module that calls it."""

    name: str
    module: Any

    def candidate(self, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
        """Returns the candidate and its first results; see the package's docstring."""
        return self.module.candidate(self.name, operation, phase, cases)


def load(name: str) -> Peer:
    """Loads a peer's module.

    Raises:
        UnknownNameError: there is no such peer.
        ImportError: its library is not installed.
    """
    check_names((name,))
    return Peer(name, import_module(f"xlafuse.bench.peers.{_MODULES[name]}"))


def check_names(names: Sequence[str]) -> None:
    """Raises UnknownNameError for a name that is not in `PEERS`."""
    for name in names:
        if name not in PEERS:
            raise UnknownNameError("peer", name, PEERS)
