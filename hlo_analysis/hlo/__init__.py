"""Parses HLO text into records: `parse_module`, and the classes that it returns."""

from hlo_analysis.errors import HloParseError
from hlo_analysis.hlo.module import Computation, Instruction, Module, computation_text
from hlo_analysis.hlo.parser import parse_module
from hlo_analysis.hlo.shape import Layout, Shape, parse_shape
from hlo_analysis.hlo.source import Metadata, SourceFrame, SourceTable

__all__ = [
    "Computation",
    "HloParseError",
    "Instruction",
    "Layout",
    "Metadata",
    "Module",
    "Shape",
    "SourceFrame",
    "SourceTable",
    "computation_text",
    "parse_module",
    "parse_shape",
]
