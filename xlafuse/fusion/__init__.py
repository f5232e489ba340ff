"""Finds in a JAX program what fused operations compute, and has them compute it."""

from xlafuse.fusion.api import FuseWarning, fuse
from xlafuse.fusion.report import Report, SiteLeft, SiteRefused, SiteTaken

__all__ = ["FuseWarning", "Report", "SiteLeft", "SiteRefused", "SiteTaken", "fuse"]
