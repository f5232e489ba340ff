"""Times the notebooks' own programs on an attached GPU, for notebooks/results/<notebook>-h200.json.

usage: record_notebooks.py -o FOLDER [NAME ...]

A notebook's cells with the tag "program" make PROGRAMS (functions by name), ARGUMENTS and MODE ("forward" or "grad").
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def program_cells(source: Path) -> str:
    """The code of the tagged cells; '' where there are none."""
    cells = re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "\n".join(cell.partition("\n")[2] for cell in cells if cell.startswith(' tags=["program"]'))


def programs(source: Path) -> dict[str, Any]:
    """What the tagged cells define."""
    module = sys.modules[source.stem] = types.ModuleType(source.stem)  # where dataclasses look for their names
    exec(compile(program_cells(source), str(source), "exec", dont_inherit=True), vars(module))
    return vars(module)


def main() -> int:
    """Writes a file of times for each notebook that has programs; returns how many programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("names", nargs="*", help="without .py; all if none is given")
    arguments = parser.parse_args()
    from xlafuse import compare, measurements

    failed = 0
    for source in [FOLDER / f"{name}.py" for name in arguments.names] or sorted(FOLDER.glob("[0-9]*.py")):
        if not program_cells(source):
            continue
        made = programs(source)
        times = {}
        for name, function in made["PROGRAMS"].items():
            mode = made["MODE"]
            compared = compare(
                function, made["ARGUMENTS"], mode=mode, strategies=["xla"], target="attached", measure=True
            )
            result = compared["xla"]
            if result.analysis is None or result.analysis.measured is None:
                print(f"{source.stem}, {name}: {result.error or 'no times'}", file=sys.stderr)
                failed += 1
                continue
            times[name] = result.analysis.measured
            print(f"{source.stem}, {name}: {result.measured_us:.1f} µs of kernels, {result.wall_us:.1f} µs wall clock")
        text = measurements.to_json(measurements.Measurements(title=source.stem, strategies=times))
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"{source.stem}-h200.json").write_text(text, encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
