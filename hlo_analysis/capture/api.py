"""`capture`: compile any JAX function in a process of its own and keep what XLA says about it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hlo_analysis.capture import artefacts
from hlo_analysis.capture import autotune as autotuning
from hlo_analysis.capture.archive import Capture, Manifest, write_manifest
from hlo_analysis.capture.attached import attached_target
from hlo_analysis.capture.failures import compile_error, is_missing_ptxas
from hlo_analysis.capture.lowering import Lowered, lower
from hlo_analysis.capture.process import LOG_NAME, Worker
from hlo_analysis.errors import CaptureError
from hlo_analysis.records import Memory, Provenance
from hlo_analysis.targets import Target, load_target

# One dump before and one after each pass that decides about fusion: some 28 files, half a megabyte.
_GPU_PASSES = (
    "priority-fusion|multi_output_fusion|rename_fusions|triton-gemm-rewriter|triton-softmax-rewriter|config-assigner"
)
_CPU_PASSES = "fusion"


def capture(
    fn: Callable[..., Any],
    *shapes: Any,
    target: str | Path | Target = "h200",
    mode: Literal["forward", "grad"] = "forward",
    compiler_options: Mapping[str, Any] | None = None,
    autotune: str | Path | None = "default",
    timeout: float = 300.0,
    label: str | None = None,
    keep: str | Path | None = None,
    lower_context: AbstractContextManager[Any] | None = None,
    emit_ptx: bool = False,
) -> Capture:
    """Compiles `fn` for a GPU, present or not, and keeps the compiler's stages, decisions, launches and memory.

    The function is traced here and compiled in another process, which may die without harm. It is never run.

    Args:
      fn: any function that JAX can trace, jitted or not.
      *shapes: its arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them; only shape and dtype count.
      target: a name of `hlo_analysis.targets.target_names()`, "attached", "cpu", a path to a recorded target config, or
        a `Target`.
      mode: "forward" compiles `fn`. "grad" compiles what a training step does with it: its outputs, and the
        vector-Jacobian product for every floating-point argument, with the cotangents as one more argument.
      compiler_options: XLA's options by name, e.g. `{"xla_gpu_enable_triton_gemm": False}`.
      autotune: whose choice of GEMM kernels to replay. "default": the recording shipped for the target, where there is
        one. A path: the recording in that file. None: no replay, so that XLA takes its default for every GEMM. Without
        meaning for "attached" (which tunes) unless a path, and for "cpu".
      timeout: seconds that XLA may take.
      label: a name for reports; the function's own by default.
      keep: a folder to write to, which must be empty or not exist. By default the files go when the Capture does.
      lower_context: entered while the function is traced.
      emit_ptx: keep the PTX of XLA's own kernels, and what ptxas says of their registers and spills.

    Raises:
      CaptureError: `fn` does not trace with these shapes, or XLA failed, died or took too long: with its last words.
      UnknownTargetError: no such target, or one that cannot be compiled for.
      UnknownOptionError: XLA has no such option; with the nearest names.
    """
    if mode not in ("forward", "grad"):
        raise CaptureError(f"mode must be 'forward' or 'grad', not {mode!r}")
    goal = load_target(target)
    if goal.kind == "attached":
        goal = attached_target()
    recording = autotuning.resolve(autotune, goal)
    folder = _folder(keep)
    finished = False
    try:
        with Worker(folder, _environment(goal, folder)) as worker:
            program = lower(fn, shapes, target=goal, mode=mode, lower_context=lower_context)
            options = _options(goal, folder, recording, emit_ptx=emit_ptx)
            request = _request(goal, program, {**options, **(compiler_options or {})}, folder)
            result = worker.compile(request, timeout)
            notes: list[str] = []
            if not result["ok"]:
                if not is_missing_ptxas(result["error"]):
                    raise compile_error(result, goal, worker.last_words())
                notes.append(_NO_PTXAS)
        manifest = _manifest(
            folder,
            program,
            goal,
            result,
            mode=mode,
            label=label,
            notes=notes,
            options=compiler_options or {},
            recording=recording,
        )
        write_manifest(folder, manifest)
        finished = True
        return Capture(folder, manifest, temporary=keep is None)
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)


_NO_PTXAS = (
    "ptxas was not found or failed, so XLA stopped before it had machine code: launches, memory and the final module are "
    "missing, fusion decisions are there. Install nvidia-cuda-nvcc (xlafuse[deviceless])."
)


def _folder(keep: str | Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="hlo_capture_"))
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError(f"keep={str(keep)!r}: expected a folder that is empty or does not exist yet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").touch()
        (folder / ".probe").unlink()
    except OSError as error:
        raise CaptureError(f"keep={str(keep)!r}: the folder cannot be written: {error}") from error
    return folder.absolute()


def _environment(target: Target, folder: Path) -> dict[str, str]:
    if target.kind == "attached":
        # The parent may hold most of the GPU's memory: take what the tuning needs, when it needs it.
        return {
            "JAX_PLATFORMS": "cuda,cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "MOSAIC_GPU_DUMP_TO": _mosaic_folder(folder),
        }
    if target.kind == "cuda":
        return {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": _mosaic_folder(folder)}
    return {"JAX_PLATFORMS": "cpu"}


def _mosaic_folder(folder: Path) -> str:
    mosaic = folder / "mosaic"
    mosaic.mkdir()
    return str(mosaic)


def _options(target: Target, folder: Path, recording: Path | None, *, emit_ptx: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "xla_dump_to": str(folder / "dump"),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": _CPU_PASSES if target.kind == "cpu" else _GPU_PASSES,
    }
    if target.kind == "cpu":
        return options
    if target.compute_capability in ((9, 0), (10, 0)):
        # XLA has measured GEMM tables for these two alone; for others the option fails: "Cannot find key: sm_80".
        options["xla_gpu_collect_cost_model_stats"] = True
    if recording is not None:
        options["xla_gpu_load_autotune_results_from"] = str(recording)
    if target.kind == "attached":
        options["xla_gpu_dump_autotune_results_to"] = str(folder / autotuning.RESULTS_NAME)
    if emit_ptx:
        options["xla_dump_emitter_re"] = ".*"
    return options


def _request(target: Target, program: Lowered, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "module.mlirbc").write_bytes(program.bytecode)
    return {
        "kind": target.kind,
        "target_config": target.config_text,
        "module": "module.mlirbc",
        "options": [[name, _option_value(name, value)] for name, value in options.items()],
    }


def _option_value(name: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):  # a repeated field takes its items joined by commas
        return ",".join(str(item) for item in value)
    raise CaptureError(f"compiler option {name}: expected a bool, number, string or list, got {value!r}")


def _manifest(
    folder: Path,
    program: Lowered,
    target: Target,
    result: Mapping[str, Any],
    *,
    mode: str,
    label: str | None,
    notes: list[str],
    options: Mapping[str, Any],
    recording: Path | None,
) -> Manifest:
    module, names = artefacts.main_module(folder / "dump")
    files = {key: f"dump/{name}" for key, name in artefacts.index(module, names).items()}
    files |= {"stablehlo": "module.mlirbc", "worker_log": LOG_NAME}
    if (folder / autotuning.RESULTS_NAME).is_file():
        files["autotune_results"] = autotuning.RESULTS_NAME
    log = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace")
    gemms = (
        autotuning.describe(
            log, (folder / files["before_config_assignment"]).read_text(encoding="utf-8"), target, recording
        )
        if "before_config_assignment" in files
        else autotuning.GemmReplay()
    )
    notes += gemms.notes
    memory = result.get("memory", {})
    return Manifest(
        label=label or program.function,
        target=target.name,
        kind=target.kind,
        device=target.device,
        device_kind=target.device_kind,
        core_count=target.core_count,
        compute_capability=target.compute_capability,
        module=module,
        complete=bool(result["ok"]),
        memory=_memory(memory),
        provenance=Provenance(
            function=program.function,
            mode=mode,
            arguments=program.arguments,
            target=target.name,
            gemm_choice=gemms.choice,
            autotune_hits=gemms.hits,
            autotune_lookups=gemms.lookups,
            compiler_options=tuple((name, str(value)) for name, value in options.items()),
            versions=tuple(result["versions"].items()),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            compile_seconds=round(float(result["seconds"]), 3),
            notes=tuple(notes),
        ),
        files=files,
        dump="dump",
    )


def _memory(stats: Mapping[str, int]) -> Memory:
    if not stats:
        return Memory()
    counted = stats["argument_bytes"] + stats["output_bytes"] + stats["temp_bytes"] - stats["alias_bytes"]
    return Memory(
        argument_bytes=stats["argument_bytes"],
        output_bytes=stats["output_bytes"],
        temp_bytes=stats["temp_bytes"],
        peak_bytes=stats["peak_bytes"] or counted,
    )
