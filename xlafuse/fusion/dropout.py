"""Finds dropout in a program."""

from __future__ import annotations

from xlafuse.fusion.graph import LAYOUTS, Value
from xlafuse.fusion.terms import ELEMENTWISE


def drops(value: Value) -> bool:
    """Returns whether what reads a value sets elements of it to zero at random, perhaps after it scales them."""
    for user in value.users:
        if user.primitive in ("mul", "select_n") and any(map(is_random, user.inputs)):
            return True
        if (user.primitive in LAYOUTS or user.primitive == "div") and any(map(drops, user.outputs)):
            return True
    return False


def is_random(value: Value) -> bool:
    """Returns whether random bits decide a value."""
    pending, seen = [value], {value}
    while pending and len(seen) < 40:
        each = pending.pop(0)
        if each.primitive in ("random_bits", "threefry2x32"):
            return True
        if each.equation is not None and (each.primitive in LAYOUTS or each.primitive in _OF_MASKS):
            new = [inner for inner in each.equation.inputs if inner not in seen]
            seen.update(new)
            pending += new
    return False


_OF_MASKS = ELEMENTWISE | {"mul", "div", "sub", "add", "shift_right_logical", "bitcast_convert_type"}
"""Primitives between random bits and a mask."""


def is_dropped(value: Value) -> bool:
    """Returns whether random bits decide which elements of a value are zero."""
    pending, seen = [(value, False)], set()
    while pending and len(seen) < 40:
        each, is_chosen = pending.pop(0)
        if each in seen or each.equation is None:
            continue
        seen.add(each)
        if is_chosen and each.primitive in ("random_bits", "threefry2x32"):
            return True
        is_inner = is_chosen or each.primitive == "select_n"
        if is_inner or each.primitive in LAYOUTS:
            pending += [(inner, is_inner) for inner in each.equation.inputs]
    return False
