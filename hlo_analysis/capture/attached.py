"""The GPU in this machine as a target."""

from __future__ import annotations

from hlo_analysis.errors import UnknownTargetError
from hlo_analysis.targets import Target


def attached_target() -> Target:
    """Raises."""
    raise UnknownTargetError("no GPU")
