"""xlafuse uses hlo_analysis and pallas_kernels; those two know neither each other nor xlafuse."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "hlo_analysis": {"pallas_kernels", "xlafuse"},
    "pallas_kernels": {"hlo_analysis", "xlafuse"},
}


def imported_packages(source: str) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            packages.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            packages |= {str(a.value).partition(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return packages


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_no_other(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 3
    found = {
        str(f.relative_to(ROOT)): imported_packages(f.read_text(encoding="utf-8")) & FORBIDDEN[package] for f in files
    }
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_the_rule_sees_every_kind_of_import():
    source = "import xlafuse.x as c\ndef f():\n    from hlo_analysis.hlo import x\nimport_module('pallas_kernels.ops')"
    assert imported_packages(source) == {"xlafuse", "hlo_analysis", "pallas_kernels"}
