"""Compiling processes of captures that are forked from one which has imported JAX, in place of started anew.

Importing JAX and Mosaic takes 1.05 s of a processor, of 1.2 to 1.4 s for a small program's capture. `Worker` cannot do
this for users, whose process may end at any time; pytest's own ends when its tests have.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from hlo_analysis.capture import process

_CONTEXT = multiprocessing.get_context("forkserver")
_WORKER = str(process._WORKER)
_PATH = os.environ.get("PYTHONPATH")
_RUNTIME = "MOSAIC_GPU_RUNTIME_LIB_PATH"
_STARTING = threading.Lock()
util.get_temp_dir()  # for sockets; before a test counts what captures leave behind


def popen(command: list[str], **options: Any) -> Any:
    """Forks Worker's process, or starts it as `subprocess.Popen` does if a test has a worker or packages of its own."""
    environment = options["env"]
    if command[2] != _WORKER or (environment.get("JAX_PLATFORMS"), environment.get("PYTHONPATH")) != ("cpu", _PATH):
        return subprocess.Popen(command, **options)
    return Forked(Path(command[-1]), options["stdout"].name, environment)


class Forked:
    """As much of `subprocess.Popen` as `Worker` uses."""

    def __init__(self, folder: Path, log: str, environment: dict[str, str]):
        requests, self._sending = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_work, args=(folder, log, environment, requests), daemon=True)
        with _STARTING, _without_main():
            if not _is_running():
                _start(environment)
            self._process.start()
        requests.close()
        self.pid = self._process.pid
        self.stdin = types.SimpleNamespace(write=self._sending.send_bytes, close=self._sending.close)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the worker", timeout or 0.0)
        return self._process.exitcode


@contextmanager
def _without_main() -> Iterator[None]:
    """Else each forked process would import pytest's own main module."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _is_running() -> bool:
    return forkserver._forkserver._forkserver_pid is not None


def _start(environment: dict[str, str]) -> None:
    """Starts the process to fork from, with a worker's environment, some of which is read while JAX is imported."""
    # The second for `_work` itself, whose module imports it: 0.37 s of a processor a fork without it, of 0.75.
    _CONTEXT.set_forkserver_preload(["jax.experimental.mosaic.gpu", process.__name__])
    with mock.patch.dict(os.environ, {**environment, "PYTHONWARNINGS": "ignore"}, clear=True):  # of forks
        forkserver.ensure_running()


def _work(folder: Path, log: str, environment: dict[str, str], requests: Connection) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), descriptor)
    runtime = os.environ.get(_RUNTIME, "")  # set where Mosaic was imported
    os.environ.clear()
    os.environ.update({_RUNTIME: runtime, **environment})
    spec = importlib.util.spec_from_file_location("worker", _WORKER)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)

    def read_line() -> str:
        try:
            return requests.recv_bytes().decode()
        except EOFError:
            return ""

    sys.stdin = types.SimpleNamespace(readline=read_line)  # pyright: ignore[reportAttributeAccessIssue]
    code = worker.main(folder)
    sys.stdout.flush()
    os._exit(code)
