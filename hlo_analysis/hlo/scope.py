"""From JAX's op names to the model's own scopes.

JAX 0.11 writes the name stack as a path: `jit(f)/transpose(jvp(block))/mlp/dot_general`. A transformation wraps the
first component of what stands inside it (`jvp(block)/mlp`, or `jvp()` where there is none), control flow and
rematerialisation add components of their own, and the last component is the primitive.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hlo_analysis.records import Phase

_TRANSFORMS = frozenset(("jvp", "transpose", "vmap", "pmap", "linearize", "xmap", "remat", "checkpoint", "custom_vjp"))
_FUNCTIONS = frozenset(("jit", "pjit", "xla_call", "core_call", "named"))
"""Wrappers whose inside is the name of a function, not a scope."""
_PLUMBING = frozenset(
    (
        "checkpoint",
        "rematted_computation",
        "remat",
        "remat2",
        "shard_map",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    )
)
_REMATERIALISATION = frozenset(("checkpoint", "remat", "remat2"))
_NAMED_KERNEL = "mpmd_map"
"""The primitive of a Mosaic GPU kernel: Pallas puts the kernel's name before it, which is no scope of the model.

A `pallas_call` may have no name, so that what stands before it may be a scope: it stays.
"""
_CALL = ".__call__"
"""A framework's own call of a module, inside the module's scope."""
_LOOP_PARTS = frozenset(("body", "cond", "body_pred"))
_BRANCH = re.compile(r"branch_\d+_fun", re.ASCII)
_EINSUM = re.compile(r"[A-Za-z.,\s]*->[A-Za-z.\s]*", re.ASCII)
_OPENERS = "([{"
_CLOSERS = ")]}"


@lru_cache(maxsize=65536)
def scope_of(op_name: str) -> tuple[str, Phase]:
    """The model's named scopes of an op name, joined by '/', and the phase.

    Stripped are functions (`jit(f)`), transformations, control flow (`while/body`, `cond/branch_1_fun`, a scan's
    `eval_jaxpr`), rematerialisation, einsum's equations, and the primitive at the end. Where XLA merged several names
    (`a/add;b/mul`) the first counts. Backward is whatever holds `transpose(`, recomputation with it.

    >>> scope_of("jit(f)/block/mlp/dot_general")
    ('block/mlp', 'forward')
    >>> scope_of("jit(f)/transpose(jvp(block))/mlp/dot_general")
    ('block/mlp', 'backward')
    """
    op_name = op_name.partition(";")[0]
    phase: Phase = "backward" if "transpose(" in op_name else "forward"
    components = [part for component in _split(op_name) for part in _unwrap(component)]
    scopes: list[str] = []
    previous = before_previous = ""
    rematerialised = 0  # scopes that stood before the last rematerialisation
    for index, component in enumerate(components):
        if component in _REMATERIALISATION and phase == "backward":
            _drop_replay(scopes, rematerialised)
            rematerialised = len(scopes)
        if index == len(components) - 1:
            break
        following = components[index + 1]
        is_control_flow = (
            (component == "while" and following in _LOOP_PARTS)
            or (component == following == "while")  # the parameter of a body, as inlining names it
            or (component == "cond" and _BRANCH.fullmatch(following))
            or (previous == "while" and component in _LOOP_PARTS)
            or (previous == "cond" and _BRANCH.fullmatch(component))
            or (component == "eval_jaxpr" and previous == "body" and before_previous == "while")
        )
        is_plumbing = is_control_flow or component in _PLUMBING or component.endswith(_CALL)
        if component and not is_plumbing and not _EINSUM.fullmatch(component):
            scopes.append(component)
        before_previous, previous = previous, component
    if components[-1] == _NAMED_KERNEL and scopes:
        scopes.pop()
    return "/".join(scopes), phase


def _split(path: str) -> list[str]:
    """Components of a path; a slash inside brackets does not separate."""
    parts: list[str] = []
    depth = start = 0
    for index, char in enumerate(path):
        if char in _OPENERS:
            depth += 1
        elif char in _CLOSERS:
            depth = max(depth - 1, 0)
        elif char == "/" and depth == 0:
            parts.append(path[start:index])
            start = index + 1
    if depth:  # a scope with a bracket that never closes
        return path.split("/")
    return [*parts, path[start:]]


def _unwrap(component: str) -> list[str]:
    """The components inside the transformations around one: `transpose(jvp(a/b))` gives a, b; `jit(f)` gives ''.

    The empty name keeps the place of what was stripped, so that what stood around it does not seem adjacent.
    """
    while component.endswith(")"):
        wrapper, opened, inner = component[:-1].partition("(")
        if not opened or not (wrapper in _TRANSFORMS or wrapper in _FUNCTIONS):
            break
        if wrapper in _FUNCTIONS:
            return [""]
        component = inner
    return _split(component)


def _drop_replay(scopes: list[str], start: int) -> None:
    """Drop the second of two equal runs at the end of `scopes[start:]`.

    The backward of a rematerialised function carries the scopes around it twice, once for each pass:
    `transpose(jvp(a))/b/jvp(a)/b/checkpoint/...`.
    """
    for length in range((len(scopes) - start) // 2, 0, -1):
        if scopes[-length:] == scopes[-2 * length : -length]:
            del scopes[-length:]
            return
