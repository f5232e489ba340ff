"""Finds dropout in a program."""

from __future__ import annotations

import numpy as np

from xlafuse.fusion.graph import LAYOUTS, Value, before
from xlafuse.fusion.terms import ELEMENTWISE

_BITS = ("random_bits", "threefry2x32")
_OF_MASKS = ELEMENTWISE | LAYOUTS | {"mul", "div", "sub", "add", "shift_right_logical", "bitcast_convert_type"}
"""Primitives that turn random bits into a mask."""
_REACH = 40


def is_random(value: Value) -> bool:
    """Returns whether random bits decide a mask, which may be scaled."""
    masks = (each for each in before(value, LAYOUTS | {"mul", "div"}, _REACH) if each.dtype == np.bool_)
    return any(each.primitive in _BITS for mask in masks for each in before(mask, _OF_MASKS, _REACH))


def is_dropped(value: Value) -> bool:
    """Returns whether random bits decide which elements of a value are zero."""
    choices = (each.equation for each in before(value, LAYOUTS, _REACH) if each.primitive in ("mul", "select_n"))
    return any(is_random(each) for choice in choices if choice is not None for each in choice.inputs)
