"""Renders a comparison for a notebook cell: verdict and strategy table, with inline styles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from hlo_analysis.records import Analysis, Comparison, StrategyResult
from hlo_analysis.report import formats, sentences
from hlo_analysis.report.alike import distinct
from hlo_analysis.report.formats import units_of

if TYPE_CHECKING:
    from IPython.display import HTML  # pyright: ignore[reportMissingImports]


def render_notebook(record: Comparison | Analysis) -> str:
    """Returns a short HTML fragment that takes the notebook's colours and font, and runs no script."""
    comparison = distinct(as_comparison(record))
    environment = Environment(
        loader=PackageLoader("hlo_analysis.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    base = comparison[comparison.baseline].analysis
    return environment.get_template("notebook.html.j2").render(
        comparison=comparison,
        base=base,
        formats=formats,
        has_measured=any(result.measured_us is not None for result in comparison.strategies),
        sentences=sentences,
        units=units_of(comparison),
        verdict=sentences.verdict(comparison),
    )


def as_comparison(record: Comparison | Analysis) -> Comparison:
    """Returns an analysis as the comparison of a single strategy; a comparison as it is."""
    if isinstance(record, Comparison):
        return record
    from hlo_analysis.diff import compare_analyses

    made = record.provenance
    title = f"{made.function}, {made.mode}, {made.target}"
    return compare_analyses(title, [StrategyResult(name=record.label, description="", analysis=record)], record.label)


def show(comparison: Comparison | Analysis) -> HTML:
    """Returns the comparison or analysis as the value of a notebook cell.

    Raises:
        ImportError: IPython is not installed.
    """
    from IPython.display import HTML  # pyright: ignore[reportMissingImports]

    return HTML(render_notebook(comparison))
