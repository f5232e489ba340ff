"""A program beside its fused form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rewriting import exactly

import xlafuse
from xlafuse.fusion import Report
from xlafuse.numerics import judge


@pytest.fixture
def sites():
    """The operations that `fuse` calls for a function of arguments, whose results are checked."""

    def found(fn: Callable[..., Any], *arguments: Any, checks: bool = True, told=None, **options: Any) -> list[str]:
        reports: list[Report] = []
        fused = xlafuse.fuse(fn, report=reports.append, **options)(*arguments)
        if told:
            told(reports[0])
        if checks:
            plain = fn(*arguments)
            error, baseline, passed = judge(fused, plain, exactly(fn, *arguments))
            assert passed, f"error {error:.3g}, of the plain program {baseline:.3g}\n{reports[0]}"
        return sorted(each.operation for each in reports[0].taken)

    return found
