"""Renders a Comparison. Pure: a view returns text or prints on a given console; only the command line writes files."""

from hlo_analysis.report.html import render_html
from hlo_analysis.report.markdown import render_markdown
from hlo_analysis.report.notebook import render_notebook, show
from hlo_analysis.report.redact import redacted
from hlo_analysis.report.sentences import verdict
from hlo_analysis.report.terminal import render_terminal

__all__ = ["redacted", "render_html", "render_markdown", "render_notebook", "render_terminal", "show", "verdict"]
