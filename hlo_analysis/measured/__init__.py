"""Reads profiles of a run on a GPU, and joins their kernels to the launch table."""

from hlo_analysis.measured.join import ProfileMismatchError, join, with_measured
from hlo_analysis.measured.profile import KernelEvent, Profile, read_profile
from hlo_analysis.measured.trace import trace_events

__all__ = [
    "KernelEvent",
    "Profile",
    "ProfileMismatchError",
    "join",
    "read_profile",
    "trace_events",
    "with_measured",
]
