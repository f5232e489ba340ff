"""What jax 0.11.2's Mosaic GPU interpreter lacks of unions, for tests only: members with entries in the same places.

The interpreter takes two uses of a union's members for uses of the same memory, wherever in the members they are.
Members of other types (attention's shares of dquery) begin at the same place in each entry along their first axes: uses
of two entries are none of the same memory.
"""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax._src.pallas.mosaic_gpu.core import AbstractRefUnion
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

_AXES = 2
"""The most axes along which entries lie."""


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    entries = _Entries()
    monkeypatch.setattr(jaxpr_interpret, "union_members", partial(_members, jaxpr_interpret.union_members, entries))
    plain = GPURaceDetectionState._check_ref_union
    for name in ("check_read", "check_write"):
        monkeypatch.setattr(GPURaceDetectionState, name, entries.noting(getattr(GPURaceDetectionState, name)))
    monkeypatch.setattr(GPURaceDetectionState, "_check_ref_union", entries.by_entry(plain))


def _members(plain: Any, entries: _Entries, union: AbstractRefUnion) -> Any:
    members = plain(union)
    entries.axes = min(entries.axes, _entry_axes(members))
    return members


def _entry_axes(members: Any) -> int:
    """The number of first axes that all members share, with as many bytes for each entry along them."""
    avals = list(map(jaxpr_interpret._member_inner_aval, members))

    def are_alike(axes: int) -> bool:
        return len({(aval.shape[:axes], math.prod(aval.shape[axes:]) * aval.dtype.itemsize) for aval in avals}) == 1

    return next((axes for axes in range(_AXES, 0, -1) if are_alike(axes)), 0)


@dataclass
class _Entries:
    """axes: along which entries of all unions that were seen lie."""

    axes: int = _AXES
    _noted: Any = field(default_factory=threading.local)

    def noting(self, plain: Any) -> Any:
        """A check that notes the range of the access for `by_entry`, which the same thread calls from within."""

        def check(state, thread, clock, buffer_key, access, source_info=None):
            self._noted.range = access.range
            plain(state, thread, clock, buffer_key, access, source_info)

        return check

    def by_entry(self, plain: Any) -> Any:
        """The check of unions, for each entry of the access as of a union of its own."""

        def check(state, thread, clock, buffer_key, is_write, source_info):
            with state.lock:
                membership = state.ref_union_members.get(buffer_key)
            if membership is None or not self.axes:
                plain(state, thread, clock, buffer_key, is_write, source_info)
                return
            union, group = membership
            lead = [_numbers(each) for each in self._noted.range[: self.axes]]
            for place in itertools.product(*lead):
                with state.lock:
                    state.ref_union_members[buffer_key, place] = ((union, place), group)
                plain(state, thread, clock, (buffer_key, place), is_write, source_info)

        return check


def _numbers(index: slice | int) -> range:
    return range(index, index + 1) if isinstance(index, int) else range(index.start, index.stop, index.step or 1)
