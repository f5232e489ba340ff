"""Returns an analysis' launches, decisions and missed fusions as plain rows and as pandas DataFrames."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from hlo_analysis.errors import nearest_names
from hlo_analysis.records import Analysis
from hlo_analysis.records.analysis import Table

_LEFT_OUT = {"hlo", "inputs", "outputs", "scopes", "trial"}
"""Columns that are long texts or records themselves."""


def table_rows(analysis: Analysis, table: Table = "launches") -> list[dict[str, Any]]:
    """Returns one dict per record, in the order of the analysis, of the fields that are numbers, texts or short tuples.

    A launch's opcodes become a text, as 'multiply 3, add 1', and its inputs and outputs become their counts.

    Raises:
        ValueError: no such table.
    """
    known = get_args(Table)
    if table not in known:
        raise ValueError(f"expected a table of {', '.join(known)}, got {table!r}{nearest_names(table, known)}")
    rows = []
    for record in getattr(analysis, table):
        row = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in _LEFT_OUT}
        if table == "launches":
            row["opcodes"] = ", ".join(f"{opcode} {count}" for opcode, count in record.opcodes)
            row |= {"inputs": len(record.inputs), "outputs": len(record.outputs)}
        rows.append(row)
    return rows


def to_dataframe(analysis: Analysis, table: Table = "launches") -> Any:
    """Returns the table as a pandas DataFrame, indexed by the launch's number or the missed fusion's rank.

    Raises:
        ImportError: pandas is not installed.
        ValueError: no such table.
    """
    rows = table_rows(analysis, table)
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "to_dataframe needs pandas, which is not installed: pip install pandas; or take "
            "hlo_analysis.tables.table_rows(analysis, table), which needs nothing"
        ) from error
    frame = pandas.DataFrame(rows)
    index = {"launches": "index", "missed": "rank"}.get(table)
    return frame.set_index(index) if index and rows else frame
