"""Which implementation of an operation runs.

An explicit request runs or raises: `ValueError` for a name that no operation knows, `NotImplementedError` with the
reason where the implementation cannot run here. No request takes the first of the operation's preferences that can, and
`"xla"` always can.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import jax
from jax.export import is_symbolic_dim

from pallas_kernels.primitives.platform import mapped_mesh_axes

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "cudnn")
"""Every implementation name that some operation has or may have."""

_OF_ONE_DEVICE = ("mosaic", "triton")
_PACKAGES = ("pallas_kernels", "jax", "functools", "contextlib")

Implementation = str | Sequence[str] | None
"""What callers pass: one name, several in order of preference, or None for the best known.

Operations have first derivatives in reverse mode. Second ones and forward mode need "xla"; without it they raise.
A kernel sees one device: arrays spread over several belong into `jax.shard_map`. Outside it None takes "xla" where the
mesh's axes are explicit; of automatic ones a trace knows nothing, and XLA brings whole arrays to every device.
"""

Support = Callable[[], str | None]
"""Says why an implementation cannot run on the arguments at hand, or None where it can."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen for one call of an operation, and why nothing else.

    order: the names that were tried, the requested ones or the preferred, the first that runs being taken.
    reasons: of each implementation that the operation has, why it cannot run here, or None where it can.
    where: file and line of the call, in whose code neither JAX nor this package has a part.
    """

    operation: str
    order: tuple[str, ...]
    reasons: Mapping[str, str | None]
    where: str

    @property
    def taken(self) -> str | None:
        """The implementation's name; None where nothing that was requested runs."""
        return next((name for name in self.order if name in self.reasons and self.reasons[name] is None), None)

    @property
    def runnable(self) -> tuple[str, ...]:
        """All implementations that run here: in the order tried, then the others."""
        runs = [name for name, reason in self.reasons.items() if reason is None]
        return tuple(dict.fromkeys((*(name for name in self.order if name in runs), *runs)))

    def __str__(self) -> str:
        others = [f"{name} runs, too" for name in self.runnable if name != self.taken]
        others += [f"{name}: {reason}" for name, reason in self.reasons.items() if reason is not None]
        return f"{self.operation} at {self.where}: {self.taken or 'nothing'} ({'; '.join(others)})"


_listener: ContextVar[Callable[[Choice], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[Choice], None]) -> Iterator[None]:
    """Within, `listener` is told each choice before it is acted upon; what it raises ends the call."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[Choice]]:
    """Which implementation each operation takes that is traced within, and why none of the others.

        with recorded_choices() as choices:
            jax.eval_shape(step, parameters, batch)
        for choice in choices:
            print(choice)

    What `jax.jit` has traced before is not traced again, and then nothing is chosen. For a GPU that is not there, trace
    within `jax.sharding.use_abstract_mesh`, as `xlafuse kernels` does.
    """
    choices: list[Choice] = []
    with listening(choices.append):
        yield choices


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
        order = _preferred_order(support, preferred)
    else:
        order = _requested_order(operation, requested, support)
    if (listener := _listener.get()) is not None:
        reasons = {name: _reason(name, supports) for name, supports in support.items()}
        listener(Choice(operation=operation, order=order, reasons=reasons, where=_call_site()))
    refused = []
    for name in order:
        reason = f"{operation} has none of that name, only {_listed(support)}"
        if name in support:
            reason = _reason(name, support[name])
        if reason is None:
            return name
        refused.append(f"{name!r}: {reason}")
    raise NotImplementedError(
        f"{operation} cannot run as asked. {'; '.join(refused)}. Pass implementation=None for the best that runs here."
    )


def _preferred_order(
    support: Mapping[str, Support], preferred: Sequence[str] | Callable[[], Sequence[str]]
) -> tuple[str, ...]:
    if any(map(_has_symbolic_sizes, support.values())):
        return ("xla",)
    order = preferred() if callable(preferred) else preferred
    # A tuned table may name what the operation does not have.
    return (*(name for name in order if name in support), "xla")


def _requested_order(operation: str, requested: Any, support: Mapping[str, Support]) -> tuple[str, ...]:
    if not isinstance(requested, str | Sequence):
        raise TypeError(f"{operation}: implementation must be a name, a sequence of names or None, got {requested!r}.")
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    if not names:
        raise ValueError(f"{operation}: implementation is an empty sequence; name one of {_listed(support)}, or None.")
    for name in names:
        _check_known(operation, name, support)
    return names


def _call_site() -> str:
    """File and line of the innermost frame that is neither JAX's nor this package's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package(frame) in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


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
    close = difflib.get_close_matches(str(name).lower(), support, n=2)
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(f"{operation}: unknown implementation {name!r}. {hint}It has {_listed(support)}.")


def _listed(support: Mapping[str, Support]) -> str:
    return ", ".join(map(repr, support))
