"""Runs compilations in parallel, and their progress reports one at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


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
