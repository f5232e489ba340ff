"""The lower triangle of a square, packed row after row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Triangle:
    """The pairs of `fields` vectors: (i, j) with j < i, or j <= i if the diagonal is included."""

    fields: int
    has_diagonal: bool

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.start(self.fields)

    def start(self, row: Any) -> Any:
        """The place of a row's first pair: the number of pairs in the rows above."""
        return row * (row + 1) // 2 if self.has_diagonal else row * (row - 1) // 2

    def length(self, row: Any) -> Any:
        """The number of pairs in a row."""
        return row + 1 if self.has_diagonal else row
