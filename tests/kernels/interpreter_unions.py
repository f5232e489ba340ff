"""What jax 0.11.2's Mosaic GPU interpreter lacks of unions, for tests only: members that are one array.

The interpreter gives each member memory of its own, and refuses to read by one what was written by another. Our kernels
have one array under two layouts that put its elements in the same places (`row_tiles` of attention).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax._src.pallas.mosaic_gpu.core import AbstractRefUnion
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    members, resolved = jaxpr_interpret.union_members, jaxpr_interpret.resolve_ref
    monkeypatch.setattr(jaxpr_interpret, "union_members", partial(_members, members))
    monkeypatch.setattr(jaxpr_interpret, "resolve_ref", partial(_resolved, members, resolved))


def _members(plain: Any, union: AbstractRefUnion) -> Any:
    members = plain(union)
    return members[:1] if _is_one_array(members) else members


def _resolved(plain_members: Any, plain: Any, aval: Any, key: Any, transforms: tuple[Any, ...]) -> Any:
    if isinstance(aval, AbstractRefUnion) and _is_one_array(plain_members(aval)):
        return key[0], tuple(transforms[1:])
    return plain(aval, key, transforms)


def _is_one_array(members: Any) -> bool:
    shapes = {(aval.shape, aval.dtype) for aval in map(jaxpr_interpret._member_inner_aval, members)}
    return len(shapes) == 1
