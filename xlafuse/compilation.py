"""Compiles and analyzes functions: several at a time, with their progress reports one at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis


def compiled(fn: Callable[..., Any], *shapes: Any, **options: Any) -> Analysis:
    """Compiles a function and analyzes it, with the catalogue of kernels; options: of `hlo_analysis.capture`."""
    from hlo_analysis import analyze, capture
    from hlo_analysis.capture.lowering import leave_out_frames, leave_out_packages
    from xlafuse.catalogue import KERNELS

    leave_out_frames(__file__)
    leave_out_packages("xlafuse", "pallas_kernels")
    return analyze(capture(fn, *shapes, **options), catalogue=KERNELS)


@contextmanager
def compilation_pool(target_kind: str) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool of threads, each of which waits for one compilation; cancels what has not begun at the end.

    Each compilation has a process of its own. On an attached GPU they would disturb each other's autotuning, so that
    they run one after the other.
    """
    pool = ThreadPoolExecutor(max_workers=1 if target_kind == "attached" else min(4, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def one_at_a_time[State](progress: Callable[[str, State], None] | None) -> Callable[[str, State], None]:
    """Returns a function that several threads may call; it calls `progress`, if given, from one thread at a time."""
    lock = threading.Lock()

    def report(name: str, state: State) -> None:
        if progress is not None:
            with lock:
                progress(name, state)

    return report
