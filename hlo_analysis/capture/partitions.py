"""Answers, for the process that compiles, how a call's arrays are cut: only this process has the Python that knows.

Operations that several devices share, and cuDNN's attention, are calls that XLA asks about while it partitions a
program. The worker passes the question on by a socket; shapes and shardings travel as text. XLA drops the names of such
a call's kernels, and what they state of their matrix products, so that both are kept here, and written into the program
afterwards.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import copy_context
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

_PLACE = re.compile(r'loc\("[^"]*?([^/"]+)/[^/"]+"')
"""Where a kernel is in a program: the last name but one is what Pallas calls it."""


@contextlib.contextmanager
def answered(context: AbstractContextManager[Any], stated: dict[str, str]) -> Iterator[str]:
    """Within the block a thread answers; gives the address to ask at.

    context: entered in that thread. stated: takes each kernel's attributes, by its hash as HLO prints it.
    """
    with Listener() as listener:
        arguments = (listener, context, stated)
        thread = threading.Thread(target=copy_context().run, args=(_answer, *arguments), daemon=True)
        thread.start()
        try:
            yield str(listener.address)
        finally:
            with contextlib.suppress(OSError):  # ends a wait for a worker that never asked
                Client(listener.address).close()
            thread.join(timeout=5)


def restate(program: Path, stated: Mapping[str, str]) -> None:
    """Writes the attributes of kernels into the program's text."""
    text = program.read_text(encoding="utf-8")
    for kernel, attributes in stated.items():
        start = f"backend_config={{kernel_hash = {kernel}"
        text = text.replace(start, f"frontend_attributes={{{attributes}}}, {start}")
    program.write_text(text, encoding="utf-8")


def _answer(listener: Listener, context: AbstractContextManager[Any], stated: dict[str, str]) -> None:
    with contextlib.suppress(OSError, EOFError), listener.accept() as worker, context:
        while True:
            question = worker.recv()
            try:
                module, *cuts = _partition(*question)
                stated |= _stated(module)
                worker.send((module, *cuts))
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


def _stated(module: bytes) -> dict[str, str]:
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    found: dict[str, str] = {}

    def visit(operation: Any) -> Any:
        config, frontend = (attribute(operation, name) for name in ("mhlo.backend_config", "mhlo.frontend_attributes"))
        if "kernel_hash" in config and (place := _PLACE.match(str(operation.location))):
            flops = f',matrix_flops="{frontend["matrix_flops"].value}"' if "matrix_flops" in frontend else ""
            found[str(config["kernel_hash"])] = f'kernel="{place[1]}"{flops}'
        return ir.WalkResult.ADVANCE

    def attribute(operation: Any, name: str) -> Any:
        return operation.attributes[name] if name in operation.attributes else {}  # noqa: SIM401  it has no `get`

    with make_ir_context():
        ir.Module.parse(module).operation.walk(visit)
    return found
