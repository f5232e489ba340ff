"""What ptxas said of every kernel, kept in `data/compiled/`, so that only kernels that changed are compiled again.

One JSON file for each part of an operation: the versions that compiled it, and its kernels by a digest of what Pallas
is given (`digest_of`). A test that compiles another kernel rewrites its file, to be committed with the change: the
difference shows what it does to registers and spills. XLAFUSE_COMPILE_ALL=1 compiles all of them again. Other versions
neither use nor change a file; remove the folder to record them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Hashable
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np
from interpreter_programs import Same, key_of
from jax.core import Tracer

FOLDER = Path(__file__).parent / "data" / "compiled"
PRIMITIVES = Path(__file__).parents[2] / "pallas_kernels" / "primitives"


def read(name: str) -> dict[str, dict[str, Any]]:
    """Kernels by digest: none where there is no file, where another version wrote it, or where all are compiled."""
    path = FOLDER / f"{name}.json"
    if not path.exists() or os.environ.get("XLAFUSE_COMPILE_ALL") == "1":
        return {}
    record = json.loads(path.read_text())
    return record["kernels"] if record["versions"] == versions() else {}


def write(name: str, kernels: dict[str, dict[str, Any]]) -> None:
    """Replaces the file, one kernel a line, unless it says the same already or is of other versions."""
    lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(kernels[each])}" for each in sorted(kernels))
    text = f'{{"versions": {json.dumps(versions())}, "kernels": {{\n{lines}\n}}}}\n'
    path = FOLDER / f"{name}.json"
    old = path.read_text() if path.exists() else None
    if old is None or (old != text and json.loads(old)["versions"] == versions()):
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@functools.cache
def versions() -> dict[str, str]:
    """What makes machine code of a kernel: Pallas, XLA, and ptxas."""
    return {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    }


def digest_of(call: Any) -> str:
    """Equal for equal kernels, in any process: made of the call's jaxpr and parameters, and of functions' sources."""
    leaves: list[str] = []
    _add_leaves(leaves, key_of((call.params, [v.aval for v in call.invars])))
    return hashlib.sha256("".join(leaves).encode()).hexdigest()[:20]


def _add_leaves(leaves: list[str], key: Hashable) -> None:
    if isinstance(key, tuple):
        leaves.append("(")
        for each in key:
            _add_leaves(leaves, each)
        leaves.append(")")
        return
    if isinstance(key, FunctionType):  # of `inline_mgpu`: what it calls is in its module, or among the primitives
        cells = [_closed_over(each.cell_contents) for each in key.__closure__ or ()]
        leaves += ["function", _source(inspect.getfile(key)), _primitives(), key.__qualname__]
        _add_leaves(leaves, key_of(cells))
        return
    value = key.value if isinstance(key, Same) else key
    text = repr(value)
    if " at 0x" in text or isinstance(value, np.ndarray | jax.Array):
        raise TypeError(f"no digest of {text}: it has no value of its own")
    leaves.append(text)


def _closed_over(value: Any) -> Any:
    return value.aval if isinstance(value, Tracer) else value  # which one is an operand in the equation, too


@functools.cache
def _source(path: str) -> str:
    """Equal for modules that differ in docstrings, texts below constants, comments and layout alone."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.cache
def _primitives() -> str:
    return " ".join(_source(str(path)) for path in sorted(PRIMITIVES.glob("**/*.py")))
