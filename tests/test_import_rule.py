"""xlafuse uses hlo_analysis and pallas_kernels; those two know neither each other nor xlafuse."""

from __future__ import annotations

import ast
from collections.abc import Mapping
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


_VIEWS = ("_repr_html_", "to_html", "to_markdown")


def imported_modules(source: str, files: Mapping[str, Path]) -> set[str]:
    """The package's modules that a module imports, also in functions; not what only a record's views load."""
    found = set()
    views = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") in _VIEWS]
    lazy = {ast.dump(node) for view in views for node in ast.walk(view) if isinstance(node, ast.ImportFrom)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in files and ast.dump(node) not in lazy:
            found |= {f"{node.module}.{each.name}" for each in node.names} & files.keys() or {node.module}
    return found


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen, left = set(), [name]
        while left:
            new = imports.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[name] = seen
    groups = [{name, *(other for other in seen if name in reached[other])} for name, seen in reached.items()]
    return [group for i, group in enumerate(groups) if len(group) > 1 and group not in groups[:i]]


@pytest.mark.parametrize("package", ["hlo_analysis", "pallas_kernels", "xlafuse"])
def test_no_modules_import_each_other(package):
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in sorted((ROOT / package).rglob("*.py"))}
    files = {name.removesuffix(".__init__"): f for name, f in files.items()}
    assert circles({name: imported_modules(f.read_text(encoding="utf-8"), files) for name, f in files.items()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
