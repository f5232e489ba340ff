"""Chooses which implementation of an operation runs.

A requested implementation runs or raises: `ValueError` for a name that no operation has, `NotImplementedError` with the
reason if it cannot run here. Without a request, the first of the operation's preferred implementations that can run is
taken. `"xla"` always can.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from pallas_kernels.primitives.call import KernelChosen, interpreter_lacks, is_open, is_settled
from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.cuts import part
from pallas_kernels.primitives.gradients import differentiated_as, with_backward
from pallas_kernels.primitives.partitioned import INSIDE_SHARD_MAP, automatic_axes, is_spread
from pallas_kernels.primitives.platform import mapped_mesh_axes

IMPLEMENTATIONS = ("mosaic", "triton", "xla", "cudnn")
"""The implementation names that callers may pass."""

_OF_ONE_DEVICE = ("mosaic", "triton")
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
_PACKAGES = ("pallas_kernels", "jax", "functools", "contextlib")

Implementation = str | Sequence[str] | None
"""The `implementation=` argument: one name, several in order of preference, or None for the best one known.

All implementations have first derivatives in reverse mode. Second derivatives and forward mode need "xla"; the others
raise.

Under `jax.jit`, devices that have parts of the arrays share an operation's work, each with its kernel; see
docs/several-gpus.md. Where they cannot, the call is left to XLA, with a `KernelWarning` when the program is compiled.
For arrays outside `jit` that are spread over devices, None takes "xla", and the name of a kernel raises: call the
operation inside `jax.shard_map`.
"""

Support = Callable[[], str | None]
"""Returns why an implementation cannot run on the call's arguments, or None if it can."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation chosen for one call of an operation, and why the others were not.

    A call that runs partly by XLA (see `partly_by_xla`) is recorded with its kernel.

    order: the requested or preferred names, in the order tried; the first that can run is taken.
    reasons: for each implementation of the operation, why it cannot run here, or None if it can.
    where: file and line of the call, in code that belongs neither to JAX nor to this package.
    parts: where devices share the work, one device's parts of the arrays and what is gathered, in words. Such choices
        are made when the program is compiled, forward and backward; under explicit axes when it is traced.
    """

    operation: str
    order: tuple[str, ...]
    reasons: Mapping[str, str | None]
    where: str
    parts: str = ""

    @property
    def taken(self) -> str | None:
        """The chosen implementation, or None if no requested one can run."""
        return next((name for name in self.order if name in self.reasons and self.reasons[name] is None), None)

    @property
    def runnable(self) -> tuple[str, ...]:
        """All implementations that can run here: first those tried, in that order, then the others."""
        runs = [name for name, reason in self.reasons.items() if reason is None]
        return tuple(dict.fromkeys((*(name for name in self.order if name in runs), *runs)))

    def __str__(self) -> str:
        others = [f"{name} runs, too" for name in self.runnable if name != self.taken]
        others += [f"{name}: {reason}" for name, reason in self.reasons.items() if reason is not None]
        on = f" on {self.parts}" if self.parts else ""
        return f"{self.operation} at {self.where}{on}: {self.taken or 'nothing'} ({'; '.join(others)})"


_listener: ContextVar[Callable[[Choice], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[Choice], None]) -> Iterator[None]:
    """Calls `listener` with each choice made inside the context, before the operation runs.

    An exception from `listener` ends the operation's call.
    """
    with assigned(_listener, listener):
        yield


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[Choice]]:
    """Records which implementation each operation takes while it is traced, and why not the others.

        with recorded_choices() as choices:
            jax.eval_shape(step, parameters, batch)
        for choice in choices:
            print(choice)

    A function that `jax.jit` has already traced is not traced again, so it records nothing. To trace for a GPU that is
    not present, use `jax.sharding.use_abstract_mesh`, as `xlafuse kernels` does.
    """
    choices: list[Choice] = []
    with listening(choices.append):
        yield choices


class _Chosen(Exception):
    """Ends a call as soon as its implementation is known; not an error."""


def choice(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Choice:
    """Returns what `function(*args, **kwargs)` takes on the device of the current trace, and why not the others.

        choice(linear, jax.ShapeDtypeStruct((8192, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 512), "bfloat16"))

    function: an operation, or a function whose first call of one is asked about. Nothing runs: arrays may be
        ShapeDtypeStructs.

    Raises:
        TypeError, ValueError: the operation rejects the arguments, or `function` calls none.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}
    made: list[Choice] = []

    def listener(choice: Choice) -> None:
        made.append(choice)
        raise _Chosen

    def call(arrays: Mapping[int, jax.Array]) -> None:
        args, kwargs = jax.tree.unflatten(structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        function(*args, **kwargs)

    with listening(listener), contextlib.suppress(_Chosen):
        jax.eval_shape(call, arrays)
    if not made:
        raise ValueError(f"expected a function that calls an operation of pallas_kernels, got {function!r}")
    return made[0]


def choose(
    operation: str,
    requested: Implementation,
    support: Mapping[str, Support],
    *,
    preferred: Sequence[str] | Callable[[], Sequence[str]] = (),
) -> str:
    """Returns the name of the implementation to run.

    Args:
        operation: the public function's name, for messages.
        requested: the caller's `implementation=`.
        support: the operation's implementations, each with its support function. `"xla"` must be among them. The other
            functions are `functools.partial`s of the arguments that they check.
        preferred: the names to try before `"xla"` if nothing was requested, or a function that returns them. The
            function is called only if nothing was requested.

    Raises:
        TypeError: `requested` is neither a name nor a sequence nor None.
        ValueError: `requested` is an empty sequence, or has a name that no operation has.
        NotImplementedError: no requested implementation can run; the message gives the reason for each.
    """
    if requested is None:
        order = _preferred_order(support, preferred)
    else:
        order = _requested_order(operation, requested, support)
    if (listener := _listener.get()) is not None and (part.get() or not is_settled(operation)):
        reasons = {name: _reason(operation, name, supports, requested) for name, supports in support.items()}
        parts, where = part.get() or ("", _call_site())
        listener(Choice(operation=operation, order=order, reasons=reasons, where=where, parts=parts))
    refused = []
    for name in order:
        reason = f"{operation} has none of that name, only {_listed(support)}"
        if name in support:
            reason = _reason(operation, name, support[name], requested)
        if reason is None:
            if name in _OF_ONE_DEVICE and is_open(operation):
                raise KernelChosen
            return name
        refused.append(f"{name!r}: {reason}")
    raise NotImplementedError(
        f"{operation} cannot run as asked. {'; '.join(refused)}. Pass implementation=None for the best that runs here."
    )


def partly_by_xla(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    forward: bool = False,
    gradient: bool = False,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns `kernel`, or a function of the same arrays that runs `reference` in part.

    For calls that name no implementation, where XLA was measured to be faster.

    forward: whether `reference` runs where no gradient is taken. gradient: whether it runs, both ways, where one is.
    backward: the kernel's backward pass, a function of the arrays and the cotangents, if it needs nothing else. Then
        `forward` holds for the forward pass of a gradient, too.
    """
    if forward == gradient:
        return reference if forward else kernel
    if forward and backward is not None:
        return with_backward(reference, backward)
    together, apart = (reference if is_xla else kernel for is_xla in (forward, gradient))
    return differentiated_as(apart, together)


def _preferred_order(
    support: Mapping[str, Support], preferred: Sequence[str] | Callable[[], Sequence[str]]
) -> tuple[str, ...]:
    if any(map(_has_symbolic_sizes, support.values())):
        return ("xla",)
    order = preferred() if callable(preferred) else preferred
    # A tuned table may name an implementation that the operation does not have.
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
    """Returns file and line of the innermost frame outside JAX and this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package(frame) in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _reason(operation: str, name: str, support: Support, requested: Implementation) -> str | None:
    if name == "xla":
        return None
    if _has_symbolic_sizes(support):
        return "the kernels are compiled for sizes, and one is known only when the program runs (`jax.export`)"
    is_asked = requested is not None or is_open(operation) or is_settled(operation)
    if name in _OF_ONE_DEVICE and (where := _spread_over(support, is_asked=is_asked)):
        return f"{where}, and {INSIDE_SHARD_MAP}"
    return support() or (interpreter_lacks(operation) if name == "mosaic" else None)


def _spread_over(support: Support, *, is_asked: bool) -> str | None:
    """Returns how the call's arrays are spread over devices, as far as a trace can tell; None if they are not.

    is_asked: whether a kernel may stand in a program that XLA partitions: one that is asked for does, with a warning,
    and one that runs on one device or on parts of the arrays alone.
    """
    if any(map(is_spread, _arguments(support))):
        return "an array is spread over several devices"
    if axes := _mesh_axes(support):
        return f"an array is spread over {_listed(axes)} of an explicit mesh"
    if not is_asked and (axes := automatic_axes()):
        return f"XLA spreads arrays over {_listed(axes)} of the mesh"
    return None


def _has_symbolic_sizes(support: Support) -> bool:
    return any(is_symbolic_dim(size) for leaf in _arguments(support) for size in getattr(leaf, "shape", ()))


def _mesh_axes(support: Support) -> tuple[str, ...]:
    """Returns the explicit mesh axes that shard one of the arrays or a dimension mapped by `jax.vmap`."""
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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
