"""Runs the notebooks: each `notebooks/*.py` (jupytext, percent format) becomes an executed `.ipynb` beside it.

usage: run_notebooks.py [NAME ...]
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
MOST_BYTES = 400_000


def run(source: Path) -> nbformat.NotebookNode:
    """The notebook made from `source`, executed in its own folder."""
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # stable, so that a re-run changes only what changed
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # time stamps
    return notebook


def text(notebook: nbformat.NotebookNode) -> list[str]:
    """Lines of the cells' sources and of their outputs as text; pictures are left out."""
    lines: list[str] = []
    for cell in notebook.cells:
        lines += cell.source.splitlines()
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" not in data:
                found = data.get("text/markdown") or data.get("text/html") or data.get("text/plain") or ""
                lines += (output.get("text", "") + found).splitlines()
    return lines


def difference(executed: nbformat.NotebookNode, kept: Path) -> str:
    """What the kept notebook says otherwise than `executed`; '' where it says the same."""
    if not kept.is_file():
        return f"{kept.name} does not exist"
    before = text(nbformat.read(kept, as_version=4))
    return "\n".join(difflib.unified_diff(before, text(executed), "kept", "executed", lineterm="", n=0))


def main() -> int:
    """Runs the notebooks named, or all; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without .py; all if none is given")
    arguments = parser.parse_args()
    failed = 0
    for source in [FOLDER / f"{name}.py" for name in arguments.names] or SOURCES:
        start = time.perf_counter()
        try:
            notebook = run(source)
        except CellExecutionError as error:
            print(f"{source.name}: FAILED\n{error}", file=sys.stderr)
            failed += 1
            continue
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        size = len(nbformat.writes(notebook)) / 1e3
        print(f"{source.name}: {len(notebook.cells)} cells in {time.perf_counter() - start:.1f} s, {size:.0f} kB")
    return failed


if __name__ == "__main__":
    sys.exit(main())
