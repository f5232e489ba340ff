"""Reads a program's memory use from XLA's buffer assignment."""

from __future__ import annotations

import re

from hlo_analysis.program.host_memory import HOST_SPACE
from hlo_analysis.records import Memory

_ALLOCATION = re.compile(r"allocation \d+: size (?P<size>\d+), (?P<flags>[^\n]*)")


def parse_buffer_assignment(text: str) -> Memory:
    """Reads `*-buffer-assignment.txt`: the total size of the allocations of each purpose.

    A donated argument, which also holds a result, counts as an argument. The peak is the sum of all allocations:
    XLA:GPU keeps every allocation live for the whole run, and reuses memory inside the temporary one. Allocations in
    host memory are left out.
    """
    sizes = {"argument": 0, "output": 0, "temp": 0, "constant": 0}
    for line in text.splitlines():
        match = _ALLOCATION.match(line)
        if not match or "thread-local" in match["flags"] or f"color {HOST_SPACE}," in match["flags"]:
            continue
        size, flags = int(match["size"]), match["flags"]
        if "parameter " in flags:
            sizes["argument"] += size
        elif "maybe-live-out" in flags:
            sizes["output"] += size
        elif "constant" in flags:
            sizes["constant"] += size
        else:
            sizes["temp"] += size
    return Memory(
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        temp_bytes=sizes["temp"],
        peak_bytes=sum(sizes.values()),
    )
