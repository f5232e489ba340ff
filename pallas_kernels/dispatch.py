"""Which implementation of an operation runs.

An explicit request runs or raises: `ValueError` for a name that no operation knows, `NotImplementedError` with the
reason where the implementation cannot run here. No request takes the first of the operation's preferences that can, and
`"xla"` always can.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.export import is_symbolic_dim

from pallas_kernels.primitives.platform import mapped_mesh_axes

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "cudnn")
"""Every implementation name that some operation has or may have."""

_OF_ONE_DEVICE = ("mosaic", "triton")

Implementation = str | Sequence[str] | None
"""What callers pass: one name, several in order of preference, or None for the best known.

Kernels have first derivatives, backward. Second ones, and `jax.jvp`, are those of "xla" alone: on a GPU ask for it.
A kernel sees one device: arrays spread over several belong into `jax.shard_map`. Outside it None takes "xla" where the
mesh's axes are explicit; of automatic ones a trace knows nothing, and XLA brings whole arrays to every device.
"""

Support = Callable[[], str | None]
"""Says why an implementation cannot run on the arguments at hand, or None where it can."""


def choose(
    operation: str,
    requested: Implementation,
    support: Mapping[str, Support],
    *,
    preferred: Sequence[str] | Callable[[], Sequence[str]] = (),
) -> str:
    """The name of the implementation to run.

    Args:
        operation: the public function's name, for messages.
        requested: the caller's `implementation=`.
        support: the operation's implementations; `"xla"` must be among them. The others' are partials of the arguments
            that they look at.
        preferred: the order tried where nothing was requested, before `"xla"`, or what gives it; asked only then.

    Raises:
        TypeError: `requested` is no name and no sequence.
        ValueError: a name that no operation knows, or an empty sequence.
        NotImplementedError: nothing requested can run; the message says why, for each.
    """
    if requested is None:
        if any(map(_has_symbolic_sizes, support.values())):
            return "xla"
        order = preferred() if callable(preferred) else preferred
        # A tuned table may name what the operation does not have.
        runnable = (name for name in order if name in support and _reason(name, support[name]) is None)
        return next(runnable, "xla")
    if not isinstance(requested, str | Sequence):
        raise TypeError(f"{operation}: implementation must be a name, a sequence of names or None, got {requested!r}.")
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    if not names:
        raise ValueError(f"{operation}: implementation is an empty sequence; name one of {_listed(support)}, or None.")
    for name in names:
        _check_known(operation, name, support)
    reasons = []
    for name in names:
        reason = f"{operation} has none of that name, only {_listed(support)}"
        if name in support:
            reason = _reason(name, support[name])
        if reason is None:
            return name
        reasons.append(f"{name!r}: {reason}")
    raise NotImplementedError(
        f"{operation} cannot run as asked. {'; '.join(reasons)}. Pass implementation=None for the best that runs here."
    )


def _reason(name: str, support: Support) -> str | None:
    if name == "xla":
        return None
    if _has_symbolic_sizes(support):
        return "the kernels are compiled for sizes, and one is known only when the program runs (`jax.export`)"
    if name in _OF_ONE_DEVICE and (axes := _mesh_axes(support)):
        return (
            f"an array is spread over {', '.join(map(repr, axes))} of an explicit mesh, and a kernel sees one device; "
            "call the operation inside jax.shard_map"
        )
    return support()


def _has_symbolic_sizes(support: Support) -> bool:
    return any(is_symbolic_dim(size) for leaf in _arguments(support) for size in getattr(leaf, "shape", ()))


def _mesh_axes(support: Support) -> tuple[str, ...]:
    """Explicit axes of the mesh that one of the arrays, or what `jax.vmap` maps, is spread over. Of automatic ones a
    trace knows nothing."""
    specs = (jax.typeof(leaf).sharding.spec for leaf in _arguments(support) if isinstance(leaf, jax.Array))
    return tuple(sorted({str(axis) for axis in jax.tree.leaves([tuple(spec) for spec in specs])} | mapped_mesh_axes()))


def _arguments(support: Support) -> list[Any]:
    return jax.tree.leaves((support.args, support.keywords)) if isinstance(support, partial) else []


def _check_known(operation: str, name: str, support: Mapping[str, Support]) -> None:
    if name in IMPLEMENTATIONS:
        return
    close = difflib.get_close_matches(str(name).lower(), IMPLEMENTATIONS, n=2)
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(f"{operation}: unknown implementation {name!r}. {hint}It has {_listed(support)}.")


def _listed(support: Mapping[str, Support]) -> str:
    return ", ".join(map(repr, support))
