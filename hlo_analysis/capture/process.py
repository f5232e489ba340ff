"""Starts the worker process, waits for it no longer than allowed, and turns its end into a result or an error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlo_analysis.errors import CaptureError

LOG_NAME = "worker.log"
_WORKER = Path(__file__).with_name("worker.py")
_LAST_WORDS_LINES = 30

# Passes that explain themselves only in the log: GEMM fusion, softmax rewriter, kernel choice.
_VLOG = "gemm_fusion=5,softmax_rewriter_triton=5,config_assigner_pass=3,config_assigner=1"

# What the user's environment must not decide: XLA's flags and dumps, log levels, JAX's platform and caches.
_DROPPED = (
    "XLA_FLAGS",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_CPP_VMODULE",
    "TF_CPP_MAX_VLOG_LEVEL",
    "JAX_PLATFORM_NAME",
    "JAX_COMPILATION_CACHE_DIR",
)


@dataclass
class Worker:
    """A worker that imports JAX while its parent traces. Use as a context manager: leaving it ends the process."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": _VLOG, **self.environment}
        with (self.folder / LOG_NAME).open("wb") as log:
            # A session of its own, so that ending it also ends the ptxas processes that it started.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Sends the request and waits for the result.

        Raises:
          CaptureError: the worker died or took longer than `timeout` seconds; with the end of XLA's log.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise RuntimeError("Worker.ask() outside its with block")
        (self.folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        with contextlib.suppress(OSError):  # a worker that is already dead shows below
            process.stdin.write(b"request.json\n")
            process.stdin.close()
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise CaptureError(
                f"XLA did not finish compiling within {timeout:g} s and was stopped; pass a larger timeout= if the "
                "program is that large",
                last_words=self.last_words(),
            ) from error
        result = self.folder / "result.json"
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
        raise CaptureError(
            f"the compiler process ended with {_exit_phrase(status)} before it had a result",
            last_words=self.last_words(),
        )

    def last_words(self) -> str:
        """The end of the worker's log, without the informational lines that this package asked XLA for."""
        return last_words((self.folder / LOG_NAME).read_text(encoding="utf-8", errors="replace"))


def last_words(log: str) -> str:
    """The last lines of a log that are warnings, errors, or not XLA's log format at all."""
    telling = [line for line in log.splitlines() if not (line.startswith("I") and line[1:5].isdigit())]
    return "\n".join(telling[-_LAST_WORDS_LINES:]).strip()


def _exit_phrase(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
