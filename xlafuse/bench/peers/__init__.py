"""The same operations by other libraries, for comparison. Each library is loaded when asked for, and may be missing.

A peer's module has `candidate(name, operation, phase, cases)`. It returns a `timing.Candidate` and the results of its
first call as JAX arrays, by the names that `pallas_kernels.testing` gives them ("output 0", "gradient of x"), and
raises NotImplementedError for what the library does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "torch_compile": "torch_ops",
    "torch_max_autotune": "torch_ops",
    "torch_eager": "torch_ops",
    "liger": "liger",
    "cudnn": "jax_attention",
    "cudnn_dense_mask": "jax_attention",
    "jla": "jla",
    "jax_mosaic": "jax_attention",
    "xla_bf16": "xla_bf16",
}
PEERS = ("xla", "jax_triton", *_MODULES)
OF_THE_OPERATION = ("xla", "jax_triton")
"""Implementations of the operation: "xla" is always timed, "jax_triton" is the implementation "triton"."""

ALWAYS = {("quantized_linear", "forward"): ("xla_bf16",)}
"""Peers that are timed beside an operation in a phase without being asked for: its goal is against them."""

FALLBACKS = {"torch_compile": "torch_eager", "torch_max_autotune": "torch_eager"}
"""What is timed where a peer fails, as Inductor does without a C compiler."""


def is_joint(case: Case) -> bool:
    """Whether the benchmark's backward phase is the loss and its gradient together, as a training step has them."""
    return plain(case.arguments).get("reduction", "none") != "none"


def as_trained(case: Case) -> Case:
    """Where loss and gradient are computed together, with a cotangent of one, and else the case itself."""
    return replace(case, cotangents=jax.tree.map(jnp.ones_like, case.cotangents)) if is_joint(case) else case


_DROPOUT_RATES = ("rate", "dropout_rate")


def without_dropout(case: Case) -> Case:
    """The case with nothing dropped, whose results another library can have; the case itself where it drops nothing.

    Every library draws a mask of its own, so that results with dropout cannot be compared.
    """
    rates = {name: Static(0.0) for name in _DROPOUT_RATES if plain(case.arguments).get(name)}
    return replace(case, arguments={**case.arguments, **rates}) if rates else case


@dataclass(frozen=True)
class Peer:
    """A library, and the module that calls it."""

    name: str
    module: Any

    def candidate(self, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
        """See this package's docstring."""
        return self.module.candidate(self.name, operation, phase, cases)


def load(name: str) -> Peer:
    """Loads the module of a peer.

    Raises:
        UnknownNameError: no such peer.
        ImportError: its library is not installed.
    """
    check_names((name,))
    return Peer(name, import_module(f"xlafuse.bench.peers.{_MODULES[name]}"))


def check_names(names: Sequence[str]) -> None:
    """Raises UnknownNameError for a name that is not in `PEERS`."""
    for name in names:
        if name not in PEERS:
            raise UnknownNameError("peer", name, PEERS)
