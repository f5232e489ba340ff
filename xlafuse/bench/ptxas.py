"""Reads ptxas' output on Mosaic GPU kernels: which spill registers, and which products are serialized.

Mosaic prints it on the process's standard output where the environment asks for it; `xlafuse.bench.supervisor` does for
the processes that time configurations.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

from hlo_analysis.capture.resources import parse_ptxas

VARIABLE = "MOSAIC_GPU_DUMP_PTXAS"
_SERIALIZED = re.compile(r"(wgmma\.mma_async instructions are serialized due to .+?) (?:in|for) the function '([^']+)'")
_WAIT = re.compile(r"(warpgroup\.wait is injected) in around line \d+ by compiler (.+?) in function '([^']+)'")


def waits(ptxas: str) -> tuple[str, ...]:
    """Messages about matrix products that ptxas makes wait against the kernel's wish, with the kernel's name.

    Where registers of an asynchronous wgmma are touched too early, or do not suffice, ptxas still makes a correct
    kernel: each wgmma then ends before the next begins (its notes C7510 to C7516), or one wait more is put in (C7517).
    Nothing need be spilled, and nothing fails: the kernel is only slower. A `warpgroup.arrive` put in (C7519) is no
    wait, and common.
    """
    found = [f"{kernel}: {' '.join(why.split())}" for why, kernel in _SERIALIZED.findall(ptxas)]
    found += [f"{kernel}: {what} {why}" for what, why, kernel in _WAIT.findall(ptxas)]
    return tuple(found)


@contextlib.contextmanager
def faults() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Yields a function that lists, afterwards, the faults of the kernels compiled meanwhile; () without `VARIABLE`."""
    if os.environ.get(VARIABLE) != "1":
        yield lambda: ()
        return
    with printed() as text:
        yield lambda: _faults(text())


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """Captures the standard output of the process, C++ included; yields a function that returns it afterwards."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        said: list[str] = []
        try:
            yield lambda: "".join(said)
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            said.append(file.read())


def _faults(ptxas: str) -> tuple[str, ...]:
    spilled = sum(kernel.get("spill_store_bytes", 0) for kernel in parse_ptxas(ptxas))
    return (*([f"it spills {spilled} bytes of registers a thread"] if spilled else ()), *waits(ptxas))
