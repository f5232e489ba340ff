"""Splits Flax NNX modules among a function's arguments into arrays, and keeps what a call changes in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


def _nnx() -> Any:
    """Returns `flax.nnx` if it is imported; without it there are no modules."""
    return sys.modules.get("flax.nnx")


def is_module(each: Any) -> bool:
    """Returns whether an object has variables that a function may change."""
    nnx = _nnx()
    return nnx is not None and isinstance(each, nnx.Module | nnx.Variable | nnx.Optimizer | nnx.Rngs | nnx.RngStream)


def bound_module(fn: Callable[..., Any]) -> Any:
    """Returns the module that a function is, or is a method of; None for others."""
    owner = fn if is_module(fn) else getattr(fn, "__self__", None)
    return owner if is_module(owner) else None


@dataclass(frozen=True)
class Modules:
    """The modules of some arguments, split into their structure and arrays.

    nodes: as the arguments have them. is_node: whether each leaf of the arguments is one.
    """

    nodes: tuple[Any, ...]
    is_node: tuple[bool, ...]
    graph: Any
    state_structure: Any
    count: int

    @staticmethod
    def of(arguments: Any) -> tuple[Modules, Any, list[Any]]:
        """Returns the modules, the arguments' structure, and all leaves: the modules' arrays, then the others."""
        leaves, structure = jax.tree.flatten(arguments, is_leaf=is_module)
        nodes, is_node = tuple(filter(is_module, leaves)), tuple(map(is_module, leaves))
        graph, state = _nnx().split(nodes) if nodes else (None, ())
        state_leaves, state_structure = jax.tree.flatten(state)
        modules = Modules(nodes, is_node, graph, state_structure, len(state_leaves))
        return modules, structure, [*state_leaves, *(leaf for leaf in leaves if not is_module(leaf))]

    def merged(self, structure: Any, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The modules with these leaves' arrays in their variables, and what they are to be compared with; the
        arguments."""
        own, rest = list(leaves[: self.count]), iter(leaves[self.count :])
        nodes = _nnx().merge(self.graph, jax.tree.unflatten(self.state_structure, own)) if self.nodes else ()
        given = iter(nodes)
        whole = [next(given) if is_node else next(rest) for is_node in self.is_node]
        return (nodes, own), jax.tree.unflatten(structure, whole)

    def changes(self, live: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        """Finds the variables that a call has changed, and their arrays.

        Raises:
            ValueError: the call has added or removed variables.
        """
        if not self.nodes:
            return (), []
        nodes, before = live
        _, state = _nnx().split(nodes)
        after, structure = jax.tree.flatten(state)
        if structure != self.state_structure:
            raise ValueError(
                "fuse: the function adds or removes variables of a module, which a traced function cannot; call it "
                "once without fuse, so that they are there."
            )
        changed = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old]
        return changed, [after[place] for place in changed]

    def update(self, changed: Sequence[int], arrays: Sequence[Any]) -> None:
        """Gives the caller's modules what a call has changed."""
        if not changed:
            return
        _, state = _nnx().split(self.nodes)
        leaves, structure = jax.tree.flatten(state)
        for place, array in zip(changed, arrays, strict=True):
            leaves[place] = array
        _nnx().update(self.nodes, jax.tree.unflatten(structure, leaves))
