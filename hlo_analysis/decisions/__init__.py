"""Collects XLA's fusion decisions from every source into one table of edges."""

from hlo_analysis.decisions.categories import CATEGORIES
from hlo_analysis.decisions.table import decide

__all__ = ["CATEGORIES", "decide"]
