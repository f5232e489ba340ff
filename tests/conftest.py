"""Which tests a run draws, and which one process takes; how it compiles for the CPU."""

from __future__ import annotations

import gc
import os
import platform
import random
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from forked_worker import popen
from jax._src.lib import xla_client

from hlo_analysis.capture import process

# Two thirds of what XLA's CPU compiler takes for a small program are to make its kernels by MLIR: LLVM alone makes them
# too. It then fuses products with sums here and not there, and a mean of large values is another in each place; without
# such instructions each operation is rounded. A program that is cut up for LLVM's threads takes half as much again.
XLA_FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_max_isa=AVX",
    "--xla_cpu_parallel_codegen_split_count=1",
)


os.environ["HLO_ANALYSIS_STRICT"] = "1"  # a rule of the analyzer that raises fails the test
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of workers: two spin while they wait, 4 % of the kernels' tests
gc.disable()  # until all is imported


def _take_flags() -> None:
    """XLA reads the variable once a process; captures, and processes of their own, are not to see it."""
    given = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (given, *XLA_FLAGS)))
    _ = xla_client.CompileOptions().executable_build_options.debug_options
    del os.environ["XLA_FLAGS"]
    if given is not None:
        os.environ["XLA_FLAGS"] = given


if platform.machine() == "x86_64" and os.environ.get("JAX_PLATFORMS") == "cpu":  # beside a GPU it computes much
    _take_flags()

if os.environ.get("JAX_PLATFORMS") == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)  # of programs that run once; captures have their own

process.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # see `forked_worker`

FOLDERS_THAT_COMPILE = ("tests/analysis", "tests/capture", "tests/decisions", "tests/hlo")
"""Their files share programs that take up to half a minute to compile, once a process."""

LONGEST_FILES = (
    *("tests/xlafuse/test_replay.py", "tests/xlafuse/test_compare.py", "tests/xlafuse/test_trials.py"),
    "tests/test_notebooks.py",
)
"""Minutes long, and tests of one mode share programs: two processes take the modes, before all else."""


SEED = "TESTS_SEED"
"""The variable that decides which of the tests marked `drawn` a run takes; all its processes have the same."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="take all tests of which a run of a folder draws a part")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**30)))
    config.addinivalue_line(
        "markers",
        "drawn(share, of_each=None): of these a run of a folder takes a random part of this size, and at least one of "
        "several; of_each: so of those of each value of this parameter",
    )


def draws(config: pytest.Config) -> bool:
    return not config.getoption("--all") and all(Path(argument).is_dir() for argument in config.args)


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What a run does not take of the tests marked `drawn`: of several it takes at least one."""
    groups: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("drawn"):
            test = item.nodeid.partition("[")[0]
            if of_each := marker.kwargs.get("of_each"):
                test += f" {item.callspec.params[of_each].name}"  # pyright: ignore[reportAttributeAccessIssue]
            groups[test, marker.args[0]].append(item)
    left: set[pytest.Item] = set()
    for (test, share), group in groups.items():
        rng = random.Random(f"{os.environ[SEED]} {test}")
        count = max(int(share * len(group) + rng.random()), int(len(group) > 1))
        left |= {*rng.sample(group, len(group) - count)}
    return left


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST_FILES))
    if draws(config):
        left = left_out(items)
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    drawn: dict[str, list[str]] = defaultdict(list)
    for report in [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]:
        if draws(config) and report.when == "call" and "drawn" in report.keywords:
            test, _, case = report.nodeid.partition("[")
            drawn[test].append(case.removesuffix("]"))
    for test, cases in drawn.items():
        terminalreporter.line(f"{SEED}={os.environ[SEED]} drew {len(cases)} of {test}: {' '.join(sorted(cases))}")


def pytest_collection_finish() -> None:
    gc.freeze()  # a tenth of the time went into looking through what is imported for garbage
    gc.enable()
    gc.set_threshold(20_000, 20, 50)  # and a twentieth into looking through jaxprs, which are kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but such a folder goes to one process as a file does, and the longest files by mode."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # else by the number of tests

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            if file in LONGEST_FILES:
                return f"{file} {'grad' in nodeid}"
            return folder if folder in FOLDERS_THAT_COMPILE else file

        def remove_node(self, node: Any) -> str | None:
            """As xdist's, but does not give the test that ended a process to the next one, and so on for ever."""
            units = self.assigned_work.pop(node)
            pending = [(unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done]
            if not pending:
                return None
            unit, crashed = pending[0]
            unit[crashed] = True
            self.workqueue.update((scope, unit) for scope, unit in units.items() if not all(unit.values()))
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return ByFileOrFolder(config, log)
