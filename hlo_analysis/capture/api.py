"""`capture`: compile any JAX function in a process of its own and keep what XLA reports about it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlo_analysis.capture import attached
from hlo_analysis.capture import autotune as autotuning
from hlo_analysis.capture.archive import Capture
from hlo_analysis.capture.assemble import DUMP, MODULE, MOSAIC, assemble
from hlo_analysis.capture.failures import compile_error, first_sentence, is_toolchain_failure
from hlo_analysis.capture.partitions import answered, restate
from hlo_analysis.capture.process import Worker
from hlo_analysis.capture.runner import ARGUMENTS
from hlo_analysis.errors import CaptureError
from hlo_analysis.targets import Target, load_target

if TYPE_CHECKING:
    from hlo_analysis.capture.lowering import Lowered, Mode
from hlo_analysis.capture.manifest import write_manifest

# One dump before and one after each pass that decides about fusion: some 28 files, half a megabyte.
_GPU_PASSES = (
    "priority-fusion|multi_output_fusion|rename_fusions|triton-gemm-rewriter|triton-softmax-rewriter|config-assigner"
)
_CPU_PASSES = "fusion"

# XLA has measured GEMM tables for these two alone; for others the option fails with "Cannot find key: sm_80".
_COST_MODEL_CAPABILITIES = ((9, 0), (10, 0))

_NO_TOOLCHAIN = (
    "XLA found no working ptxas (or libdevice) and stopped before it had machine code: the launch sequence and the "
    "memory statistics are missing; the modules and the fusion decisions are there. Install nvidia-cuda-nvcc, which "
    "the extra 'deviceless' brings. XLA said: "
)

_XLA_FLAGS_IGNORED = (
    "XLA_FLAGS of the environment did not apply to this capture; pass compiler_options= to change how XLA compiles."
)


def capture(
    fn: Callable[..., Any],
    *shapes: Any,
    target: str | Path | Target = "h200",
    mode: Mode = "forward",
    compiler_options: Mapping[str, Any] | None = None,
    autotune: str | Path | None = "default",
    timeout: float = 300.0,
    label: str | None = None,
    keep: str | Path | None = None,
    lower_context: AbstractContextManager[Any] | None = None,
    measure: bool = False,
) -> Capture:
    """Compiles `fn` for a GPU, present or not, and keeps the compiler's stages, decisions, launches and memory.

    The function is traced here and compiled in another process, which may die without harm. It is never run, but for
    `measure`.

    Args:
      fn: any function that JAX can trace, jitted or not.
      *shapes: its arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them; only shape and dtype count, and a
        `NamedSharding` over several devices: the program is then compiled for as many, with the numbers of one.
      target: a name of `hlo_analysis.targets.target_names()`, "attached", "cpu", a path to a recorded target config, or
        a `Target`.
      mode: "forward" compiles `fn`. "grad" compiles what a training step does with it: its outputs, and the
        vector-Jacobian product for every floating-point argument, with the cotangents as one more argument.
      compiler_options: XLA's options by name, e.g. `{"xla_gpu_enable_triton_gemm": False}`; a list for a repeated one.
      autotune: whose choice of kernels to replay. "default": the recording shipped for the target, where there is one.
        A path: the recording in that file. None: no replay, so that XLA takes its default everywhere. The attached GPU
        tunes by itself, and only what a recording given by path does not know.
      timeout: seconds that XLA may take.
      label: a name for reports; the function's own by default.
      keep: a folder to write to, which must be empty or not exist. By default the files go when the Capture does.
      lower_context: entered while the function is traced.
      measure: also run the program, on the target "attached" or "cpu", with drawn arguments (see `capture/runner.py`),
        but with the integers and booleans of the arrays that were given: which rows a gather or a scatter touches
        decides its time. `analyze` then gives `Analysis.measured`.

    Raises:
      CaptureError: `fn` does not trace with these shapes, or XLA failed, died or took too long: with its last words.
      UnknownTargetError: no such target, or one that cannot be compiled for.
      UnknownOptionError: XLA has no such option.
    """
    from hlo_analysis.capture.lowering import (
        answers_of,
        lower,
    )  # here, so that `import hlo_analysis` does not import JAX

    if mode not in ("forward", "grad"):
        raise CaptureError(f"mode must be 'forward' or 'grad', not {mode!r}")
    goal = load_target(target)
    if goal.kind == "attached":
        goal = attached.attached_target()
    if measure and goal.kind == "cuda":
        raise CaptureError(f"{goal.name} is described, not attached: measure=True runs on target='attached' or 'cpu'")
    recording = autotuning.resolve(autotune, goal)
    given = {name: _option_value(name, value) for name, value in (compiler_options or {}).items()}
    folder, ours = _folder(keep)
    notes = [_XLA_FLAGS_IGNORED] if os.environ.get("XLA_FLAGS") else []
    finished = False
    try:
        with Worker(folder, _environment(goal)) as worker:
            program = lower(fn, shapes, target=goal, mode=mode, lower_context=lower_context)
            notes += program.notes
            options = _options(goal, folder, recording) | given
            if measure and goal.kind == "attached":
                # Else XLA launches one by one while it is profiled, with gaps that no run has.
                options = {"xla_enable_command_buffers_during_profiling": True} | options
            if measure:
                program.save_values(folder / ARGUMENTS)
            request = _request(goal, program, options, folder) | {"measure": measure}
            stated: dict[str, str] = {}
            with contextlib.ExitStack() as stack:
                if program.devices > 1:
                    request["partitions"] = stack.enter_context(answered(answers_of(goal), stated))
                result = worker.ask(request, timeout)
            if not result["ok"]:
                if not is_toolchain_failure(result["error"]):
                    raise compile_error(result, goal, worker.last_words())
                notes.append(_NO_TOOLCHAIN + first_sentence(result["error"]))
        manifest = assemble(
            folder,
            program,
            goal,
            result,
            mode=mode,
            label=label,
            notes=notes,
            options=given,
            recording=recording,
        )
        if stated and (final := manifest.files.get("final_hlo")):
            restate(folder / final, stated)
        write_manifest(folder, manifest)
        finished = True
        return Capture(folder, manifest, temporary=keep is None)
    finally:
        if not finished:
            _discard(folder, whole=ours)


def record_autotune(
    fn: Callable[..., Any],
    *shapes: Any,
    mode: Mode = "forward",
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
) -> str:
    """Tunes `fn` on the attached GPU and gives the choices made, in text form: a recording for `capture(autotune=...)`.

    Recordings of several programs are made one by `merge_autotune`. Arguments and errors are those of `capture`.
    """
    tuned = capture(
        fn, *shapes, target="attached", mode=mode, compiler_options=compiler_options, autotune=None, timeout=timeout
    )
    text = tuned.text("autotune_results")
    if text is None:
        raise CaptureError(f"XLA recorded no autotuning of {tuned.provenance.function}: it had nothing to choose")
    autotuning.entries(text)
    return text


def _folder(keep: str | Path | None) -> tuple[Path, bool]:
    """The folder to write to, and whether it is ours to remove."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="hlo_capture_")), True
    folder = Path(keep).absolute()
    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"keep={str(keep)!r}: expected a folder that is empty or does not exist yet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CaptureError(f"keep={str(keep)!r}: the folder cannot be written: {error}") from error
    return folder, not existed


def _discard(folder: Path, *, whole: bool) -> None:
    if whole:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _environment(target: Target) -> dict[str, str]:
    return dict(attached.ENVIRONMENT) if target.kind == "attached" else {"JAX_PLATFORMS": "cpu"}


def _options(target: Target, folder: Path, recording: Path | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "xla_dump_to": str(folder / DUMP),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": _CPU_PASSES if target.kind == "cpu" else _GPU_PASSES,
    }
    if target.kind == "cpu":
        return options
    options["xla_dump_emitter_re"] = "ptx"  # of which ptxas tells the registers
    if target.compute_capability in _COST_MODEL_CAPABILITIES:
        options["xla_gpu_collect_cost_model_stats"] = True
    if recording is not None:
        options["xla_gpu_load_autotune_results_from"] = str(recording)
    if target.kind == "attached":
        options["xla_gpu_dump_autotune_results_to"] = str(folder / autotuning.RESULTS_NAME)
    return options


def _request(target: Target, program: Lowered, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    (folder / MODULE).write_bytes(program.bytecode)
    environment: dict[str, str] = {}
    if target.kind != "cpu" and b"mosaic_gpu" in program.bytecode:
        (folder / MOSAIC).mkdir()
        environment["MOSAIC_GPU_DUMP_TO"] = str(folder / MOSAIC)
    return {
        "kind": target.kind,
        "target_config": target.config_text,
        "module": MODULE,
        "devices": program.devices,
        "options": list(options.items()),
        "environment": environment,
    }


def _option_value(name: str, value: Any) -> bool | int | float | str:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):  # a repeated field takes its items joined by commas
        return ",".join(str(item) for item in value)
    raise CaptureError(f"compiler option {name}: expected a bool, number, string or list, got {value!r}")
