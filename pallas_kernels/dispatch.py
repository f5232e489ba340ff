"""Which implementation of an operation runs.

An explicit request runs or raises: `ValueError` for a name that no operation knows, `NotImplementedError` with the
reason where the implementation cannot run here. No request takes the first of the operation's preferences that can, and
`"xla"` always can.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
from jax.export import is_symbolic_dim

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "cudnn")
"""Every implementation name that some operation has or may have."""

Implementation = str | Sequence[str] | None
"""What callers pass: one name, several in order of preference, or None for the best known.

Kernels have first derivatives, backward. Second ones, and `jax.jvp`, are those of "xla" alone: on a GPU ask for it.
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
        runnable = (name for name in order if name in support and support[name]() is None)
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
            reason = _reason(support[name])
        if reason is None:
            return name
        reasons.append(f"{name!r}: {reason}")
    raise NotImplementedError(
        f"{operation} cannot run as asked. {'; '.join(reasons)}. Pass implementation=None for the best that runs here."
    )


def _reason(support: Support) -> str | None:
    if _has_symbolic_sizes(support):
        return "the kernels are compiled for sizes, and one is known only when the program runs (`jax.export`)"
    return support()


def _has_symbolic_sizes(support: Support) -> bool:
    arguments = (support.args, support.keywords) if isinstance(support, partial) else ()
    return any(is_symbolic_dim(size) for leaf in jax.tree.leaves(arguments) for size in getattr(leaf, "shape", ()))


def _check_known(operation: str, name: str, support: Mapping[str, Support]) -> None:
    if name in IMPLEMENTATIONS:
        return
    close = difflib.get_close_matches(str(name).lower(), IMPLEMENTATIONS, n=2)
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(f"{operation}: unknown implementation {name!r}. {hint}It has {_listed(support)}.")


def _listed(support: Mapping[str, Support]) -> str:
    return ", ".join(map(repr, support))
