"""Indices of array elements as expressions of index variables.

The element of `x.reshape(4, 6).T` at (i, j) is an element of x: which one is an index of x's axis in terms of i and j.
Broadcasts, reshapes, transpositions and slices thus only ever change indices, and two programs that lay arrays out
differently become the same formula.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Digit = tuple[int, int, int]
"""(variable, divisor, size): the number (variable // divisor) % size."""


@dataclass(frozen=True)
class Index:
    """A position on an axis: start + step * number. digits: the number's, the most significant first."""

    digits: tuple[Digit, ...] = ()
    start: int = 0
    step: int = 1

    @property
    def is_plain(self) -> bool:
        """Returns whether the position is the number itself."""
        return self.start == 0 and self.step == 1

    @property
    def size(self) -> int:
        """Returns how many positions it takes."""
        return math.prod(size for _, _, size in self.digits)

    def renamed(self, names: Mapping[int, int]) -> Index | None:
        """Returns the index with its variables renamed; None where one has no name."""
        if any(variable not in names for variable, _, _ in self.digits):
            return None
        return Index(joined([(names[v], divisor, size) for v, divisor, size in self.digits]), self.start, self.step)


Indices = tuple[Index, ...]
ZERO = Index()
_counter = itertools.count()


def variables(shape: Sequence[int]) -> Indices:
    """Returns a new variable for each axis; an axis of length 1 has one position."""
    return tuple(Index(((next(_counter), 1, int(size)),)) if size != 1 else ZERO for size in shape)


def joined(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    """Joins neighbouring digits of one variable, and leaves out digits of size 1."""
    result: list[Digit] = []
    for variable, divisor, size in digits:
        if size == 1:
            continue
        if result and result[-1][0] == variable and result[-1][1] == divisor * size:
            result[-1] = (variable, divisor, result[-1][2] * size)
        else:
            result.append((variable, divisor, size))
    return tuple(result)


def merged(indices: Sequence[Index], shape: Sequence[int]) -> Index | None:
    """Returns the index of axes that become one, in row-major order; None where that is no `Index`."""
    result, length = ZERO, 1
    for index, size in zip(indices, shape, strict=True):
        length *= size
        if not index.digits:
            result = Index(result.digits, result.start * size + index.start, result.step * size)
            continue
        if not result.digits:
            result = Index(index.digits, result.start * size + index.start, index.step)
        elif result.is_plain and index.is_plain and index.size == size:
            result = Index(joined((*result.digits, *index.digits)))
        else:
            return None
    return result if result.digits else Index((), result.start)


def split(index: Index, shape: Sequence[int]) -> Indices | None:
    """Returns the indices of the axes, of `shape`, that one axis becomes; None where one is no `Index`."""
    if not index.digits:
        return tuple(Index((), place) for place in unraveled(index.start, shape))
    if sum(size != 1 for size in shape) == 1:
        return tuple(index if size != 1 else ZERO for size in shape)
    if index.step != 1 and index.step == shape[-1] and 0 <= index.start < shape[-1]:
        outer = split(Index(index.digits), shape[:-1])
        return None if outer is None else (*outer, Index((), index.start))
    if not index.is_plain:
        return None
    rest, parts = list(index.digits), []
    for size in reversed(shape):
        own: list[Digit] = []
        while size > 1:
            if not rest:
                return None
            variable, divisor, whole = rest.pop()
            taken = math.gcd(whole, size)
            if taken != min(whole, size):
                return None
            own.insert(0, (variable, divisor, taken))
            if whole > taken:
                rest.append((variable, divisor * taken, whole // taken))
            size //= taken
        parts.insert(0, Index(joined(own)))
    return tuple(parts) if not rest else None


def unraveled(place: int, shape: Sequence[int]) -> list[int]:
    """Returns the positions, on axes of `shape`, of a place in row-major order."""
    places = []
    for size in reversed(shape):
        places.insert(0, place % size)
        place //= size
    return places


def reshaped(indices: Indices, shape: Sequence[int], operand_shape: Sequence[int]) -> Indices | None:
    """Turns indices into a reshape's result into indices into its operand; None where these are no `Index`."""
    result: list[Index] = []
    i = j = 0
    while i < len(shape) or j < len(operand_shape):
        # The shortest runs of axes with as many elements on both sides.
        last_i, last_j = min(i + 1, len(shape)), min(j + 1, len(operand_shape))
        while (new := math.prod(shape[i:last_i])) != (old := math.prod(operand_shape[j:last_j])):
            if new < old:
                last_i += 1
            else:
                last_j += 1
            if last_i > len(shape) or last_j > len(operand_shape):
                return None
        whole = merged(indices[i:last_i], shape[i:last_i])
        parts = None if whole is None else split(whole, operand_shape[j:last_j])
        if parts is None:
            return None
        result += parts
        i, j = last_i, last_j
    return tuple(result)
