"""Answers, for the process that compiles, how a call's arrays are cut: only this process has the Python that knows.

Operations that several devices share, and cuDNN's attention, are calls that XLA asks about while it partitions a
program. The worker passes the question on by a socket; shapes and shardings travel as text.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import copy_context
from multiprocessing.connection import Client, Listener
from typing import Any


@contextlib.contextmanager
def answered(context: AbstractContextManager[Any]) -> Iterator[str]:
    """Within the block a thread answers; gives the address to ask at. `context`: entered in that thread."""
    with Listener() as listener:
        thread = threading.Thread(target=copy_context().run, args=(_answer, listener, context), daemon=True)
        thread.start()
        try:
            yield str(listener.address)
        finally:
            with contextlib.suppress(OSError):  # ends a wait for a worker that never asked
                Client(listener.address).close()
            thread.join(timeout=5)


def _answer(listener: Listener, context: AbstractContextManager[Any]) -> None:
    with contextlib.suppress(OSError, EOFError), listener.accept() as worker, context:
        while True:
            question = worker.recv()
            try:
                worker.send(_partition(*question))
            except Exception as error:  # XLA, in the worker, says so
                worker.send(f"{type(error).__name__}: {error}")


def _partition(shapes: list[str], shardings: list[str], result: str, result_sharding: str, key: bytes) -> Any:
    from jax._src.custom_partitioning import _custom_partitioning_partition
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    module, operands, results = _custom_partitioning_partition(
        [xla_client.Shape(each) for each in shapes],
        [xla_client.HloSharding.from_string(each) for each in shardings],
        xla_client.Shape(result),
        xla_client.HloSharding.from_string(result_sharding),
        key,
    )
    return module, [each.to_string() for each in operands], results.to_string()
