"""What ptxas says of Mosaic GPU kernels while they are compiled: how many bytes of registers they spill to memory.

Mosaic prints it on the process's standard output where the environment asks for it; `xlafuse.bench.supervisor` does for
the processes that time configurations.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

from hlo_analysis.capture.resources import parse_ptxas

VARIABLE = "MOSAIC_GPU_DUMP_PTXAS"


@contextlib.contextmanager
def spills() -> Iterator[Callable[[], int]]:
    """Gives what tells, afterwards, the bytes that the kernels compiled meanwhile spill; 0 where ptxas is not asked."""
    if os.environ.get(VARIABLE) != "1":
        yield lambda: 0
        return
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        said: list[str] = []
        try:
            yield lambda: sum(kernel.get("spill_store_bytes", 0) for kernel in parse_ptxas("".join(said)))
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            said.append(file.read())
