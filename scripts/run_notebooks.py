"""Runs the notebooks: each `notebooks/*.py` (jupytext, percent format) becomes an executed `.ipynb` beside it.

usage: run_notebooks.py [--check] [NAME ...]    --check executes them and leaves the files alone
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


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


def main() -> int:
    """Runs the notebooks named, or all; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="execute, write nothing")
    parser.add_argument("names", nargs="*", help="without .py; all if none is given")
    arguments = parser.parse_args()
    sources = [FOLDER / f"{name}.py" for name in arguments.names] or sorted(FOLDER.glob("[0-9]*.py"))
    failed = 0
    for source in sources:
        start = time.perf_counter()
        try:
            notebook = run(source)
        except CellExecutionError as error:
            print(f"{source.name}: FAILED\n{error}", file=sys.stderr)
            failed += 1
            continue
        print(f"{source.name}: {len(notebook.cells)} cells in {time.perf_counter() - start:.1f} s")
        if not arguments.check:
            nbformat.write(notebook, source.with_suffix(".ipynb"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
