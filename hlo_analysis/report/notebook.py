"""A comparison in a notebook cell: verdict and strategy table, styles on the elements themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from hlo_analysis.records import Comparison
from hlo_analysis.report import words
from hlo_analysis.report.units import units_of

if TYPE_CHECKING:
    from IPython.display import HTML  # pyright: ignore[reportMissingImports]


def render_notebook(comparison: Comparison) -> str:
    """A small piece of HTML: it takes the notebook's colours and font, and runs no script."""
    environment = Environment(
        loader=PackageLoader("hlo_analysis.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    base = comparison[comparison.baseline].analysis
    return environment.get_template("notebook.html.j2").render(
        comparison=comparison, base=base, words=words, units=units_of(comparison), verdict=words.verdict(comparison)
    )


def show(comparison: Comparison) -> HTML:
    """The comparison as the value of a notebook cell.

    Raises:
        ImportError: IPython is not installed.
    """
    from IPython.display import HTML  # pyright: ignore[reportMissingImports]

    return HTML(render_notebook(comparison))
