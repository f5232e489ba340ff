"""Converts records to JSON and back, and writes the JSON schemas that the package ships.

`schemas/<record>-<version>.json` are the schemas of version `records.SCHEMA_VERSION`. After a change to the records,
`python -m hlo_analysis.schema` writes them again. A change that old readers would misread needs a new version.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hlo_analysis.errors import DumpError
from hlo_analysis.records import SCHEMA_VERSION, Analysis, Comparison

SCHEMA_FOLDER = Path(__file__).parent / "schemas"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOT_FINITE = ["inf", "-inf", "nan"]
_ERRORS_SHOWN = 5


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def to_json(record: Analysis | Comparison) -> str:
    """Formats a record as indented JSON; equal records give equal text.

    Properties (`saved_bytes`, …) are not stored. JSON has no infinite numbers, so they are written "inf", "-inf",
    "nan".
    """
    data = _spelled(_adapter(type(record)).dump_python(record, mode="json"))
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json[T: (Analysis, Comparison)](cls: type[T], text: str | bytes) -> T:
    """Reads a record that `to_json` wrote.

    Raises:
      DumpError: the text is not JSON, has another schema version, or is not a record of this class; the message says
        where and what.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DumpError(f"expected {cls.__name__} JSON: {error}") from error
    if not isinstance(data, dict):
        raise DumpError(f"expected {cls.__name__} JSON, an object; got {type(data).__name__}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DumpError(
            f"expected {cls.__name__} JSON of schema version {SCHEMA_VERSION}, got {version!r}; make the report again, "
            "or read it with the version of this package that wrote it"
        )
    try:
        return _adapter(cls).validate_python(data, strict=False)
    except ValidationError as error:
        shown = [
            f"{'.'.join(map(str, found['loc'])) or 'top level'}: {found['msg']}"
            for found in error.errors(include_url=False)[:_ERRORS_SHOWN]
        ]
        more = error.error_count() - len(shown)
        raise DumpError(
            f"not {cls.__name__} JSON of schema version {SCHEMA_VERSION}: {'; '.join(shown)}"
            + (f"; and {more} more" if more > 0 else "")
        ) from error


def json_schema(cls: type[Analysis] | type[Comparison]) -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of the output of `to_json` for a class of records."""
    schema = _adapter(cls).json_schema(mode="serialization")
    title = f"{cls.__name__}, version {SCHEMA_VERSION}"
    for field in schema.get("$defs", {}).get("Numerics", {}).get("properties", {}).values():
        if field.get("type") == "number":  # an overflowing kernel has an infinite error
            del field["type"]
            field["anyOf"] = [{"type": "number"}, {"enum": _NOT_FINITE}]
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION, "title": "Schema Version", "type": "integer"}
    return {"$schema": _DIALECT, **schema, "title": title}


def schema_path(cls: type[Analysis] | type[Comparison]) -> Path:
    """Returns the path of the schema of a class of records in the package."""
    return SCHEMA_FOLDER / f"{cls.__name__.lower()}-{SCHEMA_VERSION}.json"


def write_schemas() -> None:
    """Writes the schema files of this version."""
    SCHEMA_FOLDER.mkdir(exist_ok=True)
    for cls in (Analysis, Comparison):
        schema_path(cls).write_text(json.dumps(json_schema(cls), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
