"""What every kernel of the backward pass is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """References to query, key, value, the output's cotangent, what each query's row needs, and further arguments."""

    query: Any
    key: Any
    value: Any
    dout: Any
    rows: Any
    extras: Mapping[str, Any]
