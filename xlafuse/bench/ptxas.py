"""Reads ptxas' output on Mosaic GPU kernels: register spills and serialized matrix products.

Mosaic prints that output on the process's standard output if the environment asks for it. `xlafuse.bench.supervisor`
asks for it in the processes that time configurations.
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
    """Returns ptxas' messages about matrix products that it forces to wait, each with the kernel's name.

    If the registers of an asynchronous wgmma are used too early or do not suffice, ptxas still makes a correct kernel.
    Each wgmma then ends before the next one starts (notes C7510 to C7516), or ptxas adds a wait (C7517). No register
    need spill and nothing fails; the kernel is only slower. An added `warpgroup.arrive` (C7519) is common and is no
    wait.
    """
    found = [f"{kernel}: {' '.join(why.split())}" for why, kernel in _SERIALIZED.findall(ptxas)]
    found += [f"{kernel}: {what} {why}" for what, why, kernel in _WAIT.findall(ptxas)]
    return tuple(found)


@contextlib.contextmanager
def faults() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Yields a function that lists the faults of the kernels compiled in the context; () without `VARIABLE`."""
    if os.environ.get(VARIABLE) != "1":
        yield lambda: ()
        return
    with printed() as text:
        yield lambda: _faults(text())


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """Captures the process's standard output, C++ included; yields a function that returns the text afterwards."""
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
